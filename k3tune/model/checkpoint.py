"""Streamed load of a published checkpoint into :class:`K3ForCausalLM`.

Every tensor goes from the file to its final place by positioned reads: peak memory is the local
model plus one tensor, and a process that holds some experts reads only those experts' bytes.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from k3tune.errors import CheckpointError, ConfigError, K3TuneError
from k3tune.files import shown
from k3tune.model.configuration import K3Config
from k3tune.model.load_report import LoadReport
from k3tune.model.local_experts import Experts, LayerExperts, layer_experts
from k3tune.model.modeling import K3ForCausalLM
from k3tune.published.hub import resolve_checkpoint
from k3tune.published.safetensors_files import ShardReader, StoredTensor
from k3tune.published.survey import Survey, survey_checkpoint
from k3tune.published.tensor_table import TEXT_PREFIX, TensorSpec, is_vision
from k3tune_kernels import dispatch
from k3tune_kernels.mxfp4.reference import DECODED_DTYPES

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
# F32 and U8 tensors keep their dtype whatever the user asks for.
_CONVERTED = "BF16"
_EXPERT = re.compile(r"(.*layers\.(\d+)\..+\.experts)\.(\d+)\.(w[123])\.weight_(packed|scale)")
# 2^(255 - 127) is E8M0's not-a-number.
_SCALE_NAN = 255
_STAGING_BYTES = 8 << 20


class Piece(NamedTuple):
    """What a process keeps of a parameter: its elements from ``start`` on, flat, to be filled."""

    start: int
    values: Tensor


def load_base(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    experts: Experts | None = None,
    kernels: str = "auto",
    take: Callable[[K3ForCausalLM], Mapping[str, Piece | None]] | None = None,
) -> K3ForCausalLM:
    """Load a published K3 checkpoint, frozen and in eval mode.

    Args:
        path: folder with config.json and safetensors files, or a hub id.
        dtype: dtype of the trunk, bf16, fp32 or fp64, to which experts are decoded; tensors stored
            as F32 stay F32, expert bytes stay packed.
        device: where the model goes; None is torch's default device.
        experts: global ids of the experts of every MoE layer to hold, in the order of their rows,
            or a mapping of layer to as many ids; None is all.
        kernels: backend of every op, a name of ``k3tune_kernels.dispatch.BACKENDS``.
        take: called while all parameters are on the meta device, in their final dtypes. It removes
            those the model is not to hold whole, and returns for each, by name, the part to read;
            None reads nothing of it.

    Returns:
        The model; ``model.load_report`` is the :class:`LoadReport`.

    Raises:
        ConfigError: if the config is not K3's, or ``dtype``, ``device``, ``experts`` or ``kernels``
            is not usable here.
        CheckpointError: if the files disagree with the config, the index or each other.
    """
    begin = time.perf_counter()
    _check_dtype(dtype)
    target = _usable_device(device)
    _check_kernels(kernels, dtype, target)
    survey = _sound_survey(resolve_checkpoint(path))
    ids = layer_experts(experts, survey.architecture)
    model = _build(survey, str(path), dtype, None if experts is None else ids, kernels)
    model.load_report = _fill_parameters(model, survey, _Loader(dtype, target), ids, begin, take)
    _move_buffers(model, target)
    return model.requires_grad_(False).eval()


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    experts: Experts | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Fill every parameter of a model built on the meta device from a checkpoint folder.

    Parameters are replaced all together once the last one is read, so a failed load leaves the
    model as it was.

    Args:
        model: has the published names without ``language_model.``; routed experts are stacked in
            ``...experts.{w1,w2,w3}.{packed,scale}``, uint8 with one row an expert.
        path: checkpoint folder.
        dtype: dtype of the tensors stored as BF16, one experts decode to; the others keep theirs.
        device: where the parameters go; None is torch's default device.
        experts: global ids of the experts in the model's rows; None is all.
        progress: show a bar on stderr; None shows it on a terminal.

    Raises:
        ConfigError: if ``dtype``, ``device`` or ``experts`` is not usable, or the model is of
            another config.
        CheckpointError: naming file, tensor, what was expected and what was found.
    """
    begin = time.perf_counter()
    _check_dtype(dtype)
    loader = _Loader(dtype, _usable_device(device), progress)
    survey = _sound_survey(path)
    ids = layer_experts(experts, survey.architecture)
    return _fill_parameters(model, survey, loader, ids, begin)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DECODED_DTYPES:
        raise ConfigError(
            f"dtype is {shown(dtype)}, expected {', '.join(map(str, DECODED_DTYPES))}: experts "
            "decode to these only, as torch.dtype, not by name"
        )


