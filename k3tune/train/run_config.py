"""What a run was asked to do: written down before its first step, held against checkpoints."""

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

import k3tune
from k3tune.errors import ConfigError
from k3tune.files import replace_file

logger = logging.getLogger(__name__)

FILE_NAME = "config.yaml"
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "datasets",
    "safetensors",
    "tiktoken",
)
# With another value of one of these a checkpoint's data position or state means something else.
_FIXED_TRAINING = (
    "seed",
    "data_seed",
    "max_length",
    "packing",
    "optim",
    "shuffle_dataset",
    "train_sampling_strategy",
    "generation_batch_size",
    "num_generations",
    "num_iterations",
    "temperature",
    "max_completion_length",
)
# Where a run lies and how much it says; the run is the same whatever they are.
_FREE_TRAINING = (
    "output_dir",
    "run_name",
    "logging_dir",
    "disable_tqdm",
    "report_to",
    "resume_from_checkpoint",
    "save_total_limit",
    "local_rank",
)


@dataclass(frozen=True)
class RunConfig:
    """The resolved options of a run.

    Attributes:
        options: name -> JSON value; own options and the trainer's share one namespace.
        fixed: names whose values a checkpoint must share with the run that resumes it.
    """

    options: Mapping[str, Any]
    fixed: frozenset[str]

    @classmethod
    def resolve(
        cls, training: TrainingArguments, own: Sequence[Any] = (), free: Sequence[Any] = ()
    ) -> "RunConfig":
        """Collect options.

        Args:
            training: TRL's arguments.
            own: dataclasses of :mod:`k3tune.arguments` that decide model, adapter and data.
            free: those whose options a resumed run may change, with a warning.
        """
        # placeholders of secrets are no options
        options = {
            name: value
            for name, value in training.to_dict().items()
            if not (isinstance(value, str) and value.startswith("<"))
        }
        names = set(_FIXED_TRAINING)
        for group in own:
            options |= asdict(group)
            names |= asdict(group).keys()
        for group in free:
            options |= asdict(group)
        plain = json.loads(json.dumps(options, default=str))
        return cls(plain, frozenset(names & plain.keys()))

    @cached_property
    def sha256(self) -> str:
        """Hash of the options, 64 hex digits."""
        text = json.dumps(self.options, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    @property
    def text(self) -> str:
        """The options as YAML; ``--config`` with it runs the same again."""
        return yaml.safe_dump(dict(self.options), sort_keys=False, allow_unicode=True)

    def write(self, output_dir: str | Path) -> Path:
        """Write ``config.yaml`` with versions and commit into a run's folder."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        path = Path(output_dir) / FILE_NAME
        with replace_file(path) as file:
            file.write("# The resolved options of this run.\n")
            file.write(f"# git commit: {git_commit() or 'none'}\n")
            for name, found in versions().items():
                file.write(f"# {name}: {found}\n")
            file.write(self.text)
        return path

    def compare(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        """Hold the options against those a checkpoint was written under.

        Raises:
            ConfigError: naming the options that would make the checkpoint mean something else;
                other differences are warned about.
        """
        changed = [
            name
            for name in sorted(self.options.keys() | saved.keys())
            if name not in _FREE_TRAINING and self.options.get(name) != saved.get(name)
        ]

        def say(names: list[str]) -> str:
            return ", ".join(
                f"{name} (was {saved.get(name)!r}, is {self.options.get(name)!r})" for name in names
            )

        fatal = [name for name in changed if name in self.fixed]
        if fatal:
            raise ConfigError(
                f"{checkpoint} was written with other options: {say(fatal)}; set them back to "
                "resume, or start a new run in another output_dir"
            )
        if changed:
            logger.warning("%s goes on with other options: %s", checkpoint, say(changed))


@cache
def versions() -> dict[str, str]:
    """Versions of Python, k3tune and the packages a result depends on, where installed."""
    found = {"python": sys.version.split()[0], "k3tune": k3tune.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def git_commit() -> str | None:
    """Commit of the checkout this package lies in, with ``-dirty`` if it was changed; else None."""
    root = Path(k3tune.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
