"""Native kernels for CPUs: a shared library with a C interface, built by the package build.

:mod:`k3tune_kernels.cpu.build` builds it, :mod:`k3tune_kernels.cpu.library` finds and loads it. An
op's own door to it lies in the op's folder (``moe_lora/cpu_op.py``). Where there is no library
everything runs on the plain-torch reference.
"""
