"""Workloads of SiTU-GLU, the attention-residual mixer and the chunked loss."""

from importlib.util import find_spec

import torch
from workload import OURS, PASSES, Candidate, Cost, Workload

from k3tune_kernels.attention_residual import attention_residual
from k3tune_kernels.linear_cross_entropy import linear_cross_entropy
from k3tune_kernels.situ_glu import situ_glu

EPS = 1e-5


def _costs(
    forward_flops: float, forward_bytes: float, training_flops: float, training_bytes: float
) -> dict[str, Cost]:
    values = (Cost(forward_flops, forward_bytes), Cost(training_flops, training_bytes))
    return dict(zip(PASSES, values, strict=True))


def situ_glu_workload(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Workload:
    """Against the equation as torch operations."""
    shape = (sizes["tokens"], sizes["width"])
    gate, up = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(2))

    def eager() -> torch.Tensor:
        g, u = gate.float(), up.float()
        return (4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))).to(dtype)

    tensor_bytes = gate.numel() * gate.element_size()
    return Workload(
        candidates=(
            Candidate(OURS, lambda: situ_glu(gate, up, beta=4.0, linear_beta=25.0)),
            Candidate("torch operations", eager),
        ),
        leaves=(gate, up),
        grad=torch.randn(shape, device=device, dtype=dtype),
        # forward: gate, up, h; backward: dh, gate, up, dgate, dup
        costs=_costs(0, 3 * tensor_bytes, 0, 8 * tensor_bytes),
    )


def attention_residual_workload(
    sizes: dict[str, int], device: torch.device, dtype: torch.dtype
) -> Workload:
    """Against the equation as torch operations over the stacked sources."""
    num_sources, shape = sizes["sources"], (sizes["tokens"], sizes["width"])
    sources = [
        torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(num_sources)
    ]
    norm = torch.rand(shape[1], device=device, dtype=dtype) + 0.5
    query = torch.randn(shape[1], device=device, dtype=dtype) / shape[1] ** 0.5

    def eager() -> torch.Tensor:
        stack = torch.stack(sources).float()
        scores = (stack * (norm.float() * query.float())).sum(-1)
        scores = scores * torch.rsqrt(stack.square().mean(-1) + EPS)
        return (torch.softmax(scores, 0)[..., None] * stack).sum(0).to(dtype)

    tensor_bytes = sources[0].numel() * sources[0].element_size()
    forward_bytes = (num_sources + 1) * tensor_bytes
    return Workload(
        candidates=(
            Candidate(OURS, lambda: attention_residual(sources, norm, query, eps=EPS)),
            Candidate("torch operations, stacked", eager),
        ),
        leaves=sources,
        grad=torch.randn(shape, device=device, dtype=dtype),
        # backward: the gradient and every source in, every source's gradient out
        costs=_costs(0, forward_bytes, 0, forward_bytes + (2 * num_sources + 1) * tensor_bytes),
    )


def linear_cross_entropy_workload(
    sizes: dict[str, int], device: torch.device, dtype: torch.dtype
) -> Workload:
    """Frozen head, against torch with all logits and, where installed, TRL's fused head."""
    tokens, width, vocabulary = sizes["tokens"], sizes["width"], sizes["vocabulary"]
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def all_logits() -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    candidates = [
        Candidate(OURS, lambda: linear_cross_entropy(hidden, weight, targets)),
        Candidate("torch, all logits", all_logits),
    ]
    absent = {}
    if find_spec("trl"):
        from trl.kernels import ChunkedLogProbFunction

        def trl_head() -> torch.Tensor:
            arguments = (hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("log_probs",))
            return -ChunkedLogProbFunction.apply(*arguments)[0]

        candidates.append(Candidate("TRL fused head", trl_head))
    else:
        absent["TRL fused head"] = "trl is not installed"
    product = 2 * tokens * width * vocabulary
    moved = hidden.element_size() * (weight.numel() + hidden.numel())
    return Workload(
        candidates=candidates,
        leaves=(hidden,),
        grad=torch.full((tokens,), 1 / tokens, device=device),
        costs=_costs(product, moved, 2 * product, 2 * moved),
        absent=absent,
    )
