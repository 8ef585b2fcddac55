"""What trains k3-nano from scratch: Muon for matrices, AdamW for the rest, Quantile Balancing.

Shape letters: ``P`` matrices of one shape, ``O`` / ``I`` their rows and columns, ``N`` tokens,
``E`` experts, ``A`` active experts a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3tune.model import K3ForCausalLM
from k3tune.model.kda import KimiDeltaAttention
from k3tune.model.latent_moe import LatentMoE, Router, Routing

# Coefficients of the quintic iteration that drives singular values towards 1 (Muon, K. Jordan).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_ADAM_BETAS = (0.9, 0.95)
_ADAM_EPS = 1e-8


class Rates(NamedTuple):
    """Learning rates at the start; both fall to zero together."""

    muon: float = 0.02
    adam: float = 3e-3
    momentum: float = 0.95
    weight_decay: float = 0.1


@torch.no_grad()
def orthogonalize(matrices_POI: Tensor) -> Tensor:
    """Move the singular values of every matrix near 1, keeping its singular vectors.

    Five Newton-Schulz iterations: values end between about 0.7 and 1.2, which is as good as 1.
    """
    tall = matrices_POI.shape[-2] > matrices_POI.shape[-1]
    x = matrices_POI.mT if tall else matrices_POI
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if tall else x


class NanoOptimizer:
    """Muon over all matrices of one shape at a time, AdamW over everything else.

    Query, key and value projections of KDA count as one matrix a head, stacked experts as one an
    expert. Embedding, head, router and all vectors are AdamW's.

    Args:
        model: with trainable experts.
        rates: peak learning rates.
    """

    def __init__(self, model: K3ForCausalLM, rates: Rates) -> None:
        self.rates = rates
        heads = {
            id(projection.weight): module.num_heads
            for module in model.modules()
            if isinstance(module, KimiDeltaAttention)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        }
        kept_from_muon = {id(model.lm_head.weight), id(model.model.embed_tokens.weight)}
        kept_from_muon |= {
            id(module.weight) for module in model.modules() if isinstance(module, Router)
        }
        self._by_shape: dict[tuple[int, int], list[Tensor]] = {}
        self._vectors: list[Tensor] = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            rows, columns = parameter.shape[-2:] if parameter.ndim > 1 else (1, 1)
            if min(rows, columns) == 1 or id(parameter) in kept_from_muon:
                self._vectors.append(parameter)
                continue
            shape = (rows // heads.get(id(parameter), 1), columns)
            self._by_shape.setdefault(shape, []).append(parameter)
        self._momentum = {
            shape: torch.zeros(sum(p.numel() for p in group) // (shape[0] * shape[1]), *shape)
            for shape, group in self._by_shape.items()
        }
        self._first = [torch.zeros_like(p) for p in self._vectors]
        self._second = [torch.zeros_like(p) for p in self._vectors]
        self.steps = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients with rates times ``factor``, and drop them."""
        self.steps += 1
        for shape, group in self._by_shape.items():
            self._muon(shape, group, factor)
        self._adam(factor)
        for parameter in (*self._vectors, *(p for g in self._by_shape.values() for p in g)):
            parameter.grad = None

    def _muon(self, shape: tuple[int, int], group: list[Tensor], factor: float) -> None:
        grad_POI = torch.cat([_gradient(p).view(-1, *shape) for p in group])
        momentum_POI = self._momentum[shape]
        momentum_POI.lerp_(grad_POI, 1 - self.rates.momentum)
        # Nesterov: look one step ahead
        update_POI = orthogonalize(grad_POI.lerp_(momentum_POI, self.rates.momentum))
        rate = self.rates.muon * factor
        step = rate * max(1.0, shape[0] / shape[1]) ** 0.5
        start = 0
        for parameter in group:
            stop = start + parameter.numel() // (shape[0] * shape[1])
            parameter.mul_(1 - rate * self.rates.weight_decay)
            parameter.sub_(update_POI[start:stop].reshape(parameter.shape), alpha=step)
            start = stop

    def _adam(self, factor: float) -> None:
        fast, slow = _ADAM_BETAS
        grads = [_gradient(p) for p in self._vectors]
        torch._foreach_lerp_(self._first, grads, 1 - fast)
        torch._foreach_mul_(self._second, slow)
        torch._foreach_addcmul_(self._second, grads, grads, value=1 - slow)
        scale = (1 - slow**self.steps) ** 0.5 / (1 - fast**self.steps)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_add_(roots, _ADAM_EPS)
        rate = self.rates.adam * factor * scale
        torch._foreach_addcdiv_(self._vectors, self._first, roots, value=-rate)

    def state(self) -> dict[str, Tensor]:
        """Everything but the parameters, as named tensors."""
        state = {"steps": torch.tensor(self.steps)}
        state |= {f"momentum.{o}x{i}": value for (o, i), value in self._momentum.items()}
        for name, values in (("first", self._first), ("second", self._second)):
            state |= {f"{name}.{index}": value for index, value in enumerate(values)}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state` gave; names and shapes must be the same."""
        own = self.state()
        if own.keys() != state.keys():
            raise ValueError(f"expected the optimizer's {len(own)} tensors, found {len(state)}")
        for name, value in own.items():
            value.copy_(state[name])
        self.steps = int(state["steps"])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class QuantileBalancer:
    """Sets each router's bias so that every expert would have had its share of the last step.

    With the (A + 1)-th biased score of a token as its cutoff, an expert's new bias is the one that
    puts as many tokens above the cutoff as a uniform load would (K3 tech report, section 2.3.3).

    Attributes:
        load_LE: smoothed share of the routed tokens, ``[layers, E]``, 1 for uniform.
    """

    def __init__(self, model: K3ForCausalLM, smoothing: float = 0.7) -> None:
        self.smoothing = smoothing
        self.routers = [module.gate for module in model.modules() if isinstance(module, LatentMoE)]
        num_experts = len(self.routers[0].e_score_correction_bias)
        self.load_LE = torch.ones(len(self.routers), num_experts)
        self.counted: Tensor | None = None
        self._cutoff_gaps: list[list[Tensor]] = [[] for _ in self.routers]
        self._counts_LE = torch.zeros_like(self.load_LE)
        for index, router in enumerate(self.routers):
            router.e_score_correction_bias.requires_grad_(False)
            router.register_forward_hook(self._observer(index))

    def _observer(self, index: int):
        @torch.no_grad()
        def observe(router: Router, inputs: tuple[Tensor, ...], output: Routing) -> None:
            if not router.training or self.counted is None:
                return
            scores_NE = (inputs[0][self.counted] @ router.weight.T).sigmoid()
            biased_NE = scores_NE + router.e_score_correction_bias
            active = router.num_experts_per_token
            cutoff_N1 = biased_NE.topk(active + 1).values[:, -1:]
            self._cutoff_gaps[index].append(scores_NE - cutoff_N1)
            ids = output.expert_ids[self.counted].flatten()
            self._counts_LE[index] += ids.bincount(minlength=self.load_LE.shape[1])

        return observe

    @torch.no_grad()
    def step(self) -> None:
        """Set the biases from what was observed since the last call."""
        for router, gaps in zip(self.routers, self._cutoff_gaps, strict=True):
            gap_NE = torch.cat(gaps)
            share = router.num_experts_per_token / gap_NE.shape[1]
            bias_E = -gap_NE.quantile(1 - share, dim=0)
            bias = router.e_score_correction_bias
            bias.lerp_(bias_E - bias_E.mean(), 1 - self.smoothing)
            gaps.clear()
        load_LE = self._counts_LE / self._counts_LE.mean(1, keepdim=True)
        self.load_LE.lerp_(load_LE, 0.05)
        self._counts_LE.zero_()
