"""These tests run in a process of their own: see ``tests/kernels/test_interpreted.py``."""

from k3tune_kernels.dispatch import interpreting

collect_ignore_glob = [] if interpreting() else ["test_*"]
