"""Options that several commands share. Standard library only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3tune.errors import K3TuneError

_LEAST_TEMPERATURE = 1e-4
# what torch takes
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Model:
    """The base, as the user names it, and how it runs."""

    base: str
    adapter: Path | None = None
    dtype: str = "auto"
    kernels: str = "auto"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 takes the likeliest."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise K3TuneError(
                f"--temperature is {self.temperature}, expected 0 (the likeliest token) or a "
                f"number from {_LEAST_TEMPERATURE} on: logits are divided by it"
            )
        if not 0 < self.top_p <= 1:
            raise K3TuneError(f"--top-p is {self.top_p}, expected a number above 0 and at most 1")
        if self.seed is not None and self.seed > _MOST_SEED:
            raise K3TuneError(f"--seed is {self.seed}, expected a number from 0 to {_MOST_SEED}")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0 or self.seed is not None):
            raise K3TuneError(
                "--top-p, --top-k and --seed need --temperature above 0: without it nothing is "
                "sampled"
            )


@dataclass(frozen=True)
class Chat:
    """How a conversation is rendered; an effort of ``none`` says nothing about effort."""

    thinking: bool = True
    thinking_effort: str = "max"

    @property
    def rendering(self) -> dict[str, Any]:
        """Options of :func:`k3tune.data.render_chat`."""
        effort = None if self.thinking_effort == "none" else self.thinking_effort
        return {"thinking": self.thinking, "thinking_effort": effort}
