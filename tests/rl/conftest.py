"""A base, a tokenizer and prompts small enough to sample from and train on in a second."""

import sys
from pathlib import Path

import pytest

# Helpers of these tests are plain modules beside them, and beside those of training.
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parent))

from tiny_grpo import write_prompts

from tiny_run import make_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    """A K3 checkpoint with every kind of layer, and its tokenizer."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    """Sums of unequal length in JSONL."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 8)
