"""A trunk spread over processes: the default cases in the one job of two, more in the slow tier."""

from pathlib import Path

import pytest
from ranks import start_ranks, wait_for
from trunk_cases import CASES, DEFAULT

from checkpoints import build_checkpoint


def launch(folder: Path, ranks: int, size: int, cases: list[str]) -> Path:
    """Run cases on ``ranks`` processes, the trunk over groups of ``size``; returns the folder."""
    build_checkpoint(folder / "base")
    script = Path(__file__).with_name("trunk_cases.py")
    outputs = wait_for(start_ranks(script, ranks, size, folder, *cases), timeout_s=600)
    for rank, output in enumerate(outputs):
        (folder / f"output-{rank}").write_text(output)
    return folder


def check(folder: Path, case: str, ranks: int) -> None:
    failed = sorted(folder.glob(f"{case}-*.failed"))
    assert not failed, "\n".join(file.read_text() for file in failed)
    passed = sorted(folder.glob(f"{case}-*.passed"))
    outputs = [file.read_text()[-2000:] for file in sorted(folder.glob("output-*"))]
    assert len(passed) == ranks, "did not run, an earlier case failed:\n" + "\n".join(outputs)


@pytest.mark.parametrize("case", [case.__name__ for case in DEFAULT])
def test_on_two_processes(ended, case):
    check(ended / "trunk", case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (3, 3), (4, 2), (4, 4)])
def test_on_more_processes(tmp_path, ranks, size):
    launch(tmp_path, ranks, size, list(CASES))
    for case in CASES:
        check(tmp_path, case, ranks)
