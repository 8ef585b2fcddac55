"""Bytes and messages of the exchanges between experts' ranks, counted where they are sent."""

from collections import Counter
from collections.abc import Sequence

KINDS = ("counts", "dispatch", "combine", "gradient")
"""What an exchange carries: token counts, latents to the experts, outputs back, gradients."""


class Traffic:
    """Counts what this process hands to exchanges; one for all layers.

    Attributes:
        sent: bytes by kind, those that stay on this process included: ``k x latent x bytes`` a
            token, layer and way, whatever the routing.
        crossing: bytes by kind to other processes only.
        messages: transfers to other processes with at least a byte.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.crossing: Counter[str] = Counter()
        self.messages = 0

    def add(self, kind: str, sizes_bytes: Sequence[int], own_rank: int) -> None:
        """Count an exchange by the bytes for each rank."""
        assert kind in KINDS, f"{kind=}"
        others = [size for rank, size in enumerate(sizes_bytes) if rank != own_rank]
        self.sent[kind] += sum(sizes_bytes)
        self.crossing[kind] += sum(others)
        self.messages += sum(size > 0 for size in others)

    def take(self) -> list[int]:
        """Bytes to other processes by kind, in the order of :data:`KINDS`, and messages.

        Since the last call; what is counted starts anew.
        """
        taken = [*(self.crossing[kind] for kind in KINDS), self.messages]
        self.sent.clear()
        self.crossing.clear()
        self.messages = 0
        return taken
