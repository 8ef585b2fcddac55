"""The experts' call of one layer, spread over an expert-parallel group.

What crosses is the latent: after ``routed_expert_down_proj``, before ``routed_expert_up_proj``.
Every (token, expert) pair is a row, sorted by the expert's rank and its row there, so that counts
alone tell the receiver whose row is whose. Outputs come back unweighted and are summed at home, in
the order of experts' ids: which rank holds an expert changes no bit. What is sent is freed with the
exchange, so all layers send from the same memory; what arrives lives as long as autograd needs it.

Shape letters: ``N`` tokens here, ``A`` active experts a token, ``M`` = N * A rows, ``U`` rows sent,
``L`` latent width, ``E`` experts, ``P`` ranks of the group, ``S`` most experts of a rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3tune.model.latent_moe import RoutedExperts
from k3tune.parallel.groups import ExpertGroup
from k3tune.parallel.rows import Combine, Exchange, Link, Spread, places_of
from k3tune.parallel.shards import ExpertShards
from k3tune.parallel.traffic import Traffic


@dataclass(frozen=True)
class DispatchOptions:
    """How latents travel to the experts.

    Attributes:
        deduplicate: a token crosses once to each rank that holds some of its experts, not once to
            each expert. Outputs still come back one an expert.
        mxfp8: latents are rounded to MXFP8 on the way to the experts, half the bytes of BF16; the
            gradient passes as if they were not.
    """

    deduplicate: bool = False
    mxfp8: bool = False


class _Sizes(NamedTuple):
    """What counts say, on the host: rows by rank, sent and received, routed and (U) to travel."""

    sends_M: list[int]
    receives_M: list[int]
    sends_U: list[int]
    receives_U: list[int]


class ExpertDispatch:
    """Stands in for the ``forward`` of one layer's :class:`RoutedExperts`.

    The module keeps its parameters and its name; its own ``forward`` computes what arrives here.
    """

    def __init__(
        self,
        experts: RoutedExperts,
        layer: int,
        shards: ExpertShards,
        group: ExpertGroup,
        options: DispatchOptions,
        traffic: Traffic,
    ) -> None:
        self.layer = layer
        self._experts = experts
        self._compute = experts.forward
        self._group, self._options = group, options
        self._link = Link(group, traffic)
        self._width = max(shards.sizes)
        ranks = shards.ranks(layer)
        rows = dict.fromkeys(range(shards.num_experts), 0)
        for rank in range(shards.num_ranks):
            rows |= {expert: row for row, expert in enumerate(shards.experts(rank, layer))}
        self._rank_E = torch.tensor(ranks)
        # sorts rows by rank, then by row there
        self._place_E = torch.tensor([r * self._width + rows[e] for e, r in enumerate(ranks)])

    def __call__(self, z_NL: Tensor, expert_ids_NA: Tensor, expert_weights_NA: Tensor) -> Tensor:
        """``[N, L]`` as the whole layer's experts would give; every rank of the group must call it.

        Args:
            z_NL: latents of this process's tokens; N may be 0.
            expert_ids_NA: global ids.
            expert_weights_NA: floating.
        """
        self._move_tables(z_NL.device)
        ids_NA = expert_ids_NA.long()
        key_M = self._place_E[ids_NA].flatten()
        order_M = key_M.argsort(stable=True)
        active = ids_NA.shape[1]
        token_M = order_M // active
        # where each token's rows went, in the order of its experts' ids
        place_M = torch.empty_like(order_M)
        place_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        slot_NA = ids_NA.argsort(dim=1, stable=True)
        place_NA = place_M.view_as(ids_NA).gather(1, slot_NA)

        counts_PS = key_M.bincount(minlength=self._group.size * self._width)
        counts_PS = counts_PS.view(self._group.size, self._width)
        if self._options.deduplicate:
            rows_ML, expert_M, sizes = self._dispatch_once(z_NL, ids_NA, order_M, counts_PS)
        else:
            sizes, expert_M = self._exchange_counts(counts_PS)
            rows_ML = self._travel(Spread.apply(z_NL, token_M, place_NA), sizes)
        outputs_ML = self._outputs(rows_ML, expert_M)
        returned_ML = Exchange.apply(
            outputs_ML, sizes.receives_M, sizes.sends_M, self._link, "combine", False
        )
        return Combine.apply(returned_ML, expert_weights_NA.gather(1, slot_NA), place_NA)

    def _dispatch_once(
        self, z_NL: Tensor, ids_NA: Tensor, order_M: Tensor, counts_PS: Tensor
    ) -> tuple[Tensor, Tensor, _Sizes]:
        """Each token once to each rank, with places that say which experts there want it."""
        active, num_tokens = ids_NA.shape[1], len(ids_NA)
        wanted_NP = torch.zeros(
            num_tokens, self._group.size, dtype=torch.bool, device=ids_NA.device
        ).scatter_(1, self._rank_E[ids_NA], True)
        _, token_U = wanted_NP.T.nonzero(as_tuple=True)
        sends_P = wanted_NP.sum(0)
        sizes, expert_M = self._exchange_counts(counts_PS, sends_P)
        # the place of (rank, token) among the rows that this rank gets from here
        nth_PN = wanted_NP.T.long().cumsum(1) - 1
        rank_M = self._rank_E[ids_NA].flatten()[order_M]
        nth_M = nth_PN[rank_M, order_M // active].int()
        received_M = self._link.exchange(nth_M, sizes.sends_M, sizes.receives_M, "dispatch").long()
        first_P = torch.tensor([0, *sizes.receives_U[:-1]], device=received_M.device).cumsum(0)
        counts_P = torch.tensor(sizes.receives_M, device=received_M.device)
        source_M = first_P.repeat_interleave(counts_P, output_size=len(received_M))
        index_M = received_M + source_M
        rows_UL = self._travel(
            Spread.apply(z_NL, token_U, places_of(token_U, num_tokens, self._group.size)), sizes
        )
        places_UA = places_of(index_M, len(rows_UL), active)
        return Spread.apply(rows_UL, index_M, places_UA), expert_M, sizes

    def _exchange_counts(
        self, counts_PS: Tensor, sends_P: Tensor | None = None
    ) -> tuple[_Sizes, Tensor]:
        """The one exchange of counts, one wait for the device; also the expert of each row here."""
        columns = counts_PS if sends_P is None else torch.cat([counts_PS, sends_P[:, None]], 1)
        ones = [1] * self._group.size
        received = self._link.exchange(columns, ones, ones, "counts")
        here_PS = received[:, : self._width]
        unique = [counts_PS.sum(1), here_PS.sum(1)]
        if sends_P is not None:
            unique = [sends_P, received[:, -1]]
        sizes = _Sizes(*torch.stack([counts_PS.sum(1), here_PS.sum(1), *unique]).tolist())
        row_M = torch.arange(self._width, device=here_PS.device).repeat(self._group.size)
        total = sum(sizes.receives_M)
        row_M = row_M.repeat_interleave(here_PS.flatten(), output_size=total)
        local = self._experts.local_experts
        assert local is not None, f"layer {self.layer} holds all experts"
        return sizes, local.to(row_M.device)[row_M]

    def _travel(self, rows_UL: Tensor, sizes: _Sizes) -> Tensor:
        return Exchange.apply(
            rows_UL, sizes.sends_U, sizes.receives_U, self._link, "dispatch", self._options.mxfp8
        )

    def _outputs(self, rows_ML: Tensor, expert_M: Tensor) -> Tensor:
        """Each row through its one expert, unweighted."""
        ones_M1 = torch.ones(len(rows_ML), 1, dtype=torch.float32, device=rows_ML.device)
        return self._compute(rows_ML, expert_M[:, None], ones_M1)

    def _move_tables(self, device: torch.device) -> None:
        if self._rank_E.device != device:
            self._rank_E, self._place_E = self._rank_E.to(device), self._place_E.to(device)
