"""Streamed load of a published checkpoint into :class:`K3ForCausalLM`.

Every tensor goes from the file to its final place by positioned reads: peak memory is the local
model plus one tensor, and a process that holds some experts reads only those experts' bytes.
"""

import logging
import operator
import re
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from k3tune.errors import CheckpointError, ConfigError
from k3tune.model.configuration import K3Config
from k3tune.model.load_report import LoadReport
from k3tune.model.modeling import K3ForCausalLM
from k3tune.published.architecture import parse_config, read_config
from k3tune.published.hub import resolve_checkpoint
from k3tune.published.safetensors_files import ShardReader, StoredTensor
from k3tune.published.survey import Survey, survey_checkpoint
from k3tune.published.tensor_table import TEXT_PREFIX, TensorSpec, is_vision

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
# F32 and U8 tensors keep their dtype whatever the user asks for.
_CONVERTED = "BF16"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123])\.weight_(packed|scale)")
# 2^(255 - 127) is E8M0's not-a-number.
_SCALE_NAN = 255
_STAGING_BYTES = 8 << 20


def load_base(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    experts: Sequence[int] | None = None,
    kernels: str = "auto",
) -> K3ForCausalLM:
    """Load a published K3 checkpoint, frozen and in eval mode.

    Args:
        path: folder with config.json and safetensors files, or a hub id.
        dtype: dtype of the trunk; tensors stored as F32 stay F32, expert bytes stay packed.
        device: where the model goes; None is torch's default device.
        experts: global ids of the experts of every MoE layer to hold, in the order of their rows;
            None is all.
        kernels: backend of every op, a name of ``k3tune_kernels.dispatch.BACKENDS``.

    Returns:
        The model; ``model.load_report`` is the :class:`LoadReport`.

    Raises:
        ConfigError: if the config is not K3's, or ``dtype`` or ``experts`` is not usable.
        CheckpointError: if the files disagree with the config, the index or each other.
    """
    folder = resolve_checkpoint(path)
    published = read_config(folder)
    local_experts = expert_ids(experts, parse_config(published).num_experts)
    config = K3Config.from_dict(published)
    config.dtype = dtype
    config.name_or_path = str(path)
    with torch.device("meta"):
        model = K3ForCausalLM(
            config, experts=None if experts is None else local_experts, kernels=kernels
        )
    report = load_weights(model, folder, dtype=dtype, device=device, experts=experts)
    _move_buffers(model, device)
    model.load_report = report
    return model.requires_grad_(False).eval()


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    experts: Sequence[int] | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Fill every parameter of a model built on the meta device from a checkpoint folder.

    Parameters are replaced all together once the last one is read, so a failed load leaves the
    model as it was.

    Args:
        model: has the published names without ``language_model.``; routed experts are stacked in
            ``...experts.{w1,w2,w3}.{packed,scale}``, uint8 with one row an expert.
        path: checkpoint folder.
        dtype: dtype of the tensors stored as BF16; the others keep theirs.
        device: where the parameters go; None is torch's default device.
        experts: global ids of the experts in the model's rows; None is all.
        progress: show a bar on stderr; None shows it on a terminal.

    Raises:
        ConfigError: if ``dtype`` or ``experts`` is not usable, or the model is of another config.
        CheckpointError: naming file, tensor, what was expected and what was found.
    """
    begin = time.perf_counter()
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ConfigError(f"dtype is {dtype}, expected torch.bfloat16, float16, float32 or float64")
    survey = survey_checkpoint(path)
    survey.require_sound()
    if not survey.has_weights:
        named = sorted(set((survey.listed or {}).values()))
        raise CheckpointError(
            f"{path}: expected safetensors files beside config.json"
            + (f", {named[0]} to {named[-1]} as its index says" if named else "")
            + ", found none: download them"
        )
    ids = expert_ids(experts, survey.architecture.num_experts)
    plan = _plan(survey, ids)
    _compare_model(model, plan, len(ids))
    loader = _Loader(dtype, torch.get_default_device() if device is None else torch.device(device))
    shown = sys.stderr.isatty() if progress is None else progress
    loader.run(plan, len(ids), shown)
    for name, tensor in loader.filled.items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        trained = module.get_parameter(leaf).requires_grad
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=trained))
    return _report(survey, plan, loader.bytes_read, ids, time.perf_counter() - begin)


def expert_ids(experts: Iterable[int] | None, num_experts: int) -> tuple[int, ...]:
    """Check a choice of experts; None is all.

    Raises:
        ConfigError: if it is empty, names an expert twice, or one the model does not have.
    """
    if experts is None:
        return tuple(range(num_experts))
    try:
        ids = tuple(operator.index(expert) for expert in experts)
    except TypeError as error:
        raise ConfigError(f"experts is {experts!r}, expected a sequence of expert ids") from error
    if not ids:
        raise ConfigError("experts is empty, expected at least one expert id (None means all)")
    outside = [expert for expert in ids if not 0 <= expert < num_experts]
    if outside:
        raise ConfigError(
            f"experts names {outside[0]}, expected ids from 0 to {num_experts - 1}: the checkpoint "
            f"has {num_experts} experts a layer"
        )
    if len(set(ids)) != len(ids):
        twice = next(expert for place, expert in enumerate(ids) if expert in ids[:place])
        raise ConfigError(f"experts names {twice} twice, expected each id once")
    return ids


class _Step(NamedTuple):
    """One tensor to read: ``row`` of a stacked ``parameter``, or all of it when None."""

    name: str
    stored: StoredTensor
    spec: TensorSpec
    parameter: str
    row: int | None

    def shape(self, rows: int) -> tuple[int, ...]:
        """The parameter's shape with ``rows`` local experts."""
        if self.spec.least_length is not None:
            return (self.spec.least_length,)
        return self.spec.shape if self.row is None else (rows, *self.spec.shape)


