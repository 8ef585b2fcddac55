"""Shipped rewards, finding others, and what becomes of one that fails."""

import math
import time

import pytest
import torch

from k3tune.data.answers import Answer
from k3tune.errors import ConfigError
from k3tune.rl.guarded import GuardedReward, RewardError
from k3tune.rl.rewards import SHIPPED, exact_match, find_reward, format_reward, reward_name


def reply(content, *, ended=True, malformed=()):
    return Answer("", content, (), ended, malformed)


REPLIES = [
    reply("7"),
    reply("8"),
    reply("7", ended=False),
    reply("7", malformed=("text stands outside the channels",)),
    None,
]
COMPLETIONS = [[{"role": "assistant", "content": "7"}]] * 4 + [" 7\n"]


def test_exact_match_asks_for_the_answer_in_whole_and_exact_markup():
    found = exact_match(completions=COMPLETIONS, replies=REPLIES, answer=["7", "7", "7", "7", 7])
    assert found == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_format_looks_at_the_markup_alone():
    assert format_reward(replies=REPLIES, completions=COMPLETIONS) == [1.0, 1.0, 0.0, 0.0, None]


def test_reasoning_gym_scores_by_the_items_generator():
    from reasoning_gym import create_dataset

    [item] = create_dataset("chain_sum", size=1, seed=0)
    columns = {"answer": [item["answer"]] * 3, "metadata": [item["metadata"]] * 3}
    columns["question"] = [item["question"]] * 3
    replies = [reply(item["answer"]), reply("no number"), reply(item["answer"], ended=False)]
    right, wrong, cut = SHIPPED["reasoning_gym"](completions=[None] * 3, replies=replies, **columns)
    assert right == 1.0 and wrong < 0.1 and cut == 0.0


def test_rewards_are_found_by_name_file_and_module(tmp_path):
    (tmp_path / "mine.py").write_text("def short(completions, **_):\n    return [1.0]\n")
    assert find_reward("format") is format_reward
    assert find_reward(f"{tmp_path / 'mine.py'}:short")(completions=["a"]) == [1.0]
    assert find_reward("k3tune.rl.rewards:exact_match") is exact_match
    assert reward_name(f"{tmp_path / 'mine.py'}:short") == "short"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accuracy", "expected exact_match, format, reasoning_gym, file.py:function or"),
        ("missing.py:f", "cannot load missing.py, which rewards names: FileNotFoundError"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("k3tune.rl.rewards:nothing", "has no function 'nothing'"),
    ],
)
def test_a_reward_that_is_not_there_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def guarded(function, *, deadline_s=5.0, skip_bad=False):
    return GuardedReward(function, "mine", deadline_s=deadline_s, skip_bad=skip_bad)


STEP = {"completions": ["a", "bb", "c"], "sample_id": [10, 11, 12], "trainer_state": object()}


def raising(completions, **_):
    return [1 / (len(text) - 2) for text in completions]


def hanging(completions, **_):
    if "bb" in completions:
        time.sleep(30)
    return [1.0] * len(completions)


def not_a_number(completions, **_):
    return [math.nan if text == "bb" else 1.0 for text in completions]


def infinite(completions, **_):
    return [math.inf if text == "bb" else 1.0 for text in completions]


def a_word(completions, **_):
    return ["good" if text == "bb" else 1.0 for text in completions]


BAD = [
    (raising, "raised ZeroDivisionError: division by zero", [-1.0, None, -1.0]),
    (hanging, "did not return within 0.3 s", [1.0, None, 1.0]),
    (not_a_number, "returned nan, expected a finite one", [1.0, None, 1.0]),
    (infinite, "returned inf, expected a finite one", [1.0, None, 1.0]),
    (a_word, "returned 'good', expected a number or None", [1.0, None, 1.0]),
]


@pytest.mark.parametrize(("function", "message", "_"), BAD)
def test_what_fails_is_an_error_that_names_the_sample(function, message, _):
    with pytest.raises(RewardError, match="the reward mine") as error:
        guarded(function, deadline_s=0.3)(**STEP)
    assert message in str(error.value)
    assert "sample 2 of the step's 3 (line, item or row 11 of the data)" in str(error.value)


@pytest.mark.parametrize(("function", "_", "expected"), BAD)
def test_or_is_counted_and_left_without_a_reward(function, _, expected):
    reward = guarded(function, deadline_s=0.3, skip_bad=True)
    assert reward(**STEP) == expected
    assert reward.num_bad == 1


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("returned", [[1.0, 2.0], 3.0, None, "abc"])
def test_a_wrong_number_of_rewards_is_no_single_samples_fault(returned, skip_bad):
    def function(completions, **_):
        return returned if len(completions) > 1 else [1.0]

    with pytest.raises(RewardError, match="on 3 samples together, and on none of them alone"):
        guarded(function, skip_bad=skip_bad)(**STEP)


def test_none_means_that_the_reward_does_not_apply():
    reward = guarded(lambda completions, **_: [None, 1, True])
    assert reward(**STEP) == [None, 1.0, 1.0] and not reward.num_bad


def test_tensors_and_async_functions_are_taken():
    async def later(completions, **_):
        return torch.ones(len(completions))

    assert guarded(later)(**STEP) == [1.0, 1.0, 1.0]


def test_single_samples_keep_what_is_no_column():
    seen = []

    def function(completions, trainer_state, sample_id, **_):
        seen.append((len(completions), trainer_state, sample_id))
        return raising(completions)

    guarded(function, skip_bad=True)(**STEP)
    state = STEP["trainer_state"]
    assert seen == [(3, state, [10, 11, 12]), (1, state, [10]), (1, state, [11]), (1, state, [12])]
