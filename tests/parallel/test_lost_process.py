"""A process that is lost ends the others within a minute, with its error. Slow tier."""

import time
from pathlib import Path

import pytest
from ranks import start_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "process 1 failed: K3TuneError: sample 7 holds no token: leave it out"),
        # gloo sees a closed connection at once; the launcher says which process was killed
        ("kill", "by peer"),
        # as a GPU's collective would wait for a machine that is gone
        ("hang", "process 1 was not heard of for 40 s"),
    ],
)
def test_a_lost_process_ends_the_other(how, said):
    waiting, lost = start_ranks(Path(__file__).with_name("lost_cases.py"), 2, how)
    begun_s = time.monotonic()
    try:
        printed, _ = waiting.communicate(timeout=90)
    finally:
        lost.kill()
        lost.communicate()
    assert waiting.returncode != 0
    print(f"{how}: ended after {time.monotonic() - begun_s:.0f} s, start included\n{printed}")
    assert said in printed
