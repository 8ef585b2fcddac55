"""kt-kernel's ``MXFP4_SFT`` layer in a process of its own, which is stopped when it has no turn.

Its worker threads go on looking for work after a call and would take the cores from whoever is
timed next. It computes SwiGLU in SiTU's place, as it has no other.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from cpu_peers import Pass, with_tokens
from moe import Operands

from k3tune_kernels.moe_lora import PackedWeight

# Its own output is mixed with what the library prints.
MARK = "@turn"
PASSES = ("forward", "both")


class NotHere(Exception):
    """The layer cannot be measured; the message says why."""


@contextlib.contextmanager
def kt_kernel(sizes: dict[str, int], tokens: int) -> Iterator[tuple[Pass, Pass]]:
    """The forward alone, and the forward with every gradient, of a layer with bf16 operands.

    Raises:
        NotHere: if kt-kernel is not installed, or fails on these sizes.
    """
    command = [sys.executable, __file__, json.dumps({"sizes": sizes, "tokens": tokens})]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"

        def turn(name: str) -> None:
            process.send_signal(signal.SIGCONT)
            print(name, file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith(MARK):
                    process.send_signal(signal.SIGSTOP)
                    # nobody is timed before it stands; a stop is left to be waited for again
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                    return
            raise NotHere(_last_line(process))

        try:
            for name in PASSES:
                turn(name)
            yield lambda: turn(PASSES[0]), lambda: turn(PASSES[1])
        finally:
            process.kill()


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines = process.stderr.read().strip().splitlines()
    return lines[-1][:100] if lines else f"ended with status {process.wait()}"


def layer_passes(o: Operands, grad: torch.Tensor) -> tuple[Pass, Pass]:
    """Both passes of kt-kernel's layer over these operands."""
    from kt_kernel import KTMoEWrapper

    experts, hidden, half = o.gate.packed.shape
    rank = o.lora[0].A.shape[1]
    layer = KTMoEWrapper(
        layer_idx=0,
        num_experts=experts,
        num_experts_per_tok=o.ids_NA.shape[1],
        hidden_size=2 * half,
        moe_intermediate_size=hidden,
        gpu_experts_mask=None,
        cpuinfer_threads=torch.get_num_threads(),
        threadpool_count=1,
        weight_path="",
        chunked_prefill_size=max(len(o.x_ND), 32),
        method="MXFP4_SFT",
        mode="sft",
        lora_rank=rank,
        lora_alpha=o.lora[0].scaling * rank,
        group_size=32,
        zero_point=False,
        swiglu_limit=100.0,
    )

    def bf16_scale(weight: PackedWeight) -> list[torch.Tensor]:
        return list(torch.exp2(weight.scale.float() - 127).bfloat16().unbind(0))

    tensors: dict[str, list[torch.Tensor]] = {}
    for name, weight in zip(("gate", "up", "down"), o[3:6], strict=True):
        tensors |= {name: list(weight.packed.unbind(0)), f"{name}_scale": bf16_scale(weight)}
    factors = [tensor.detach().bfloat16().contiguous() for pair in o.lora for tensor in pair[:2]]
    layer.init_lora_weights(*factors, *map(torch.zeros_like, factors))
    layer.load_mxfp4_weights(tensors, torch.arange(experts))
    x, ids, weights = o.x_ND.detach(), o.ids_NA, o.weights_NA.detach().float()

    def forward(save: bool) -> torch.Tensor:
        return layer.forward(x, ids, weights, save_for_backward=save)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        forward(True)
        return layer.backward(grad)

    return lambda: forward(False), both


def main() -> None:
    """Run the pass that each line of the input names."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    o = with_tokens(asked["sizes"], asked["tokens"], torch.bfloat16)
    passes = dict(zip(PASSES, layer_passes(o, torch.randn_like(o.x_ND)), strict=True))
    for line in sys.stdin:
        passes[line.strip()]()
        print(f"\n{MARK}", flush=True)


if __name__ == "__main__":
    main()
