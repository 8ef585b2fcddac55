"""A small base that reads text, adapters for it, and a server over both."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

# Helpers of these tests are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

from running import Running, make_folders, start


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``adapters/one``, ``adapters/two``, and ``outside`` the root of adapters."""
    return make_folders(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def running(folders: Path) -> Iterator[Running]:
    """A server with adapter ``one`` and routed experts, shared by tests that leave it as it is."""
    with start(folders, adapters={"one": folders / "adapters" / "one"}, routing=True) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, base_url=running.url, timeout=60) as opened:
        yield opened
