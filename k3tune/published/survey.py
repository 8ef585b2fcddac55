"""What lies in a checkpoint folder, judged against its config: index, headers, no payload.

Standard library only. ``inspect`` reports the problems found here; the loader refuses them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tune.errors import CheckpointError
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    StoredTensor,
    pickle_message,
    read_header,
    read_json,
)
from k3tune.published.tensor_table import TensorSpec, is_vision, text_tensors

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Half a million tensors can be missing for one reason; a list of them helps nobody.
_LISTED = 10


@dataclass(frozen=True)
class Survey:
    """A checkpoint folder as found.

    Attributes:
        folder: the folder.
        config: its ``config.json``.
        architecture: the config, checked.
        expected: text tensors the config asks for.
        listed: tensor name -> file name as the index says; None without an index.
        stored: tensor name -> place, from the headers of the files that are there. Image-tower
            tensors are here only as far as their files are there and sound.
        problems: everything wrong, as sentences with file, tensor, expected and found.
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: Architecture
    expected: dict[str, TensorSpec]
    listed: dict[str, str] | None = None
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def has_weights(self) -> bool:
        """Whether any file with tensors was found."""
        return bool(self.stored) or any(
            (self.folder / file).is_file() for file in set((self.listed or {}).values())
        )

    def require_sound(self) -> None:
        """Refuse a checkpoint with a problem.

        Raises:
            CheckpointError: with the first problem and how many more there are.
        """
        if self.problems:
            more = len(self.problems) - 1
            tail = f" ({more} more: k3tune inspect {self.folder} lists all)" if more else ""
            raise CheckpointError(self.problems[0] + tail)


def survey_checkpoint(folder: str | Path) -> Survey:
    """Read config, index and headers of a checkpoint folder and compare them.

    Raises:
        ConfigError: if the config is missing or not K3's.
        CheckpointError: if the index does not parse or names something else than files beside it.
    """
    folder = Path(folder)
    config = read_config(folder)
    architecture = parse_config(config)
    expected = text_tensors(architecture)
    index = folder / INDEX_NAME
    if index.is_file():
        survey = Survey(folder, config, architecture, expected, _read_index(index))
        _read_shards(survey)
        _compare_names(survey, index)
    else:
        survey = Survey(folder, config, architecture, expected)
        _read_single(survey)
    _compare_tensors(survey)
    return survey


def _read_index(index: Path) -> dict[str, str]:
    try:
        table = read_json(index.read_bytes(), index)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})") from error
    listed = table.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(
            f"{index}: expected a weight_map from tensor to file name, found "
            f"{str(listed)[:100]}: download it again"
        )
    for file in sorted(set(listed.values())):
        if file.endswith(_PICKLE_SUFFIXES):
            raise CheckpointError(pickle_message(index.parent / file))
        # a name with a folder in it could point anywhere on the machine
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: expected names of safetensors files in the same folder, found {file!r}"
            )
    return listed


def _read_single(survey: Survey) -> None:
    """A folder without index: one file, nothing but a config, or something unusable."""
    file = survey.folder / SINGLE_NAME
    if file.is_file():
        try:
            survey.stored.update(read_header(file))
        except CheckpointError as error:
            survey.problems.append(str(error))
            return
        _compare_names(survey, file)
        return
    shards = sorted(survey.folder.glob("model-*.safetensors"))
    if shards:
        survey.problems.append(
            f"{survey.folder / INDEX_NAME}: expected beside {shards[0].name} and "
            f"{len(shards) - 1} more, found no such file: download the index"
        )
    else:
        _report_pickles(survey)


def _report_pickles(survey: Survey) -> None:
    """In a folder without safetensors, say so of weights in a form that is refused."""
    pickles = [path for path in survey.folder.iterdir() if path.name.endswith(_PICKLE_SUFFIXES)]
    survey.problems.extend(map(pickle_message, sorted(pickles)[:1]))


def _read_shards(survey: Survey) -> None:
    """Read the headers of the listed files and hold them against the index."""
    assert survey.listed is not None, f"{survey.folder=} has no index"
    by_file: dict[str, list[str]] = {}
    for name, file in survey.listed.items():
        by_file.setdefault(file, []).append(name)
    if not any((survey.folder / file).is_file() for file in by_file):
        _report_pickles(survey)
        return
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file, names in sorted(by_file.items()):
        path = survey.folder / file
        # text-only work never opens the image tower, so nothing about its files is a problem
        tower_only = all(map(is_vision, names))
        if path.is_file():
            try:
                headers[file] = read_header(path)
            except CheckpointError as error:
                if not tower_only:
                    survey.problems.append(str(error))
        elif not tower_only:
            text = sum(not is_vision(name) for name in names)
            survey.problems.append(
                f"{path}: expected a shard with {text} text tensors (such as {names[0]}), found "
                "no such file: download it"
            )
    _compare_index(survey, headers)


def _compare_index(survey: Survey, headers: dict[str, dict[str, StoredTensor]]) -> None:
    assert survey.listed is not None, f"{survey.folder=} has no index"
    holders: dict[str, str] = {}
    doubled, unlisted, misplaced = [], [], []
    for file, header in headers.items():
        for name, tensor in header.items():
            if is_vision(name):
                survey.stored.setdefault(name, tensor)
                continue
            if name in holders:
                doubled.append(
                    f"{survey.folder / file}: tensor {name}: expected in one file, found in "
                    f"{holders[name]} as well"
                )
                continue
            holders[name] = file
            survey.stored[name] = tensor
            if name not in survey.listed:
                unlisted.append(
                    f"{survey.folder / file}: tensor {name}: expected in {INDEX_NAME}, found only "
                    "in the file: index and files are not of one download"
                )
    for name, file in survey.listed.items():
        if file in headers and name not in headers[file] and not is_vision(name):
            found = f"found in {holders[name]}" if name in holders else "found in no file"
            misplaced.append(
                f"{survey.folder / file}: tensor {name}: expected here by {INDEX_NAME}, {found}: "
                "index and files are not of one download"
            )
    for problems in (doubled, misplaced, unlisted):
        _report(survey, problems)


def _compare_names(survey: Survey, source: Path) -> None:
    """Hold the names listed in ``source`` (the index, or the only file) against the config."""
    names: Mapping[str, Any] = survey.stored if survey.listed is None else survey.listed
    _report(
        survey,
        (
            f"{source}: tensor {name}: expected by config.json as {spec.describe()}, found no such "
            "tensor"
            for name, spec in survey.expected.items()
            if name not in names and name not in survey.stored
        ),
    )
    _report(
        survey,
        (
            f"{source}: tensor {name}: expected only the tensors of config.json, found this one "
            "beside them"
            for name in names
            if name not in survey.expected and not is_vision(name)
        ),
    )


def _compare_tensors(survey: Survey) -> None:
    """Hold dtype and shape of the stored text tensors against the config."""
    _report(
        survey,
        (
            f"{tensor.file}: tensor {name}: expected {spec.describe()}, found {tensor.dtype} "
            f"{list(tensor.shape)}"
            for name, tensor in survey.stored.items()
            if (spec := survey.expected.get(name)) is not None
            and not (tensor.dtype == spec.dtype and spec.accepts(tensor.shape))
        ),
    )


def _report(survey: Survey, problems: Iterable[str]) -> None:
    """Add one kind of problem: the first few in full, the rest as a number."""
    found = list(problems)
    survey.problems.extend(found[:_LISTED])
    if len(found) > _LISTED:
        survey.problems.append(f"{len(found) - _LISTED} more tensors like the last")
