"""Names of an adapter's files and tensors, and the part of a factor each tensor stands for.

Published names carry ``language_model.``, which the model's own names do not: it is added and
stripped here.
"""

import re
from typing import NamedTuple

from torch import Tensor

CONFIG_NAME = "adapter_config.json"
METADATA_NAME = "k3tune.json"
METADATA_FORMAT = 1
SINGLE_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"

_PEFT_PREFIX = "base_model.model."
_TEXT_PREFIX = "language_model."
_KEY = re.compile(
    rf"(?:{re.escape(_PEFT_PREFIX)})?(?:{re.escape(_TEXT_PREFIX)})?(.+)\.lora_([AB])\.weight"
)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123])")


class FactorName(NamedTuple):
    """One factor: of ``module`` in the base, of one expert or (None) of all there are."""

    module: str
    expert: int | None
    half: str

    @property
    def owner(self) -> str:
        """The module's name with its expert's id, as patterns of an adapter's config see it."""
        if self.expert is None:
            return self.module
        stack, _, projection = self.module.rpartition(".")
        return f"{stack}.{self.expert}.{projection}"

    @property
    def key(self) -> str:
        """The name in a file."""
        return f"{_PEFT_PREFIX}{_TEXT_PREFIX}{self.owner}.lora_{self.half}.weight"


class Slot(NamedTuple):
    """An entry of an adapter file: ``key``, and the part of a module's A or B it holds.

    ``row`` is an expert's row, whose first ``rank`` ranks are meant; None is the whole factor.
    """

    key: str
    half: str
    row: int | None = None
    rank: int = 0

    def part(self, factor: Tensor) -> Tensor:
        """The entry's part of ``factor``, a view."""
        if self.row is None:
            return factor
        row = factor[self.row]
        return row[: self.rank] if self.half == "A" else row[:, : self.rank]


def parse_key(key: str) -> FactorName | None:
    """What a file's key names, with or without the prefixes; None if it is no factor's key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    module, half = match.groups()
    expert = _EXPERT.fullmatch(module)
    if expert is None:
        return FactorName(module, None, half)
    stack, number, projection = expert.groups()
    return FactorName(f"{stack}.{projection}", int(number), half)
