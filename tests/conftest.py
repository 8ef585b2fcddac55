"""What all tests share. Nothing here may change a verdict: it only makes runs repeatable."""

import os
from pathlib import Path

import pytest
import torch

# before huggingface_hub is imported: no test may depend on a network
os.environ["HF_HUB_OFFLINE"] = "1"

# A device context knows torch.empty by identity and looks once, at its first use: that must be
# before the kernel tests replace it, or later models on the meta device would fill the memory.
with torch.device("cpu"):
    torch.zeros(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of the golden checkpoints."""
    return Path(__file__).parent / "fixtures"