def _plan(survey: Survey, ids: tuple[int, ...]) -> list[_Step]:
    """The tensors to read, in the order they lie in the files."""
    rows = {expert: row for row, expert in enumerate(ids)}
    steps = []
    for name, spec in survey.expected.items():
        parameter, row = name.removeprefix(TEXT_PREFIX), None
        if match := _EXPERT.fullmatch(parameter):
            stack, expert, projection, part = match.groups()
            row = rows.get(int(expert))
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

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.filled: dict[str, Tensor] = {}
        self.bytes_read = 0
        self._staging: Tensor | None = None

    def run(self, plan: list[_Step], rows: int, progress: bool) -> None:
        total = sum(step.stored.size_bytes for step in plan)
        with tqdm(total=total, unit="B", unit_scale=True, desc="load", disable=not progress) as bar:
            done = 0
            for file, steps in groupby(plan, key=lambda step: step.stored.file):
                with ShardReader(file) as shard:
                    for step in steps:
                        self._fill(shard, step, rows)
                        done += 1
                        bar.set_postfix_str(f"{done}/{len(plan)} tensors", refresh=False)
                        bar.update(step.stored.size_bytes)

    def _fill(self, shard: ShardReader, step: _Step, rows: int) -> None:
        tensor = self.filled.get(step.parameter)
        stored = _DTYPES[step.spec.dtype]
        if tensor is None:
            dtype = self.dtype if step.spec.dtype == _CONVERTED else stored
            tensor = torch.empty(step.shape(rows), dtype=dtype, device=self.device)
            self.filled[step.parameter] = tensor
        target = tensor if step.row is None else tensor[step.row]
        if step.spec.least_length is not None:
            self._fill_padded(shard, step, target)
        elif target.device.type == "cpu" and target.dtype == stored:
            self._read(shard, step, target.view(-1).view(torch.uint8), 0)
        else:
            self._fill_staged(shard, step, target.view(-1), stored)

    def _fill_staged(
        self, shard: ShardReader, step: _Step, target: Tensor, stored: torch.dtype
    ) -> None:
        """Through a small CPU buffer, for another dtype or device."""
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, device="cpu")
        for start in range(0, step.stored.size_bytes, _STAGING_BYTES):
            part = self._staging[: min(_STAGING_BYTES, step.stored.size_bytes - start)]
            self._read(shard, step, part, start)
            values = part.view(stored)
            first = start // stored.itemsize
            target[first : first + len(values)].copy_(values)

    def _fill_padded(self, shard: ShardReader, step: _Step, target: Tensor) -> None:
        """``A_log``: one value a head, then nothing but zeros."""
        values = torch.empty(step.stored.shape, dtype=torch.float32, device="cpu")
        self._read(shard, step, values.view(torch.uint8), 0)
        heads = len(target)
        if (nonzero := values[heads:].nonzero()).numel():
            place = heads + int(nonzero[0])
            raise CheckpointError(
                f"{shard.file}: tensor {step.name}: expected {heads} values, one a head, then "
                f"zeros only, found {values[place].item()} at position {place} of {len(values)}: "
                "is the config's num_heads right?"
            )
        target.copy_(values[:heads])

    def _read(self, shard: ShardReader, step: _Step, buffer: Tensor, start: int) -> None:
        """Fill ``buffer``, flat uint8 on the CPU, from byte ``start`` of the tensor on."""
        shard.read_into(step.name, step.stored.offset + start, buffer.numpy().data)
        self.bytes_read += len(buffer)
        if step.name.endswith(".weight_scale") and int(buffer.max()) == _SCALE_NAN:
            place = start + int((buffer == _SCALE_NAN).nonzero()[0])
            row, group = divmod(place, step.spec.shape[-1])
            raise CheckpointError(
                f"{shard.file}: tensor {step.name}: expected scale bytes of 0 to 254, found "
                f"{_SCALE_NAN} (not a number) at row {row}, group {group}: the file is damaged"
            )


def _report(
    survey: Survey, plan: list[_Step], bytes_read: int, ids: tuple[int, ...], seconds: float
) -> LoadReport:
    names = survey.stored.keys() | (survey.listed or {}).keys()
    vision = [name for name in names if is_vision(name)]
    stored = [survey.stored[name].size_bytes for name in vision if name in survey.stored]
    report = LoadReport(
        tensors=len(plan),
        bytes_read=bytes_read,
        experts=ids,
        expert_tensors_skipped=len(survey.expected) - len(plan),
        vision_tensors_skipped=len(vision),
        vision_bytes_skipped=sum(stored),
        seconds=seconds,
    )
    logger.info(
        "%s: read %d tensors, %d bytes in %.1f s; skipped %d image-tower tensors (%d bytes) and "
        "%d tensors of experts held elsewhere",
        survey.folder,
        report.tensors,
        report.bytes_read,
        seconds,
        report.vision_tensors_skipped,
        report.vision_bytes_skipped,
        report.expert_tensors_skipped,
    )
    return report


def _move_buffers(model: nn.Module, device: torch.device | str | None) -> None:
    """Buffers are data the model computed itself, on the CPU; they follow the parameters."""
    target = torch.get_default_device() if device is None else device
    for name, buffer in list(model.named_buffers()):
        assert not buffer.is_meta, f"{name=} was left without data"
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer.to(target))
