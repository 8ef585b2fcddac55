"""An optimizer's state by parameter name, the same for one process, DDP and ZeRO-1 or -2.

Under ZeRO a process's optimizer sees one flat FP32 partition a parameter group; which piece of
which parameter lies where, DeepSpeed 0.19 notes at each parameter (``_hp_mapping``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from k3tune.errors import CheckpointError
from k3tune.parallel.gather import FactorRows
from k3tune.train.state import read_json, write_json

INDEX_NAME = "optimizer.json"
_SHARD_BYTES = 4 << 30
_GROUP_FIELDS = ("lr", "initial_lr")


class OptimizerView(NamedTuple):
    """An optimizer and the names of what it optimises.

    Attributes:
        optimizer: the torch optimizer whose ``step`` runs; every group has a ``name``.
        parameters: name -> parameter.
        zero: DeepSpeed's ZeRO optimizer around it, if there is one.
        rows: under expert parallelism, which parameters hold rows of some experts.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    zero: Any = None
    rows: FactorRows | None = None


def group_label(group: Mapping[str, Any]) -> str:
    """The target group of a parameter group, which may be one of several of it.

    Under expert parallelism DeepSpeed takes ``name`` for its own.
    """
    label: str = group.get("target", group["name"])
    return label


class NamedState(NamedTuple):
    """State of one parameter: tensors of its size or another, and numbers."""

    name: str
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


def save_optimizer(view: OptimizerView, folder: Path, *, writes: bool) -> None:
    """Write ``optimizer.json`` and the state's shards; every process must call it.

    Args:
        view: what to save.
        folder: checkpoint folder.
        writes: whether this process writes; the others take part in the gathering.
    """
    numbers: dict[str, dict[str, float]] = {}
    files: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    count = 0

    def flush() -> None:
        nonlocal count
        if shard:
            count += 1
            file = f"optimizer-{count:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, file))
            shard.clear()

    for state in _states(view):
        if not writes:
            continue
        numbers[state.name] = state.numbers
        for key, tensor in state.tensors.items():
            shard[f"{state.name}/{key}"] = tensor.detach().cpu().contiguous()
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            flush()
    if writes:
        flush()
        groups = {
            group_label(group): {field: group[field] for field in _GROUP_FIELDS if field in group}
            for group in view.optimizer.param_groups
        }
        index = {
            "optimizer": type(view.optimizer).__name__,
            "groups": groups,
            "numbers": numbers,
            "files": files,
        }
        write_json(folder / INDEX_NAME, index)


def load_optimizer(view: OptimizerView, folder: Path) -> None:
    """Read what :func:`save_optimizer` wrote, on any number of processes.

    Raises:
        CheckpointError: if it is the state of another optimizer or of other parameters.
    """
    index = read_json(folder / INDEX_NAME)
    if index["optimizer"] != type(view.optimizer).__name__:
        raise CheckpointError(
            f"{folder} holds the state of {index['optimizer']}, expected "
            f"{type(view.optimizer).__name__}: resume with the same optim"
        )
    numbers: dict[str, dict[str, float]] = index["numbers"]
    if numbers and (other := sorted(numbers.keys() ^ view.parameters.keys())):
        where = "the checkpoint" if other[0] in numbers else "the model"
        raise CheckpointError(
            f"{folder}: {len(other)} parameters differ from the model's; {other[0]} is in {where} "
            "only: resume with the same LoRA options"
        )
    with _StateReader(folder, index["files"]) as reader:
        states = {name: reader.state(name, numbers[name], view) for name in numbers}
        content = view.optimizer.state_dict()
        for group in content["param_groups"]:
            group.update(index["groups"].get(group_label(group), {}))
        order = [p for group in view.optimizer.param_groups for p in group["params"]]
        if view.zero is None:
            names = {id(parameter): name for name, parameter in view.parameters.items()}
            found = [states.get(names[id(parameter)]) for parameter in order]
        else:
            found = list(_partitions(view, states)) if states else []
        content["state"] = {
            place: {**state.tensors, **{k: torch.tensor(v) for k, v in state.numbers.items()}}
            for place, state in enumerate(found)
            if state is not None
        }
        view.optimizer.load_state_dict(content)


def fit_schedule(state: Mapping[str, Any], num_groups: int) -> dict[str, Any]:
    """A scheduler's state for a run with another number of parameter groups.

    Their number depends on how experts are spread; all groups have one schedule.
    """
    fitted = dict(state)
    for name in ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs"):
        values = state.get(name)
        if isinstance(values, list) and len(values) != num_groups:
            assert all(value == values[0] for value in values), f"{name=} {values=}"
            fitted[name] = values[:1] * num_groups
    return fitted


