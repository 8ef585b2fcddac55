"""The facts behind ``k3tune inspect``: what a checkpoint holds, by group and dtype, and a verdict.

Standard library only: config, index and headers are enough, and no weight is read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tune.files import shown
from k3tune.published.architecture import Architecture
from k3tune.published.hub import resolve_checkpoint
from k3tune.published.safetensors_files import tensor_bytes
from k3tune.published.survey import Survey, survey_checkpoint
from k3tune.published.tensor_table import (
    GROUPS,
    active_parameters,
    is_vision,
    parameter_count,
    vision_tensors,
)

_VISION = "vision"
# Names that are neither K3's nor the image tower's; only a checkpoint with problems has any.
_UNEXPECTED = "unexpected"
# The dtype of a tensor no header describes and the config does not know.
_UNKNOWN = "unknown"


@dataclass
class Tally:
    """Tensors counted together."""

    tensors: int = 0
    parameters: int = 0
    size_bytes: int = 0

    def add(self, other: "Tally") -> None:
        """Count ``other`` in."""
        self.tensors += other.tensors
        self.parameters += other.parameters
        self.size_bytes += other.size_bytes


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect_checkpoint` found.

    Attributes:
        folder: the checkpoint folder.
        architecture: its sizes.
        groups, dtypes: tallies by group and by dtype; each adds up to the whole checkpoint.
            Tensors whose shapes nothing tells have dtype ``unknown`` and count 0 parameters.
        has_weights: whether any safetensors file is there; otherwise sizes are the config's.
        has_index: whether tensor names come from an index or a file, not from the config alone.
        problems: what is wrong, as sentences.
        ignored_files: safetensors files in the folder that are no part of the checkpoint.
    """

    folder: Path
    architecture: Architecture
    groups: dict[str, Tally]
    dtypes: dict[str, Tally]
    has_weights: bool
    has_index: bool
    problems: list[str] = field(default_factory=list)
    ignored_files: list[str] = field(default_factory=list)

    def total(self, *, text: bool = False) -> Tally:
        """The whole checkpoint, or with ``text`` all but the image tower."""
        total = Tally()
        for group, tally in self.groups.items():
            if not text or group != _VISION:
                total.add(tally)
        return total


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Count what a checkpoint holds and compare it with its config.

    Args:
        path: a folder with config.json and, as far as they are there, index and shards; or a hub
            id, of which config and index are downloaded.

    Raises:
        ConfigError: if the config is missing or not K3's.
        CheckpointError: if folder or index cannot be read, or the hub cannot be reached.
    """
    survey = survey_checkpoint(resolve_checkpoint(path, weights=False))
    groups = {group: Tally() for group in GROUPS}
    dtypes: dict[str, Tally] = {}
    for group, dtype, tally in _tallies(survey):
        groups.setdefault(group, Tally()).add(tally)
        dtypes.setdefault(dtype, Tally()).add(tally)
    return Inspection(
        folder=survey.folder,
        architecture=survey.architecture,
        groups=groups,
        dtypes=dtypes,
        has_weights=survey.has_weights,
        has_index=survey.listed is not None or survey.has_weights,
        problems=survey.problems,
        ignored_files=survey.ignored_files,
    )


def _tallies(survey: Survey) -> Iterator[tuple[str, str, Tally]]:
    """Group, dtype and sizes, as stored, else as the config says; one tally a kind of tensor."""
    vision = vision_tensors(survey.config.get("vision_config"))
    names: Mapping[str, Any] = {**(survey.listed or {}), **survey.stored}
    # half a million names, but only some forty kinds to compute sizes for
    kinds: Counter[tuple[str, str, tuple[int, ...], str]] = Counter()
    for name in names or {**survey.expected, **vision}:
        expected = survey.expected.get(name)
        spec = survey.stored.get(name) or expected or vision.get(name)
        if expected is not None:
            group = expected.group
        else:
            group = _VISION if is_vision(name) else _UNEXPECTED
        dtype, shape = (_UNKNOWN, (0,)) if spec is None else (spec.dtype, spec.shape)
        kinds[group, dtype, shape, name.rpartition(".")[2]] += 1
    for (group, dtype, shape, leaf), count in kinds.items():
        size = 0 if dtype == _UNKNOWN else tensor_bytes(dtype, shape)
        yield group, dtype, Tally(count, count * parameter_count(leaf, shape), count * size)


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """The figures of ``k3tune inspect --json``.

    Returns:
        ``text_parameters``, ``parameters``, ``tensors``, ``bytes``, ``groups`` (name ->
        ``parameters``, ``bytes``), ``problems`` (sentences; empty when all is well).
    """
    total = inspection.total()
    return {
        "text_parameters": inspection.total(text=True).parameters,
        "parameters": total.parameters,
        "tensors": total.tensors,
        "bytes": total.size_bytes,
        "groups": {
            group: {"parameters": tally.parameters, "bytes": tally.size_bytes}
            for group, tally in inspection.groups.items()
        },
        "problems": inspection.problems,
    }


def render_inspection(inspection: Inspection) -> str:
    """The same for people: layers, groups, dtypes, active parameters, verdict."""
    parts = (_heading, _group_table, _dtype_table, _active, _verdict)
    return "\n\n".join("\n".join(part(inspection)) for part in parts)


def _heading(inspection: Inspection) -> Iterator[str]:
    a = inspection.architecture
    mla, moe = len(a.mla_layers), len(a.moe_layers)
    yield f"Kimi K3 text model in {inspection.folder}"
    yield (
        f"{a.num_hidden_layers} layers: {a.num_hidden_layers - mla} KDA + {mla} MLA, "
        f"{a.num_hidden_layers - moe} dense + {moe} MoE; attention residuals every "
        f"{a.attn_res_block_size}; width {a.hidden_size:,}, latent "
        f"{a.routed_expert_hidden_size:,}, vocabulary {a.vocab_size:,}"
    )
    if inspection.has_weights:
        yield "weights: sizes from file headers"
    else:
        names = "index" if inspection.has_index else "config alone"
        yield f"weights: absent; names from the {names}, sizes from config.json"
    if _UNKNOWN in inspection.dtypes:
        yield (
            f"{inspection.dtypes[_UNKNOWN].tensors} tensors have unknown sizes and count as 0 "
            "parameters: no header tells them and config.json does not either"
        )
    if ignored := inspection.ignored_files:
        yield (
            f"{len(ignored)} other safetensors files are no part of the checkpoint and not read: "
            + shown(ignored)
        )


def _table(title: str, rows: Mapping[str, Tally]) -> Iterator[str]:
    width = max(map(len, (title, *rows)))
    yield f"{title:{width}}  {'tensors':>9}  {'parameters':>19}  {'bytes':>19}"
    for name, tally in rows.items():
        yield (
            f"{name:{width}}  {tally.tensors:>9,}  {tally.parameters:>19,}  {tally.size_bytes:>19,}"
        )


def _group_table(inspection: Inspection) -> Iterator[str]:
    totals = {"text": inspection.total(text=True), "all": inspection.total()}
    return _table("group", inspection.groups | totals)


def _dtype_table(inspection: Inspection) -> Iterator[str]:
    return _table("dtype", dict(sorted(inspection.dtypes.items())))


def _active(inspection: Inspection) -> Iterator[str]:
    a = inspection.architecture
    text = inspection.total(text=True).parameters
    counts = {name: tally.parameters for name, tally in inspection.groups.items()}
    counts.pop(_VISION)
    routed = counts["routed_experts"]
    active_routed = routed * a.num_experts_per_token // a.num_experts
    without_embedding = active_parameters(a, counts)
    active = without_embedding + a.vocab_size * a.hidden_size
    yield (
        f"a token uses {a.num_experts_per_token} of {a.num_experts} routed experts and "
        f"{a.num_shared_experts} shared in each of {len(a.moe_layers)} MoE layers"
    )
    yield f"  routed parameters  {active_routed:,} of {routed:,}"
    yield f"  text parameters    {active:,} of {text:,} ({active / text:.1%})" if text else ""
    yield f"  without the embedding table, which is looked up: {without_embedding:,}"


def _verdict(inspection: Inspection) -> Iterator[str]:
    if not inspection.problems:
        judged = "names, dtypes and shapes" if inspection.has_weights else "names"
        if not inspection.has_index:
            yield "verdict: the config is K3's; there is no index or weight to judge"
        else:
            yield f"verdict: the {judged} are what config.json asks for"
        return
    yield f"verdict: {len(inspection.problems)} problems"
    for problem in inspection.problems:
        yield f"- {problem}"
