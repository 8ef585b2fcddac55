"""How a recipe ends: exit codes, and a sentence instead of a traceback."""

import pytest

from k3tune.errors import ConfigError
from k3tune.train.launch import INTERRUPTED, USER_ERROR, run_recipe


def stopped(error: BaseException):
    def main() -> int:
        raise error

    return main


def test_a_run_gives_its_own_code(capsys):
    assert run_recipe(lambda: 143) == 143
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("lora_rank is 0"), USER_ERROR, "error: lora_rank is 0"),
        (KeyboardInterrupt(), INTERRUPTED, "the same command goes on from the last checkpoint"),
    ],
)
def test_what_a_user_caused_is_one_sentence(capsys, error, code, said):
    assert run_recipe(stopped(error)) == code
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_recipe(stopped(ZeroDivisionError()))
