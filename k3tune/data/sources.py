"""Files and datasets of samples, tokenised with their labels, every bad sample accounted for.

A sample has one of three forms: ``messages`` (with ``tools``, if any), ``prompt`` and
``completion`` (two texts, or two lists of messages), or ``text``. Loss falls on the assistant's
part of messages, on the completion, or on the whole text.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3tune.data.chat import NO_TARGET, RenderedChat, check_thinking_effort, render_chat
from k3tune.data.errors import DataError, Problem
from k3tune.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

    from k3tune.data.tokenizer import K3Tokenizer

_FORMS = ({"messages"}, {"prompt", "completion"}, {"text"})
_FORM_KEYS = ("messages", "prompt", "completion", "text")
_COLUMN_FORMATS = {".parquet": "parquet", ".csv": "csv"}
_EXAMPLES = 3


@dataclass(frozen=True)
class SampleOptions:
    """How samples are tokenised, and what happens to bad ones.

    Attributes:
        max_length: longest sample, in tokens; a longer one is bad, none is cut.
        on_bad_sample: ``skip`` leaves bad samples out and reports them, ``error`` refuses them all
            at once.
        thinking, thinking_effort, train_opening_tag: see :func:`k3tune.data.render_chat`.
        num_proc: processes that tokenise; None is this one.
    """

    max_length: int
    on_bad_sample: Literal["skip", "error"] = "skip"
    thinking: bool = True
    thinking_effort: str | None = "max"
    train_opening_tag: bool = True
    num_proc: int | None = None

    def __post_init__(self) -> None:
        if self.on_bad_sample not in ("skip", "error"):
            raise ConfigError(f"on_bad_sample is {self.on_bad_sample!r}, expected skip or error")
        if type(self.max_length) is not int or self.max_length < 2:
            raise ConfigError(f"max_length is {self.max_length!r}, expected a number from 2 on")
        check_thinking_effort(self.thinking_effort)


@dataclass(frozen=True)
class BadSamples:
    """How many samples have one problem, and the first few: where they are and what is wrong."""

    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class SampleReport:
    """What became of a source's samples; ``str`` of it is for people.

    ``num_tokens`` and ``num_trained_tokens`` count those of the samples that were kept.
    """

    source: str
    num_samples: int
    num_kept: int
    num_tokens: int
    num_trained_tokens: int
    bad: Mapping[Problem, BadSamples] = field(default_factory=dict)
    ignored_columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.num_kept} of {self.num_samples} samples kept, "
            f"{self.num_tokens} tokens, {self.num_trained_tokens} of them trained"
        ]
        for problem, samples in self.bad.items():
            lines.append(f"{samples.count} samples left out, {problem}:")
            lines += [f"  {example}" for example in samples.first]
        if self.ignored_columns:
            lines.append(f"columns not used: {', '.join(self.ignored_columns)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Samples:
    """Tokenised samples and the report on them.

    Attributes:
        dataset: columns ``input_ids``, ``labels`` (-100 where nothing is trained), as TRL's
            ``SFTTrainer`` takes them, and ``sample_id``, the line, item or row, from 1.
        report: see :class:`SampleReport`.
    """

    dataset: "Dataset"
    report: SampleReport


def load_samples(
    path: str, tokenizer: "K3Tokenizer", options: SampleOptions, *, split: str = "train"
) -> Samples:
    """Read and tokenise a JSONL, JSON, parquet or CSV file, a dataset folder or a dataset's name.

    Args:
        path: a file, a folder, or what ``datasets.load_dataset`` takes. Column formats cannot tell
            a missing key from null: tool-call arguments and tools stand in them as JSON text.
        tokenizer: of the base.
        options: see :class:`SampleOptions`.
        split: of a dataset; a file is one split.

    Raises:
        DataError: if the source cannot be read, if no sample is left, or, with
            ``on_bad_sample="error"``, with the report, if any sample is bad.
    """
    from datasets import Features, List, Value
    from datasets.fingerprint import generate_random_fingerprint

    rows, unit = read_source(path, split)
    if not len(rows):
        raise DataError(f"{path} holds no sample, expected at least one", Problem.UNKNOWN_FORM)
    ids = List(Value("int32"))
    columns = {"input_ids": ids, "labels": ids, "sample_id": Value("int64")}
    counts = dict.fromkeys(("num_tokens", "num_trained_tokens"), Value("int64"))
    texts = dict.fromkeys(("problem", "detail"), Value("string"))
    encoded = rows.map(
        _Encoder(tokenizer, options, f"{path} {unit}"),
        with_indices=True,
        num_proc=options.num_proc,
        remove_columns=rows.column_names,
        features=Features({**columns, **counts, **texts, "ignored": List(Value("string"))}),
        # no cache: it would have to be told apart by a hash of the whole vocabulary
        keep_in_memory=True,
        new_fingerprint=generate_random_fingerprint(),
        desc="Tokenising",
    )
    report = _report(path, encoded)
    if report.bad and (options.on_bad_sample == "error" or not report.num_kept):
        raise DataError(str(report), next(iter(report.bad)))
    kept = [index for index, problem in enumerate(encoded["problem"]) if not problem]
    return Samples(encoded.select(kept).select_columns(list(columns)), report)


def encode_sample(
    sample: Mapping[str, Any], tokenizer: "K3Tokenizer", options: SampleOptions
) -> tuple[list[int], list[int]]:
    """Ids and labels of one sample of any form.

    Returns:
        Two lists of one length; labels are -100 where nothing is trained.

    Raises:
        DataError: with the problem, if the sample cannot be trained on.
    """
    present = {key for key in _FORM_KEYS if sample.get(key) is not None}
    if present not in _FORMS:
        raise DataError(
            f"the sample has {', '.join(sorted(present)) or 'none of ' + ', '.join(_FORM_KEYS)}, "
            "expected messages, or prompt and completion, or text",
            Problem.UNKNOWN_FORM,
        )
    if present == {"messages"}:
        ids, labels = _chat(sample["messages"], 0, sample, tokenizer, options)
    elif present == {"text"}:
        ids, labels = _completion("", sample["text"], tokenizer)
    elif isinstance(sample["prompt"], str):
        ids, labels = _completion(sample["prompt"], sample["completion"], tokenizer)
    else:
        ids, labels = _answer(sample, tokenizer, options)
    if len(ids) > options.max_length:
        raise DataError(
            f"the sample has {len(ids)} tokens, expected at most {options.max_length}",
            Problem.TOO_LONG,
        )
    # nothing predicts the first token
    if all(label == NO_TARGET for label in labels[1:]):
        raise DataError("the sample has no token that is trained", Problem.NOTHING_TRAINED)
    return ids, labels


def _chat(
    messages: Any,
    train_from: int,
    sample: Mapping[str, Any],
    tokenizer: "K3Tokenizer",
    options: SampleOptions,
) -> tuple[list[int], list[int]]:
    rendered: RenderedChat = render_chat(
        messages,
        tokenizer,
        tools=_tools(sample.get("tools")),
        thinking=options.thinking,
        thinking_effort=options.thinking_effort,
        train_opening_tag=options.train_opening_tag,
        train_from=train_from,
    )
    if rendered.num_unparsed_calls:
        raise DataError(
            f"{rendered.num_unparsed_calls} tool calls have arguments that are no JSON, expected "
            "a JSON object",
            Problem.INVALID_TOOL_JSON,
        )
    return rendered.input_ids, rendered.labels


def _answer(
    sample: Mapping[str, Any], tokenizer: "K3Tokenizer", options: SampleOptions
) -> tuple[list[int], list[int]]:
    prompt, completion = sample["prompt"], sample["completion"]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise DataError(
            f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}, "
            "expected two texts or two lists of messages"
        )
    return _chat([*prompt, *completion], len(prompt), sample, tokenizer, options)


def _completion(
    prompt: str, completion: Any, tokenizer: "K3Tokenizer"
) -> tuple[list[int], list[int]]:
    """Prompt and completion are encoded apart, as they are when an answer is generated."""
    if not isinstance(completion, str):
        raise DataError(f"the text is a {type(completion).__name__}, expected text")
    given = tokenizer.encode_text(prompt)
    trained = [*tokenizer.encode_text(completion), tokenizer.end_of_text_token_id]
    return given + trained, [NO_TARGET] * len(given) + trained


def _tools(tools: Any) -> Any:
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tools is no JSON: {error}", Problem.INVALID_TOOL_JSON) from error


class _Encoder:
    """The function that a dataset is mapped through; sent to each worker with its tokenizer."""

    def __init__(self, tokenizer: "K3Tokenizer", options: SampleOptions, place: str) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.place = place

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            "input_ids": [],
            "labels": [],
            "sample_id": row.get("__number", index + 1),
            "num_tokens": 0,
            "num_trained_tokens": 0,
            "problem": "",
            "detail": "",
            "ignored": [],
        }
        try:
            sample = row_sample(row)
            result["ignored"] = [key for key in sample if key not in (*_FORM_KEYS, "tools")]
            ids, labels = encode_sample(sample, self.tokenizer, self.options)
        except DataError as error:
            detail = f"{self.place} {result['sample_id']}: {error}"
            return {**result, "problem": error.problem.value, "detail": detail}
        trained = sum(label != NO_TARGET for label in labels[1:])
        counts = {"num_tokens": len(ids), "num_trained_tokens": trained}
        return {**result, "input_ids": ids, "labels": labels, **counts}


def row_sample(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of :func:`read_source` as the sample it holds.

    Raises:
        DataError: if the row is no JSON object, or has nulls where keys may be missing.
    """
    return _parse(row["__json"]) if "__json" in row else _whole(row)


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        sample = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON: {error}", Problem.INVALID_JSON) from error
    if not isinstance(sample, dict):
        raise DataError(f"a JSON {type(sample).__name__}, expected an object", Problem.INVALID_JSON)
    return sample


