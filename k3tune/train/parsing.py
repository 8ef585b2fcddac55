"""A recipe's YAML and flags, parsed by TRL's parser, with what it would let pass refused."""

import difflib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import TrainingArguments
from trl import GRPOConfig, SFTConfig, TrlParser

from k3tune.arguments import (
    DataArguments,
    MonitorArguments,
    PromptArguments,
    RewardArguments,
    RolloutArguments,
)
from k3tune.errors import ConfigError
from k3tune.files import shown

# The groups of options that tell the recipes' files apart.
_RECIPES: Mapping[str, tuple[type, ...]] = {
    "recipes/sft.py": (DataArguments, SFTConfig),
    "recipes/grpo.py": (
        PromptArguments,
        RewardArguments,
        RolloutArguments,
        MonitorArguments,
        GRPOConfig,
    ),
}
_NAMED = 4
_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text (in quotes, where YAML reads something else)",
    list: "a list",
    dict: "a mapping",
}
# What the constructors of TRL and transformers make of values they did not expect.
_OF_CONSTRUCTORS = (
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    KeyError,
    ImportError,
    OSError,
    NotImplementedError,
)


def parse_options(kinds: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse flags and the YAML that ``--config`` names, flags first.

    Args:
        kinds: the dataclasses of the recipe.
        argv: without the program's name; None is the process's own.

    Returns:
        One instance of each dataclass, in their order.

    Raises:
        ConfigError: if the YAML cannot be read or sets environment variables, an option is not one
            of the recipe's or is missing, or a value is not usable.
    """
    words = _words(sys.argv[1:] if argv is None else argv)
    parser = _Parser(kinds)
    if "--config" in words:
        path = _config_path(words)
        content = _read_yaml(path)
        _check_keys(content, path, kinds)
        _check_types(content, path, kinds)
    try:
        *groups, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    except ConfigError:
        raise
    except _OF_CONSTRUCTORS as error:
        raise ConfigError(
            f"the options cannot be used: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error
    if rest:
        flags = [word.removeprefix("--") for word in rest if word.startswith("--")]
        _refuse_unknown(flags or rest, "the command line", kinds)
    return tuple(groups)


class _Parser(TrlParser):
    """TRL's, whose complaints are errors of ours and not pages of usage."""

    def __init__(self, kinds: Sequence[type]) -> None:
        super().__init__(
            kinds,  # type: ignore[arg-type]  # of a NewType that nobody makes
            description="Options are read from the YAML file of --config FILE, and flags go over "
            "them. k3tune's own come first, TRL's follow.",
        )
        for action in self._actions:
            # without it a run would go on with what another one left in the trainer's default
            action.required |= action.dest == "output_dir"

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the options cannot be used: {message}; --help lists them")


def _words(argv: Sequence[str]) -> list[str]:
    """The command line, with ``--config=FILE`` as the two words that TRL looks for."""
    words: list[str] = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    return words


def _config_path(words: Sequence[str]) -> str:
    place = words.index("--config") + 1
    if place == len(words):
        raise ConfigError("--config names no file, expected one YAML file")
    if "--config" in words[place:]:
        raise ConfigError("--config is given twice, expected exactly one YAML file")
    return words[place]


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = yaml.safe_load(text)
        twice = _repeated_key(yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    # a date of a 13th month is a ValueError, and brackets in brackets have an end
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML: {reason}") from error
    if twice:
        raise ConfigError(
            f"{path} has {twice}, expected each key once: the last one would be taken unsaid"
        )
    if content is None:
        raise ConfigError(
            f"{path} is empty, expected options as keys: recipes/configs holds files to start from"
        )
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected options as keys")
    if "env" in content:
        raise ConfigError(
            f"{path} has an env block, expected options only: a config that sets environment "
            "variables changes more than the run it describes; set them where you launch"
        )
    return content


def _repeated_key(node: yaml.Node | None) -> str | None:
    """A key that stands twice in one mapping, and in which line it stands again."""
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    return f"{key.value} again in line {key.start_mark.line + 1}"
                seen.add(key.value)
            below.append(value)
    elif isinstance(node, yaml.SequenceNode):
        below.extend(node.value)
    return next(filter(None, map(_repeated_key, below)), None)


def _check_keys(content: Mapping[Any, Any], path: str, kinds: Sequence[type]) -> None:
    known = _names(kinds)
    unknown = [str(key) for key in content if key not in known]
    if unknown:
        _refuse_unknown(unknown, path, kinds)


def _refuse_unknown(unknown: Sequence[str], place: str, kinds: Sequence[type]) -> NoReturn:
    """Name the recipe that has these options, or the ones that may be meant."""
    for recipe, others in _RECIPES.items():
        theirs = [name for name in unknown if name in _names(others)]
        if theirs and not set(others) <= set(kinds):
            raise ConfigError(
                f"{place} has {_listed(theirs)}, which this recipe does not know and {recipe} "
                f"does: run {recipe}, or leave them out"
            )
    known = _names(kinds)
    near = [name for word in unknown for name in difflib.get_close_matches(word, known, n=1)]
    hint = f"did you mean {_listed(near)}?" if near else "--help lists them"
    raise ConfigError(f"{place} has {_listed(unknown)}, expected options of this recipe: {hint}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _names(kinds: Sequence[type]) -> set[str]:
    return {name for kind in kinds for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


def _check_types(content: Mapping[Any, Any], path: str, kinds: Sequence[type]) -> None:
    """Values of the trainer's options; texts are converted later, and own groups check their own.

    TRL takes whatever YAML gives, and fails somewhere in the middle of a run.
    """
    for kind in kinds:
        if not issubclass(kind, TrainingArguments):
            continue
        hints = get_type_hints(kind)
        if "output_dir" in content and content["output_dir"] is None:
            raise ConfigError(f"{path}: output_dir is None, expected a folder for the run's files")
        for name, value in content.items():
            if name in hints and not isinstance(value, str) and not _fits(value, hints[name]):
                words = [_WORDS[part] for part in _parts(hints[name]) if part in _WORDS]
                raise ConfigError(
                    f"{path}: {name} is {shown(value)}, expected {' or '.join(words)}"
                )


def _fits(value: Any, hint: Any) -> bool:
    parts = _parts(hint)
    return type(value) in parts or (type(value) is int and float in parts)


def _parts(hint: Any) -> list[Any]:
    """The plain types of a hint; lists and mappings without what they hold."""
    if get_origin(hint) in (Union, types.UnionType):
        return [part for inner in get_args(hint) for part in _parts(inner)]
    if get_origin(hint) is Literal:
        return [type(value) for value in get_args(hint)]
    return [get_origin(hint) or hint]
