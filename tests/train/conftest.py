"""A base, a tokenizer and samples small enough to train on in a second."""

import sys
from pathlib import Path

import pytest

# Helpers of these tests are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_run import make_base, write_samples


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    """A K3 checkpoint with every kind of layer, and its tokenizer."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def samples_file(tmp_path_factory) -> Path:
    """Chats of unequal length in JSONL."""
    return write_samples(tmp_path_factory.mktemp("samples") / "train.jsonl", 24)