def refresh_master(view: OptimizerView, name: str) -> None:
    """Make ZeRO's FP32 partition equal to a parameter that was changed in place."""
    if view.zero is not None:
        from deepspeed.utils import safe_set_full_fp32_param

        parameter = view.parameters[name]
        safe_set_full_fp32_param(parameter, parameter.data)


def read_rows(file: Any, key: str, rows: Sequence[int] | None) -> Tensor:
    """Some rows of a tensor in an open safetensors file, or (None) all of it."""
    if rows is None:
        tensor: Tensor = file.get_tensor(key)
        return tensor
    stored = file.get_slice(key)
    first, count = rows[0], len(rows)
    if list(rows) == list(range(first, first + count)):
        part: Tensor = stored[first : first + count]
        return part
    return torch.cat([stored[row : row + 1] for row in rows])


def _states(view: OptimizerView) -> Iterator[NamedState]:
    """State of every parameter, gathered, in one order on all processes; whole where it is written.

    Under expert parallelism a process that does not write gets no tensors.
    """
    if view.zero is None:
        for name, parameter in view.parameters.items():
            if parameter in view.optimizer.state:
                yield _split(name, view.optimizer.state[parameter])
        return
    names = {id(parameter): name for name, parameter in view.parameters.items()}
    groups = zip(view.zero.bit16_groups, view.zero.single_partition_of_fp32_groups, strict=True)
    for parameters, flat in groups:
        if flat not in view.optimizer.state:
            continue
        local = _split("", view.optimizer.state[flat])
        for parameter in parameters:
            name = names[id(parameter)]
            tensors = {}
            for key, part in local.tensors.items():
                whole: Tensor | None = _gather(parameter, part)
                if view.rows is not None and whole is not None:
                    whole = view.rows.whole(name, whole)
                if whole is not None:
                    tensors[key] = whole
            yield NamedState(name, tensors, local.numbers)


def _gather(parameter: Any, partition: Tensor) -> Tensor:
    """A parameter's whole state from its pieces in the processes' partitions.

    DeepSpeed's ``safe_get_full_optimizer_state`` does the same, but links only the first parameter
    group's state to its parameters.
    """
    whole = torch.zeros(parameter.numel(), dtype=partition.dtype, device=partition.device)
    piece = parameter._hp_mapping
    if piece is not None:
        here, there = piece.hp_fragment_address, piece.lp_fragment_address
        source = partition.narrow(0, here.start, here.numel)
        whole.narrow(0, there.start, there.numel).copy_(source)
    torch.distributed.all_reduce(whole, group=parameter._dp_group)
    return whole.view_as(parameter)


def _split(name: str, state: Mapping[str, Any]) -> NamedState:
    tensors, numbers = {}, {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            tensors[key] = value
        elif value is not None:
            numbers[key] = float(value)
    return NamedState(name, tensors, numbers)


def _partitions(view: OptimizerView, states: Mapping[str, NamedState]) -> Iterator[NamedState]:
    """This process's flat partition of each group, put together from whole tensors."""
    names = {id(parameter): name for name, parameter in view.parameters.items()}
    groups = zip(view.zero.bit16_groups, view.zero.single_partition_of_fp32_groups, strict=True)
    for parameters, flat in groups:
        members = [(parameter, states[names[id(parameter)]]) for parameter in parameters]
        first = members[0][1]
        tensors = {key: torch.zeros_like(flat.data) for key in first.tensors}
        for parameter, state in members:
            piece = parameter._hp_mapping
            if piece is None:
                continue
            here, there = piece.hp_fragment_address, piece.lp_fragment_address
            for key, tensor in tensors.items():
                source = state.tensors[key].flatten().narrow(0, there.start, there.numel)
                tensor.narrow(0, here.start, here.numel).copy_(source)
        yield NamedState("", tensors, first.numbers)


class _StateReader(ExitStack):
    """Reads states from a checkpoint's shards, each file opened once."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        super().__init__()
        self.folder, self.files = folder, files
        self._keys: dict[str, list[str]] = {}
        for key in files:
            self._keys.setdefault(key.rpartition("/")[0], []).append(key)
        self._open: dict[str, Any] = {}

    def state(self, name: str, numbers: dict[str, float], view: OptimizerView) -> NamedState:
        """A parameter's state: its tensors from the files, its rows as ``view`` holds them."""
        held = None if view.rows is None else view.rows.held(name)
        tensors = {}
        for key in self._keys.get(name, []):
            file = self.files[key]
            if file not in self._open:
                opened = safe_open(self.folder / file, framework="pt")
                self._open[file] = self.enter_context(opened)
            tensors[key.rpartition("/")[2]] = read_rows(self._open[file], key, held)
        return NamedState(name, tensors, numbers)
