"""A tokenizer small enough to read, in the published form of files."""

import sys
from pathlib import Path

import datasets
import pytest

from k3tune.data import K3Tokenizer
from k3tune.data.tokenizer import write_tokenizer

# Helpers of these tests are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_tokenizer import PIECES, SPECIAL_TOKENS


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [piece.encode() for piece in PIECES], SPECIAL_TOKENS)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder) -> K3Tokenizer:
    return K3Tokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Datasets read from column formats are cached in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(tmp_path / "downloads"))
