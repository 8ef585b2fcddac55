"""What lies in a checkpoint folder, judged against its config: index, headers, no payload.

Standard library only. ``inspect`` reports the problems found here; the loader refuses them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tune.errors import CheckpointError
from k3tune.files import shown
from k3tune.published.architecture import Architecture, parse_config, read_config
from k3tune.published.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    StoredTensor,
    check_names,
    pickle_message,
    read_header,
    read_json,
    unreadable,
)
from k3tune.published.tensor_table import TensorSpec, is_vision, text_tensors

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Half a million tensors can be missing for one reason; a list of them helps nobody.
_LISTED = 10
_AGAIN = "download the checkpoint again"
_NOT_ONE_DOWNLOAD = "index and files are not of one download, so download both again"
_LONGEST_NAME_BYTES = 255


@dataclass(frozen=True)
class Survey:
    """A checkpoint folder as found.

    Attributes:
        folder: the folder.
        config: its ``config.json``.
        architecture: the config, checked.
        expected: text tensors the config asks for.
        files: names of the files in the folder.
        listed: tensor name -> file name as the index says; None without an index.
        total_size: bytes of all tensors as the index says; None if it does not say.
        stored: tensor name -> place, from the headers of the files that are there. Image-tower
            tensors are here only as far as their files are there and sound.
        ignored_files: safetensors files in the folder that are no part of the checkpoint.
        problems: everything wrong, as sentences with file, tensor, expected, found and what to do.
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: Architecture
    expected: dict[str, TensorSpec]
    files: frozenset[str]
    listed: dict[str, str] | None = None
    total_size: float | None = None
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    ignored_files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def has_weights(self) -> bool:
        """Whether any file with tensors was found."""
        return bool(self.stored) or not self.files.isdisjoint((self.listed or {}).values())

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
    files = _file_names(folder)
    if INDEX_NAME in files:
        index = folder / INDEX_NAME
        survey = Survey(folder, config, architecture, expected, files, *_read_index(index))
        _read_shards(survey)
        _compare_names(survey, index)
    else:
        survey = Survey(folder, config, architecture, expected, files)
        _read_single(survey)
    _compare_tensors(survey)
    _compare_total(survey)
    return survey


def _file_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise CheckpointError(unreadable(folder, error)) from error


def _read_index(index: Path) -> tuple[dict[str, str], float | None]:
    """The files by tensor, and the size of all."""
    try:
        table = read_json(index.read_bytes(), index)
    except OSError as error:
        raise CheckpointError(unreadable(index, error)) from error
    listed, metadata = table.get("weight_map"), table.get("metadata")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(
            f"{index}: expected a weight_map from tensor to file name, found "
            f"{shown(listed)}: download it again"
        )
    check_names(listed, index)
    for file in sorted(set(listed.values())):
        if file.endswith(_PICKLE_SUFFIXES):
            raise CheckpointError(pickle_message(index.parent / file))
        # a name with a folder in it could point anywhere on the machine
        is_name = Path(file).name == file and file.isprintable()
        if not is_name or len(file.encode()) > _LONGEST_NAME_BYTES or file[-12:] != ".safetensors":
            raise CheckpointError(
                f"{index}: expected names of safetensors files in the same folder, found "
                f"{shown(file)}: download it again"
            )
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # some writers add up fractions of bytes, so a sum may stand as 8.0
    if total is not None and type(total) not in (int, float):
        raise CheckpointError(
            f"{index}: expected metadata.total_size to be a number of bytes, found "
            f"{shown(total)}: download it again"
        )
    return listed, total


def _read_single(survey: Survey) -> None:
    """A folder without index: one file, nothing but a config, or something unusable."""
    file = survey.folder / SINGLE_NAME
    if SINGLE_NAME in survey.files:
        try:
            survey.stored.update(read_header(file))
        except CheckpointError as error:
            survey.problems.append(str(error))
        else:
            _compare_names(survey, file)
        _judge_others(survey, {SINGLE_NAME}, "the one file without an index")
        return
    shards = sorted(filter(_is_shard_name, survey.files))
    if shards:
        survey.problems.append(
            f"{survey.folder / INDEX_NAME}: expected beside {shards[0]} and "
            f"{len(shards) - 1} more, found no such file: download the index"
        )
    else:
        _report_pickles(survey)


def _is_shard_name(file: str) -> bool:
    """Whether a checkpoint's weights go by such a name."""
    return file == SINGLE_NAME or (file.startswith("model-") and file.endswith(".safetensors"))


