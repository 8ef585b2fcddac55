"""Kernels of Kimi K3 fine-tuning: one folder an op, each with a plain-torch reference.

An op's public function lives in its folder (``k3tune_kernels.moe_lora.moe_lora`` and so on);
:mod:`k3tune_kernels.dispatch` decides which implementation runs and can say why.
"""
