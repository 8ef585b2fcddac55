"""Workloads of the routed experts with LoRA, and the ways others compute them."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from workload import OURS, PASSES, Candidate, Cost, Workload

from k3tune_kernels.moe_lora import LoraFactors, MoELora, PackedWeight, Situ, moe_lora
from k3tune_kernels.mxfp4 import decode
from k3tune_kernels.situ_glu import situ_glu

SITU = Situ(beta=4.0, linear_beta=25.0)
WITHOUT_LORA = "k3tune, no LoRA"
# alpha / rank
SCALING = 2.0


class Operands(NamedTuple):
    """Letters: N tokens, A experts a token, D latent width, F expert width, E experts, R rank."""

    x_ND: torch.Tensor
    ids_NA: torch.Tensor
    weights_NA: torch.Tensor
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    lora: tuple[LoraFactors, LoraFactors, LoraFactors]


def operands(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Operands:
    """Random operands; each token's experts are drawn without replacement."""
    num_experts, active = sizes["experts"], sizes["active"]
    width, hidden, rank = sizes["width"], sizes["hidden"], sizes["rank"]
    tokens = max(num_experts * sizes["tokens_per_expert"] // active, 1)

    def packed(rows: int, columns: int) -> PackedWeight:
        def draw(low: int, high: int, group: int) -> torch.Tensor:
            shape = (num_experts, rows, columns // group)
            return torch.randint(low, high, shape, device=device, dtype=torch.uint8)

        # exponents of a layer whose outputs are about the size of its inputs
        return PackedWeight(draw(0, 256, 2), draw(118, 121, 32))

    def factors(rows: int, columns: int) -> LoraFactors:
        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, device=device) / shape[-1] ** 0.5
            return values.to(dtype).requires_grad_()

        return LoraFactors(draw(num_experts, rank, columns), draw(num_experts, rows, rank), SCALING)

    drawn = torch.rand(tokens, num_experts, device=device).topk(active, dim=1)
    return Operands(
        x_ND=torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_(),
        ids_NA=drawn.indices,
        weights_NA=torch.softmax(drawn.values, 1).requires_grad_(),
        gate=packed(hidden, width),
        up=packed(hidden, width),
        down=packed(width, hidden),
        lora=(factors(hidden, width), factors(hidden, width), factors(width, hidden)),
    )


class _FrozenGroupedProduct(torch.autograd.Function):
    """``rows @ W[e].T`` of sorted rows; asks for W again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MI: torch.Tensor,
        ends_E: torch.Tensor,
        weight: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        ctx.weight = weight
        return torch.nn.functional.grouped_mm(rows_MI, weight().transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_MO: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        grad_MO = grad_MO.contiguous()
        return torch.nn.functional.grouped_mm(grad_MO, ctx.weight(), offs=ends_E), None, None


def _sorted_rows(o: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order of the routed rows by expert, their tokens, and the end of each expert's rows."""
    sorted_ids, order = o.ids_NA.flatten().sort(stable=True)
    experts = torch.arange(len(o.gate.packed), device=sorted_ids.device)
    ends_E = torch.searchsorted(sorted_ids, experts, right=True).int()
    return order, order // o.ids_NA.shape[1], ends_E


def _weighted_sum(
    o: Operands, y_MD: torch.Tensor, order: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    weighted = y_MD.float() * o.weights_NA.flatten()[order, None]
    out = torch.zeros(o.x_ND.shape, dtype=torch.float32, device=y_MD.device)
    return out.index_add(0, token, weighted).to(o.x_ND.dtype)


def grouped_torch(
    o: Operands, weight: Callable[[PackedWeight], Callable[[], torch.Tensor]]
) -> torch.Tensor:
    """Torch's grouped matmul over weights that ``weight`` makes or keeps."""
    order, token, ends_E = _sorted_rows(o)

    def project(rows: torch.Tensor, packed: PackedWeight, lora: LoraFactors) -> torch.Tensor:
        grouped_mm = torch.nn.functional.grouped_mm
        shrunk = grouped_mm(rows, lora.A.transpose(1, 2), offs=ends_E)
        update = grouped_mm(shrunk, lora.B.transpose(1, 2), offs=ends_E)
        base = _FrozenGroupedProduct.apply(rows, ends_E, weight(packed))
        return base + lora.scaling * update

    rows = o.x_ND[token]
    gate, up = project(rows, o.gate, o.lora[0]), project(rows, o.up, o.lora[1])
    hidden = situ_glu(gate, up, beta=SITU.beta, linear_beta=SITU.linear_beta)
    return _weighted_sum(o, project(hidden, o.down, o.lora[2]), order, token)


def axolotl_fused(o: Operands) -> torch.Tensor:
    """axolotl's ScatterMoE with LoRA over packed weights, all experts taken as active.

    Its other mode (dequantise, then grouped GEMM) takes NVFP4 and SwiGLU only: what it would do
    here is :func:`grouped_torch`.
    """
    from axolotl.integrations.kernels.libs.scattermoe_lora import mx_weights, parallel_experts
    from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_linear_lora import (
        parallel_linear_lora,
    )

    num_experts, active = len(o.gate.packed), o.ids_NA.shape[1]
    routing = parallel_experts.flatten_sort_count(o.ids_NA, num_experts)

    def project(
        rows: torch.Tensor, packed: PackedWeight, lora: LoraFactors, fan_out: int, **options: Any
    ) -> torch.Tensor:
        rows_out, columns = packed.packed.shape[1], 2 * packed.packed.shape[2]
        weights = mx_weights.MXWeights(packed.packed, packed.scale, K=columns, N=rows_out)
        # its layout: [E R, I] and [O, E R], experts one after the other
        lora_A, lora_B = lora.A.flatten(0, 1), lora.B.transpose(0, 1).flatten(1, 2)
        factors = {"lora_A": lora_A, "lora_B": lora_B, "scaling": lora.scaling}
        return parallel_linear_lora(rows, weights, fan_out, *routing, **factors, **options)

    gate = project(o.x_ND, o.gate, o.lora[0], active, grouped_out=True)
    up = project(o.x_ND, o.up, o.lora[1], active, grouped_out=True)
    hidden = situ_glu(gate, up, beta=SITU.beta, linear_beta=SITU.linear_beta)
    gates = o.weights_NA.to(o.x_ND.dtype)
    return project(hidden, o.down, o.lora[2], 1, grouped_in=True, gates=gates)


def triton_kernels_forward(o: Operands) -> torch.Tensor:
    """OpenAI's triton_kernels over packed weights as they are published, without LoRA."""
    from triton_kernels.matmul import PrecisionConfig, matmul
    from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata

    order, token, ends_E = _sorted_rows(o)
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    ragged = make_ragged_tensor_metadata(counts_E, len(order))

    def project(rows: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        precision = PrecisionConfig(b_mx_scale=packed.scale.transpose(1, 2))
        weight = packed.packed.transpose(1, 2)
        return matmul(rows, weight, None, a_ragged_metadata=ragged, precision_config=precision)

    rows = o.x_ND[token]
    gate, up = project(rows, o.gate), project(rows, o.up)
    hidden = situ_glu(gate, up, beta=SITU.beta, linear_beta=SITU.linear_beta)
    return _weighted_sum(o, project(hidden, o.down), order, token)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _peers(o: Operands, device: torch.device) -> tuple[list[Candidate], dict[str, str]]:
    """The peers that can run here, and why the others cannot."""
    known = (
        ("axolotl scattermoe_lora, fused", "axolotl", axolotl_fused, True, OURS),
        ("triton_kernels, no LoRA", "triton_kernels", triton_kernels_forward, False, WITHOUT_LORA),
    )
    present, absent = [], {}
    for name, module, run, differentiable, same_as in known:
        if not _installed(module):
            absent[name] = f"{module} is not installed"
        elif device.type != "cuda":
            absent[name] = "needs a GPU"
        else:
            present.append(Candidate(name, partial(run, o), differentiable, same_as))
    return present, absent


def _costs(sizes: dict[str, int], o: Operands) -> dict[str, Cost]:
    """Each expert's packed weights once a pass, and the token rows in and out.

    The arithmetic counts each projection once forward and once for dX; what LoRA adds is left
    out, and so is what a backward pass recomputes.
    """
    rows = o.ids_NA.numel()
    expert_values = 3 * sizes["width"] * sizes["hidden"]
    flops = 2 * rows * expert_values
    touched = min(sizes["experts"], rows)
    moved = touched * expert_values * 4.25 / 8 + 2 * o.x_ND.numel() * o.x_ND.element_size()
    return dict(zip(PASSES, (Cost(flops, moved), Cost(2 * flops, 2 * moved)), strict=True))


def moe_lora_workload(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Workload:
    """Against dequantising all experts, BF16-resident weights, and the peers installed."""
    o = operands(sizes, device, dtype)
    resident = {
        id(packed): decode(packed.packed, packed.scale, dtype) for packed in (o.gate, o.up, o.down)
    }

    def ours(lora: MoELora | None) -> torch.Tensor:
        return moe_lora(o.x_ND, o.ids_NA, o.weights_NA, *o[3:6], lora, situ=SITU)

    def dequantise_all() -> torch.Tensor:
        return grouped_torch(o, lambda packed: lambda: decode(packed.packed, packed.scale, dtype))

    def weights_resident() -> torch.Tensor:
        return grouped_torch(o, lambda packed: lambda: resident[id(packed)])

    present, absent = _peers(o, device)
    factors = [tensor for pair in o.lora for tensor in pair[:2]]
    return Workload(
        candidates=(
            Candidate(OURS, lambda: ours(MoELora(*o.lora))),
            Candidate(WITHOUT_LORA, lambda: ours(None), same_as=WITHOUT_LORA),
            Candidate("dequantise all + grouped GEMM", dequantise_all),
            Candidate(f"resident {str(dtype).removeprefix('torch.')} weights", weights_resident),
            *present,
        ),
        leaves=(o.x_ND, o.weights_NA, *factors),
        grad=torch.randn(o.x_ND.shape, device=device, dtype=dtype),
        costs=_costs(sizes, o),
        absent=absent,
    )
