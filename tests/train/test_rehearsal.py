"""What torch, transformers and the disk would refuse in the middle of a run, before it."""

import os

import pytest
from trl import SFTConfig

from k3tune.errors import ConfigError
from k3tune.train.rehearsal import check_values
from tiny_run import COMMON


def options(tmp_path, **changed) -> SFTConfig:
    return SFTConfig(**{**COMMON, "output_dir": str(tmp_path / "run"), **changed})


def test_options_of_a_run_pass_and_nothing_is_made(tmp_path):
    check_values(options(tmp_path))
    check_values(options(tmp_path, output_dir=str(tmp_path / "füñ 模型" / "with space")))
    check_values(options(tmp_path, report_to="tensorboard", lr_scheduler_type="cosine"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": -1}, "seed is -1, expected an integer from 0 to 4294967295"),
        ({"data_seed": 2**40}, "data_seed is 1099511627776, expected an integer from 0"),
        ({"max_steps": 0, "num_train_epochs": 0}, "max_steps is 0 and num_train_epochs 0, expec"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0, expected a number of at least 0"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers is -1, expected an integer"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps is 0, expected a number above 0"),
        ({"save_total_limit": -1}, "save_total_limit is -1, expected an integer of at least 1"),
        ({"learning_rate": -1.0}, "cannot be made with these options: Invalid learning rate: -1"),
        ({"learning_rate": float("nan")}, "with these options: Invalid learning rate: nan"),
        ({"adam_beta2": 2.0}, "with these options: Invalid beta parameter at index 1: 2.0"),
        (
            {"lr_scheduler_kwargs": {"x": 1}, "lr_scheduler_type": "linear"},
            "got an unexpected keyword argument 'x'",
        ),
        ({"output_dir": "a\0b"}, "output_dir is 'a.*b', expected a folder"),
        ({"output_dir": __file__}, f"output_dir is {__file__}, and {__file__} is no folder"),
        ({"output_dir": f"{__file__}/run"}, f"and {__file__} is no folder: name another one"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_fail_later_is_one_sentence_now(tmp_path, changed, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_values(options(tmp_path, **changed))
    assert "\n" not in str(error.value)


def test_trackers_must_be_installed(tmp_path):
    arguments = options(tmp_path)
    arguments.report_to = ["tensorboard", "none_such"]
    with pytest.raises(ConfigError, match="report_to names 'none_such', which is no tracker that"):
        check_values(arguments)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    # of who may write everything, too
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"and {tmp_path / 'mine'} cannot be written: name"):
        check_values(options(tmp_path, output_dir=str(tmp_path / "mine" / "run")))
