"""One layer of random experts, and tokens for it: unequal numbers, none, experts without any."""

import torch
import torch.distributed as dist

from checkpoints import make_config
from k3tune.model.latent_moe import RoutedExperts
from k3tune.parallel.dispatch import DispatchOptions
from k3tune.published.architecture import parse_config

NUM_EXPERTS, ACTIVE = 7, 3
PLACED = {0: (1, 0, 1, 0, 1, 0, 1)}
OPTIONS = {
    "contiguous": DispatchOptions(),
    "placed": DispatchOptions(),
    "deduplicated": DispatchOptions(deduplicate=True),
    "mxfp8": DispatchOptions(mxfp8=True),
}
TOKENS = {"some": (9, 5), "none_on_one": (0, 6), "none": (0, 0), "one_rank": (4, 3)}
"""Tokens of each process; those of ``one_rank`` go to the experts 0 to 2 alone."""


def architecture():
    """Of the layer."""
    return parse_config(make_config(num_experts=NUM_EXPERTS, num_experts_per_token=ACTIVE))


def routed_experts(held) -> RoutedExperts:
    """Experts of random bytes, the rows of some of them."""
    experts = RoutedExperts(architecture(), held, "reference")
    generator = torch.Generator().manual_seed(3)
    for projection in (experts.w1, experts.w3, experts.w2):
        for leaf, low, high in (("packed", 0, 256), ("scale", 120, 124)):
            parameter = projection.get_parameter(leaf)
            shape = (NUM_EXPERTS, *parameter.shape[1:])
            whole = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
            parameter.data.copy_(whole[list(held)])
    return experts


def inputs(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Latents, ids and weights of a process, by the kind of tokens."""
    found = {}
    for number, (name, counts) in enumerate(TOKENS.items()):
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens, width = counts[rank], architecture().routed_expert_hidden_size
        total = ACTIVE if name == "one_rank" else NUM_EXPERTS
        ids = torch.rand(tokens, total, generator=generator).topk(ACTIVE, dim=1).indices
        z = torch.randn(tokens, width, generator=generator)
        found[name] = z, ids, torch.rand(tokens, ACTIVE, generator=generator)
    return found


def direction(out: torch.Tensor) -> torch.Tensor:
    """What an output's gradient is."""
    return torch.arange(out.numel()).view_as(out).sin()


class Exchanges:
    """Notes the trailing width of whatever crosses, while it stands in for torch's exchange."""

    def __init__(self) -> None:
        self.widths: set[tuple[str, int]] = set()
        self._exchange = dist.all_to_all_single

    def __enter__(self) -> "Exchanges":
        dist.all_to_all_single = self._note
        return self

    def __exit__(self, *_) -> None:
        dist.all_to_all_single = self._exchange

    def _note(self, output, rows, *args, **kwargs):
        self.widths.add((str(rows.dtype), rows[..., :1].numel() and rows.shape[-1]))
        return self._exchange(output, rows, *args, **kwargs)