def _judge_others(survey: Survey, read: set[str], named: str) -> None:
    """Safetensors files besides those ``read``: weights of another download, or none of ours."""
    extra = []
    for file in sorted(survey.files - read):
        if not file.endswith(".safetensors"):
            continue
        text = _text_names(survey.folder / file) if _is_shard_name(file) else []
        if text:
            extra.append(
                f"{survey.folder / file}: extra text tensor {text[0]} (one of {len(text)}): "
                f"expected no weights beside {named}, found this file: remove it, or "
                "download the checkpoint anew into an empty folder"
            )
        else:
            survey.ignored_files.append(file)
    _report(survey, extra)


def _text_names(file: Path) -> list[str]:
    """Names of a file's text tensors; none if it cannot be read, as nothing of it is needed."""
    try:
        return [name for name in read_header(file) if not is_vision(name)]
    except CheckpointError:
        return []


def _report_pickles(survey: Survey) -> None:
    """In a folder without safetensors, say so of weights in a form that is refused."""
    pickles = sorted(file for file in survey.files if file.endswith(_PICKLE_SUFFIXES))
    survey.problems.extend(pickle_message(survey.folder / file) for file in pickles[:1])


def _read_shards(survey: Survey) -> None:
    """Read the headers of the listed files and hold them against the index."""
    assert survey.listed is not None, f"{survey.folder=} has no index"
    by_file: dict[str, list[str]] = {}
    for name, file in survey.listed.items():
        by_file.setdefault(file, []).append(name)
    if survey.files.isdisjoint(by_file):
        _report_pickles(survey)
        _judge_others(survey, set(by_file), f"the files of {INDEX_NAME}")
        return
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file, names in sorted(by_file.items()):
        path = survey.folder / file
        # text-only work never opens the image tower, so nothing about its files is a problem
        tower_only = all(map(is_vision, names))
        if file in survey.files:
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
    _judge_others(survey, set(by_file), f"the files of {INDEX_NAME}")


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
                    f"{holders[name]} as well: {_NOT_ONE_DOWNLOAD}"
                )
                continue
            holders[name] = file
            survey.stored[name] = tensor
            if name not in survey.listed:
                unlisted.append(
                    f"{survey.folder / file}: tensor {name}: expected in {INDEX_NAME}, found only "
                    f"in the file: {_NOT_ONE_DOWNLOAD}"
                )
    for name, file in survey.listed.items():
        if file in headers and name not in headers[file] and not is_vision(name):
            found = f"found in {holders[name]}" if name in holders else "found in no file"
            misplaced.append(
                f"{survey.folder / file}: tensor {name}: expected here by {INDEX_NAME}, {found}: "
                f"{_NOT_ONE_DOWNLOAD}"
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
            f"tensor: take config.json and weights from one checkpoint, or {_AGAIN}"
            for name, spec in survey.expected.items()
            if name not in names and name not in survey.stored
        ),
    )
    _report(
        survey,
        (
            f"{source}: tensor {name}: expected only the tensors of config.json, found this one "
            f"beside them: take config.json and weights from one checkpoint, or {_AGAIN}"
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
            f"{list(tensor.shape)}: use the weights as published, or {_AGAIN}"
            for name, tensor in survey.stored.items()
            if (spec := survey.expected.get(name)) is not None
            and not (tensor.dtype == spec.dtype and spec.accepts(tensor.shape))
        ),
    )


def _compare_total(survey: Survey) -> None:
    """Hold the index's sum against the headers, if all it lists was read and nothing else is wrong.

    A problem above changes the sum as well, and would only be said twice.
    """
    if survey.total_size is None or survey.problems or survey.listed is None:
        return
    if survey.stored.keys() != survey.listed.keys():
        return
    found = sum(tensor.size_bytes for tensor in survey.stored.values())
    if found != survey.total_size:
        survey.problems.append(
            f"{survey.folder / INDEX_NAME}: expected tensors of {survey.total_size} bytes in all "
            f"by its metadata.total_size, found {found}: {_NOT_ONE_DOWNLOAD}"
        )


def _report(survey: Survey, problems: Iterable[str]) -> None:
    """Add one kind of problem: the first few in full, the rest as a number."""
    found = list(problems)
    survey.problems.extend(found[:_LISTED])
    if len(found) > _LISTED:
        survey.problems.append(f"{len(found) - _LISTED} more tensors like the last")