def _usable_device(device: torch.device | str | None) -> torch.device:
    """The device with its name resolved, after something was put there."""
    try:
        target = torch.get_default_device() if device is None else torch.device(device)
        torch.empty(0, device=target)
    # torch has no one class for this: each missing backend fails in its own way
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"device is {shown(device)}, expected one that torch can use here, found none "
            f"({': '.join([type(error).__name__, *reason])}): name another, such as 'cpu'"
        ) from error
    if target.type == "meta":
        raise ConfigError(
            "device is meta, expected one that holds data: K3ForCausalLM(config) under "
            "torch.device('meta') builds a model without weights"
        )
    return target


def _check_kernels(kernels: str, dtype: torch.dtype, device: torch.device) -> None:
    """Ask dispatch about the experts' op now: their weights take minutes to read."""
    if kernels not in dispatch.BACKENDS:
        raise ConfigError(
            f"kernels is {shown(kernels)}, expected one of {', '.join(dispatch.BACKENDS)}: "
            "'auto' takes the best there is"
        )
    if kernels == "auto":
        return
    try:
        dispatch.choose("moe_lora", kernels, torch.empty(0, dtype=dtype, device=device))
    except ValueError as error:
        raise ConfigError(f"kernels is {kernels!r}: {error}") from error


def _sound_survey(path: str | Path) -> Survey:
    survey = survey_checkpoint(path)
    survey.require_sound()
    if not survey.has_weights:
        named = sorted(set((survey.listed or {}).values()))
        raise CheckpointError(
            f"{path}: expected safetensors files beside config.json"
            + (f", {named[0]} to {named[-1]} as its index says" if named else "")
            + ", found none: download them"
        )
    return survey


def _build(
    survey: Survey, name: str, dtype: torch.dtype, experts: LayerExperts | None, kernels: str
) -> K3ForCausalLM:
    """The model on the meta device."""
    try:
        config = model_config(survey.config)
        config.dtype = dtype
        config.name_or_path = name
        with torch.device("meta"):
            return K3ForCausalLM(config, experts=experts, kernels=kernels)
    except K3TuneError:
        raise
    # transformers checks the fields it shares with other models, some by failing on them
    except Exception as error:
        raise ConfigError(
            f"{survey.folder}: config.json has a field that transformers cannot use "
            f"({type(error).__name__}: {shown(str(error))}): use config.json as published"
        ) from error


def model_config(published: Mapping[str, Any]) -> K3Config:
    """The model's config from a ``config.json``: nested, or its ``text_config`` alone."""
    nested = dict(published) if "text_config" in published else {"text_config": dict(published)}
    return K3Config.from_dict(nested)


def _fill_parameters(
    model: Any,
    survey: Survey,
    loader: "_Loader",
    ids: LayerExperts,
    begin: float,
    take: Callable[[Any], Mapping[str, Piece | None]] | None = None,
) -> LoadReport:
    plan = _plan(survey, ids)
    skipped = len(survey.expected) - len(plan)
    rows = max(map(len, ids.values()), default=0)
    _compare_model(model, plan, rows)
    if take is not None:
        _settle_dtypes(model, {step.parameter: loader.dtype_of(step) for step in plan})
        pieces = take(model)
        plan = [
            step._replace(piece=pieces.get(step.parameter))
            for step in plan
            if step.parameter not in pieces or pieces[step.parameter] is not None
        ]
    loader.run(plan, rows)
    for name, tensor in loader.filled.items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        trained = module.get_parameter(leaf).requires_grad
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=trained))
    return _report(survey, plan, loader.bytes_read, ids, skipped, time.perf_counter() - begin)