def _whole(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse nulls where a column format may have put them in place of missing keys."""
    messages = [
        message
        for key in ("messages", "prompt", "completion")
        if isinstance(row.get(key), list)
        for message in row[key]
        if isinstance(message, dict)
    ]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if _holds_null(row.get("tools") or ()) or any(_holds_null(_given(call)) for call in calls):
        raise DataError(
            "tools or tool-call arguments hold null, which column formats also put for a missing "
            "key: store them as JSON text",
            Problem.INVALID_TOOL_JSON,
        )
    return row


def _given(call: Any) -> Any:
    function = (call.get("function") or call) if isinstance(call, dict) else {}
    return function.get("arguments") or ()


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or _holds_null(item) for item in value.values())
    return isinstance(value, list) and any(item is None or _holds_null(item) for item in value)


def read_source(path: str, split: str = "train") -> "tuple[Dataset, str]":
    """Rows of a source as :func:`row_sample` takes them, and the word for their place.

    Raises:
        DataError: if the source cannot be read.
    """
    file = Path(path)
    try:
        if file.suffix in (".jsonl", ".ndjson", ".json"):
            return _read_json(file)
        return _read_columns(path, split), "row"
    # datasets raises errors of many kinds, down to those of its parsers and of the network
    except Exception as error:
        raise DataError(
            f"cannot read {path} (split {split}): {error}; expected a .jsonl, .json, .parquet or "
            ".csv file, a dataset folder or the name of a dataset",
            Problem.UNKNOWN_FORM,
        ) from error


def _read_json(file: Path) -> "tuple[Dataset, str]":
    from datasets import Dataset

    content = file.read_bytes()
    if file.suffix == ".json" and content.lstrip()[:1] == b"[":
        items = [json.dumps(item).encode("utf-8") for item in json.loads(content)]
        return Dataset.from_dict({"__number": range(1, len(items) + 1), "__json": items}), "item"
    lines = {
        number: line for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()
    }
    return Dataset.from_dict({"__number": list(lines), "__json": list(lines.values())}), "line"


def _read_columns(path: str, split: str) -> "Dataset":
    from datasets import DatasetDict, load_dataset, load_from_disk

    file = Path(path)
    if file.suffix in _COLUMN_FORMATS:
        return load_dataset(_COLUMN_FORMATS[file.suffix], data_files=path, split="train")
    if (file / "state.json").is_file() or (file / "dataset_dict.json").is_file():
        saved = load_from_disk(path)
        return saved[split] if isinstance(saved, DatasetDict) else saved
    return load_dataset(path, split=split)


def _report(source: str, encoded: "Dataset") -> SampleReport:
    problems = list(encoded["problem"])
    counts = Counter(problem for problem in problems if problem)
    first: dict[str, list[str]] = {problem: [] for problem in counts}
    for index, problem in enumerate(problems):
        if problem and len(first[problem]) < _EXAMPLES:
            first[problem].append(encoded[index]["detail"])
    ignored: Iterable[str] = {name for names in encoded["ignored"] for name in names}
    return SampleReport(
        source=source,
        num_samples=len(problems),
        num_kept=len(problems) - counts.total(),
        num_tokens=sum(encoded["num_tokens"]),
        num_trained_tokens=sum(encoded["num_trained_tokens"]),
        bad={
            Problem(problem): BadSamples(count, tuple(first[problem]))
            for problem, count in counts.most_common()
        },
        ignored_columns=tuple(sorted(ignored)),
    )
