"""What all tests share. Nothing here may change a verdict: it only makes runs repeatable, or short.

With pytest-xdist (``-n 2``) a worker takes a file whole, so that what its tests share is made once.
"""

import gc
import os
from pathlib import Path

import pytest

# before huggingface_hub is imported: no test may depend on a network
os.environ["HF_HUB_OFFLINE"] = "1"

# What is imported while tests are collected stays to the end: no garbage to look for until then.
gc.disable()

# Handed out as one: these files share a job of two processes.
TOGETHER = "tests/parallel/"
# Long ones, handed out first: a worker that got one last would be the only one at work.
FIRST = (
    TOGETHER,
    "tests/kernels/test_interpreted.py",
    "tests/monitor/test_faults.py",
    "tests/train/test_resume.py",
    "tests/lora/test_verify.py",
    "tests/rl/test_grpo.py",
    "tests/kernels/test_cpu_moe_lora.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; the rest stays in its order."""

    def place(item: pytest.Item) -> int:
        found = [n for n, start in enumerate(FIRST) if item.nodeid.startswith(start)]
        return found[0] if found else len(FIRST)

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Nor need the collector walk through all that later.

    Every training run collects garbage, which took half of its time: 0.4 s.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Else extension modules report what is left at the end as leaked."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files whole, in the order above, and those that share a job to one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of the golden checkpoints."""
    return Path(__file__).parent / "fixtures"