def _settle_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the parameters of a model on the meta device the dtypes they will be filled in."""
    for name, dtype in dtypes.items():
        parent, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        settled = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, settled)


class _Step(NamedTuple):
    """One tensor to read: ``row`` of a stacked ``parameter``, ``piece`` of it, or all of it."""

    name: str
    stored: StoredTensor
    spec: TensorSpec
    parameter: str
    row: int | None
    piece: Piece | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes to read."""
        # a padded tensor is read whole: its end is checked
        if self.piece is None or self.spec.least_length is not None:
            return self.stored.size_bytes
        return len(self.piece.values) * _DTYPES[self.spec.dtype].itemsize

    def shape(self, rows: int) -> tuple[int, ...]:
        """The parameter's shape with ``rows`` local experts."""
        if self.spec.least_length is not None:
            return (self.spec.least_length,)
        return self.spec.shape if self.row is None else (rows, *self.spec.shape)


def _plan(survey: Survey, ids: LayerExperts) -> list[_Step]:
    """The tensors to read, in the order they lie in the files."""
    rows = {(layer, e): row for layer, held in ids.items() for row, e in enumerate(held)}
    steps = []
    for name, spec in survey.expected.items():
        parameter, row = name.removeprefix(TEXT_PREFIX), None
        if match := _EXPERT.fullmatch(parameter):
            stack, layer, expert, projection, part = match.groups()
            row = rows.get((int(layer), int(expert)))
            if row is None:
                continue
            parameter = f"{stack}.{projection}.{part}"
        steps.append(_Step(name, survey.stored[name], spec, parameter, row))
    return sorted(steps, key=lambda step: (step.stored.file.name, step.stored.offset))


def _compare_model(model: nn.Module, plan: list[_Step], rows: int) -> None:
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {step.parameter: step.shape(rows) for step in plan}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ConfigError(
                f"parameter {name}: expected {expected.get(name, 'none')} by the checkpoint's "
                f"config and {rows} local experts, found {found.get(name, 'none')} in the model: "
                "build it from the same config.json with the same experts"
            )


