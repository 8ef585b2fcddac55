"""The tasks of k3-nano: reasoning-gym's words, one stage a problem, replies in K3's markup."""

import random

import pytest

from k3tune.data.chat import render_chat
from k3tune.data.tokenizer import K3Tokenizer, write_tokenizer
from nano_corpus import SPECIAL_TOKENS, Corpus, Mix, list_problem, pieces
from nano_tasks import (
    STAGES,
    SUM_LENGTHS,
    Reply,
    canonical,
    direct_reply,
    draw_expression,
    draw_problems,
    draw_sum,
    messages,
    parse_reply,
    stage_of,
    stage_words,
    sum_problem,
    word_problem,
    worked_reply,
)

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra demo is not installed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> K3Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, pieces(), SPECIAL_TOKENS)
    return K3Tokenizer.from_pretrained(folder)


def ids_of(tokenizer: K3Tokenizer, problem, reply) -> list[int]:
    """What a model generates after the generation prompt when it gives this reply."""
    options = {"thinking_effort": None}
    prompt = render_chat(
        messages(problem), tokenizer, add_generation_prompt=True, **options
    ).input_ids
    whole = render_chat(messages(problem, reply), tokenizer, **options).input_ids
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def test_questions_and_answers_are_reasoning_gyms_word_for_word():
    sums = reasoning_gym.create_dataset(
        "chain_sum", seed=3, size=200, min_terms=2, max_terms=5, min_digits=1, max_digits=1
    )
    for entry in sums:
        problem = sum_problem(entry["metadata"]["expression"])
        assert (problem.question, problem.answer) == (entry["question"], entry["answer"])
    words = reasoning_gym.create_dataset("spell_backward", seed=3, size=200)
    for entry in words:
        problem = word_problem(entry["metadata"]["word"])
        assert (problem.question, problem.answer) == (entry["question"], entry["answer"])


def test_own_expressions_are_those_reasoning_gym_can_draw():
    rng = random.Random(0)
    for length in (2, 3, 4, 5):
        parts = draw_expression(rng, length).split()
        assert len(parts[0::2]) == length
        assert all(term in "0123456789" for term in parts[0::2])
        assert all(sign in ("+", "-") for sign in parts[1::2])


def test_sums_with_the_same_terms_in_another_order_are_one_problem():
    assert canonical("4 - 1 + 7 - 0") == canonical("7 + 0 + 4 - 1") != canonical("4 + 1 + 7 - 0")


def test_no_problem_that_a_stage_draws_is_drawn_by_another():
    # with these seeds and counts each stage draws far more than any recipe does
    drawn = {
        stage: {canonical(p.subject) for p in draw_problems("chain_sum", stage, 2_000, seed)}
        for seed, stage in enumerate(STAGES)
    }
    drawn["pretrain"] |= {
        canonical(draw_sum(rng, "pretrain", length).subject)
        for rng in [random.Random(9)]
        for length in SUM_LENGTHS
        for _ in range(4_000)
    }
    for one in STAGES:
        for other in STAGES:
            assert one == other or not drawn[one] & drawn[other], (one, other)
    words = {stage: set(stage_words(stage)) for stage in ("sft", "evaluation")}
    assert not words["sft"] & words["evaluation"]
    assert min(map(len, words.values())) > 1_000


def test_pretraining_documents_hold_no_sum_of_another_stage_and_no_word_to_spell(tokenizer):
    corpus = Corpus(tokenizer, Mix(), seed=0)
    seen = set()
    for step in range(0, 120, 3):
        for document in corpus.step(step, 52):
            text = tokenizer.decode_bytes(document.input_ids).decode()
            assert "backward" not in text
            if "arithmetic problem" in text:
                seen.add(text.split("problem: ")[1].split(" =")[0])
    long = [expression for expression in seen if expression.count(" ") // 2 + 1 in SUM_LENGTHS]
    assert len(long) > 500
    assert {stage_of("chain_sum", expression) for expression in long} == {"pretrain"}


def test_short_sums_are_refused_outside_pretraining():
    with pytest.raises(ValueError, match="4 terms or more in stage rl, found 3"):
        draw_sum(random.Random(0), "rl", 3)


def test_a_worked_reply_shows_every_running_total():
    problem = sum_problem("4 - 1 - 7 + 7")
    assert worked_reply(random.Random(0), problem, 0.0) == Reply("4-1=3-7=-4+7=3", "3")


def test_slips_and_errors_come_at_their_rates():
    rng, problem = random.Random(0), sum_problem("4 - 1 - 7 + 7")
    worked = [worked_reply(rng, problem, 0.08).answer == "3" for _ in range(20_000)]
    # a second slip may undo the first
    assert 0.92**3 - 0.01 < sum(worked) / len(worked) < 0.92**3 + 0.02
    direct = [direct_reply(rng, problem, 0.3).answer == "3" for _ in range(20_000)]
    assert abs(sum(direct) / len(direct) - 0.7) < 0.01


def test_list_tasks_are_answered_right():
    rng = random.Random(0)
    for _ in range(200):
        problem = list_problem(rng)
        items = problem.subject.split()
        expected = {
            "Reverse": items[::-1],
            "Sort": sorted(items),
            "Repeat": items,
            "What": [max(items)],
        }
        assert problem.answer.split() == expected[problem.question.split()[0]]


@pytest.mark.parametrize("reply", [Reply("", "-4"), Reply("4-1=3-7=-4", "-4"), Reply("", "")])
def test_a_reply_is_read_back_from_its_ids(tokenizer, reply):
    assert parse_reply(ids_of(tokenizer, sum_problem("4 - 1 - 7"), reply), tokenizer) == reply


def test_inexact_markup_is_no_reply(tokenizer):
    ids = ids_of(tokenizer, sum_problem("4 - 1 - 7 + 7"), Reply("", "3"))
    assert parse_reply(ids[:-1], tokenizer) is None
    assert parse_reply(ids + ids[-1:], tokenizer) is None
    assert parse_reply(ids[3:], tokenizer) is None
    spelled_out = tokenizer.encode_text(tokenizer.decode_bytes(ids).decode())
    assert parse_reply(spelled_out, tokenizer) is None


def test_digits_letters_and_prompts_are_few_tokens(tokenizer):
    assert tokenizer.vocab_size == 384
    assert len(tokenizer.encode_text("1234567890")) == 10
    assert len(tokenizer.encode_text("quiz")) == 4
    problem = sum_problem("4 - 1 - 7 + 7")
    assert len(tokenizer.encode_text(problem.question)) == 22
    assert len(tokenizer.encode_text(word_problem("noon").question)) == 16
