"""What to adapt and how: target groups, ranks, forms. Standard library only."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Self

from k3tune.errors import ConfigError
from k3tune.files import shown

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "attention": (
            r"self_attn\.(q_proj|k_proj|v_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj"
            r"|o_proj|g_proj)"
        ),
        "latent": r"block_sparse_moe\.routed_expert_(down|up)_proj",
        "experts": r"block_sparse_moe\.experts\.(w1|w3|w2)",
        "shared_experts": r"block_sparse_moe\.shared_experts\.(gate|up|down)_proj",
        "dense": r"mlp\.(gate|up|down)_proj",
    }
)
"""Group name -> pattern of the end of a module's name."""

FORMS = ("per_expert", "shared_outer")
INITS = ("kaiming", "gaussian")

# Far above the width of any weight; beyond it byte counts leave the range of floats.
_MOST_RANK = 2**20


@dataclass(frozen=True)
class LoraSpec:
    """An adapter to attach. Every field is checked; a wrong one raises :class:`ConfigError`.

    Attributes:
        targets: names of :data:`GROUPS`, or patterns of a module name's end as in PEFT's
            ``rank_pattern`` (``"o_proj"``, ``"layers.3.self_attn.q_proj"``, regular expressions).
        rank: LoRA rank.
        alpha: the update is scaled by ``alpha / rank``.
        form: of the experts' factors. ``"per_expert"``: an A and a B for each; ``"shared_outer"``:
            the factors on the latent's side (A of w1 and w3, B of w2) are shared by a layer's
            experts.
        rank_pattern, alpha_pattern: pattern of a module name's end -> another rank or alpha.
        layers: zero-based layers to adapt; None is all.
        use_rslora: scale by ``alpha / sqrt(rank)`` instead.
        dropout: on the input of linear modules in training; the experts' op has none.
        init: of A, ``"kaiming"`` (uniform within ``1 / sqrt(in)``) or ``"gaussian"`` (std
            ``1 / rank``); B starts at zero, so the adapted model starts as the base.
        seed: of A. Each factor draws from its own generator, made of this, its name and its expert
            id: the start does not depend on how experts are spread over processes.
    """

    targets: tuple[str, ...]
    rank: int = 16
    alpha: float = 32
    form: str = "per_expert"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    use_rslora: bool = False
    dropout: float = 0.0
    init: str = "kaiming"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _strings("targets", self.targets))
        object.__setattr__(self, "layers", _layers(self.layers))
        _check_rank("rank", self.rank)
        _check_alpha("alpha", self.alpha)
        for name, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_alpha)):
            pattern = getattr(self, name)
            if not isinstance(pattern, Mapping):
                raise ConfigError(
                    f"{name} is {pattern!r}, expected a mapping of module-name pattern to number"
                )
            for key, value in pattern.items():
                _check_regex(name, key)
                check(f"{name}[{key!r}]", value)
            object.__setattr__(self, name, dict(pattern))
        _one_of("form", self.form, FORMS)
        _one_of("init", self.init, INITS)
        if type(self.use_rslora) is not bool:
            raise ConfigError(f"use_rslora is {self.use_rslora!r}, expected true or false")
        if type(self.seed) is not int:
            raise ConfigError(f"seed is {self.seed!r}, expected an integer")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout!r}, expected a number from 0 to below 1")
        if self.dropout and "experts" in self.targets:
            raise ConfigError(dropout_message(self.dropout, "targets include the experts"))

    def to_json(self) -> str:
        """The spec as a JSON object; :meth:`from_json` reads it back equal."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: if ``text`` is no JSON object, or names a field that does not exist.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"expected a LoraSpec as a JSON object, found {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"expected a LoraSpec as a JSON object, found a {type(values).__name__}"
            )
        known = [item.name for item in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise ConfigError(
                f"a LoraSpec has no field {unknown[0]!r}, expected fields of {', '.join(known)}"
            )
        if "targets" not in values:
            raise ConfigError(f"a LoraSpec needs targets, found {sorted(values)}")
        return cls(**values)


def lora_scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    """``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def dropout_message(dropout: float, found: str) -> str:
    """Why dropout and the experts do not go together."""
    return (
        f"dropout is {dropout:g} and {found}: the experts' op recomputes its activations in the "
        "backward and has no dropout; set dropout to 0, or adapt other modules"
    )


def pattern_matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` fits the end of a module's name, whole name parts at a time.

    PEFT's rule for ``rank_pattern``; the published prefix ``language_model.`` may be in it.
    """
    return any(
        re.match(rf"(.*\.)?({pattern})$", candidate) is not None
        for candidate in (name, f"language_model.{name}")
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_rank(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= _MOST_RANK:
        raise ConfigError(
            f"{name} is {shown(value)}, expected an integer of at least 1 and at most {_MOST_RANK}"
        )


def _check_alpha(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r}, expected a number above 0")


def _check_regex(name: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{name} names {pattern!r}, expected module-name patterns (strings)")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{name} names {pattern!r}, which is no regular expression ({error})"
        ) from error


def _strings(name: str, values: Any) -> tuple[str, ...]:
    # a lone string would be taken letter by letter
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(
            f"{name} is {values!r}, expected a list of {', '.join(GROUPS)} or module-name patterns"
        )
    values = tuple(values)
    if not values:
        raise ConfigError(
            f"{name} is empty, expected at least one of {', '.join(GROUPS)} or module-name patterns"
        )
    for value in values:
        _check_regex(name, value)
    if len(set(values)) != len(values):
        raise ConfigError(f"{name} is {list(values)}, expected each target once")
    return values


def _layers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ConfigError(f"layers is {layers!r}, expected a list of zero-based layers, or none")
    layers = tuple(layers)
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ConfigError(
            f"layers is {list(layers)}, expected zero-based layers (leave it out for all of them)"
        )
    return tuple(sorted(set(layers)))


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