class _Loader:
    """Fills tensors from files; ``filled`` holds them by parameter name."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, progress: bool | None = None
    ) -> None:
        self.dtype, self.device = dtype, device
        self.progress = sys.stderr.isatty() if progress is None else progress
        self.filled: dict[str, Tensor] = {}
        self.bytes_read = 0
        self._staging: Tensor | None = None

    def run(self, plan: list[_Step], rows: int) -> None:
        """Read all tensors of a plan, file by file; a layer holds at most ``rows`` experts."""
        total = sum(step.size_bytes for step in plan)
        hidden = not self.progress
        with tqdm(total=total, unit="B", unit_scale=True, desc="load", disable=hidden) as bar:
            done = 0
            for file, steps in groupby(plan, key=lambda step: step.stored.file):
                with ShardReader(file) as shard:
                    for step in steps:
                        self._fill(shard, step, rows)
                        done += 1
                        bar.set_postfix_str(f"{done}/{len(plan)} tensors", refresh=False)
                        bar.update(step.size_bytes)

    def dtype_of(self, step: _Step) -> torch.dtype:
        """Dtype of the parameter a step fills."""
        return self.dtype if step.spec.dtype == _CONVERTED else _DTYPES[step.spec.dtype]

    def _fill(self, shard: ShardReader, step: _Step, rows: int) -> None:
        target, start = self._target(step, rows)
        stored = _DTYPES[step.spec.dtype]
        if step.spec.least_length is not None:
            self._fill_padded(shard, step, target, start)
        elif target.device.type == "cpu" and target.dtype == stored:
            self._read(shard, step, target.view(torch.uint8), start * stored.itemsize)
        else:
            self._fill_staged(shard, step, target, start)

    def _target(self, step: _Step, rows: int) -> tuple[Tensor, int]:
        """Where a step's values go, flat, and which of the tensor's elements is the first."""
        if step.piece is not None:
            return step.piece.values, step.piece.start
        tensor = self.filled.get(step.parameter)
        if tensor is None:
            tensor = torch.empty(step.shape(rows), dtype=self.dtype_of(step), device=self.device)
            self.filled[step.parameter] = tensor
        return (tensor if step.row is None else tensor[step.row]).view(-1), 0

    def _fill_staged(self, shard: ShardReader, step: _Step, target: Tensor, start: int) -> None:
        """Through a small CPU buffer, for another dtype or device."""
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, device="cpu")
        stored = _DTYPES[step.spec.dtype]
        # the buffer holds whole elements
        count = _STAGING_BYTES // stored.itemsize
        for values in target.split(count):
            part = self._staging[: len(values) * stored.itemsize]
            self._read(shard, step, part, start * stored.itemsize)
            values.copy_(part.view(stored))
            start += len(values)

    def _fill_padded(self, shard: ShardReader, step: _Step, target: Tensor, start: int) -> None:
        """``A_log``: one value a head, then nothing but zeros."""
        values = torch.empty(step.stored.shape, dtype=torch.float32, device="cpu")
        self._read(shard, step, values.view(torch.uint8), 0)
        heads = step.spec.least_length
        assert heads is not None, f"{step.name=}"
        if (nonzero := values[heads:].nonzero()).numel():
            place = heads + int(nonzero[0])
            raise CheckpointError(
                f"{shard.file}: tensor {step.name}: expected {heads} values, one a head, then "
                f"zeros only, found {values[place].item()} at position {place} of {len(values)}: "
                "take config.json, with its num_heads, and weights from one checkpoint"
            )
        target.copy_(values[start : start + len(target)])

    def _read(self, shard: ShardReader, step: _Step, buffer: Tensor, start: int) -> None:
        """Fill ``buffer``, flat uint8 on the CPU, from byte ``start`` of the tensor on."""
        shard.read_into(step.name, step.stored.offset + start, buffer.numpy().data)
        self.bytes_read += len(buffer)
        if step.name.endswith(".weight_scale") and int(buffer.max()) == _SCALE_NAN:
            place = start + int((buffer == _SCALE_NAN).nonzero()[0])
            row, group = divmod(place, step.spec.shape[-1])
            raise CheckpointError(
                f"{shard.file}: tensor {step.name}: expected scale bytes of 0 to 254, found "
                f"{_SCALE_NAN} (not a number) at row {row}, group {group}: the file is damaged, "
                "download it again"
            )


def _report(
    survey: Survey,
    plan: list[_Step],
    bytes_read: int,
    ids: LayerExperts,
    experts_skipped: int,
    seconds: float,
) -> LoadReport:
    names = survey.stored.keys() | (survey.listed or {}).keys()
    vision = [name for name in names if is_vision(name)]
    stored = [survey.stored[name].size_bytes for name in vision if name in survey.stored]
    report = LoadReport(
        tensors=len(plan),
        bytes_read=bytes_read,
        experts=next(iter(ids.values())) if len(set(ids.values())) == 1 else ids,
        expert_tensors_skipped=experts_skipped,
        sharded_tensors_skipped=len(survey.expected) - len(plan) - experts_skipped,
        vision_tensors_skipped=len(vision),
        vision_bytes_skipped=sum(stored),
        seconds=seconds,
        ignored_files=tuple(survey.ignored_files),
    )
    logger.info(
        "%s: read %d tensors, %d bytes in %.1f s; skipped %d image-tower tensors (%d bytes), "
        "%d tensors of experts and %d of shards held elsewhere and %d files that are no part of "
        "the checkpoint",
        survey.folder,
        report.tensors,
        report.bytes_read,
        seconds,
        report.vision_tensors_skipped,
        report.vision_bytes_skipped,
        report.expert_tensors_skipped,
        report.sharded_tensors_skipped,
        len(report.ignored_files),
    )
    return report


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers are data the model computed itself, on the CPU; they follow the parameters."""
    for name, buffer in list(model.named_buffers()):
        assert not buffer.is_meta, f"{name=} was left without data"
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer.to(device))
