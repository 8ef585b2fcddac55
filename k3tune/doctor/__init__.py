"""``k3tune doctor``: what this machine can run, what stands in the way, and the next step.

:mod:`k3tune.doctor.examination` asks everything; each other module answers one question with
:class:`~k3tune.doctor.finding.Finding` s.
"""
