"""The tasks of k3-nano: their problems, their split into stages, their prompts and answers.

``chain_sum`` and ``spell_backward`` are reasoning-gym's, word for word; the list tasks and the
facts occur in pre-training only. A problem belongs to exactly one stage, decided by a hash of what
is asked before anything is drawn, so no stage can train on what another one is measured by. There
are too few sums of two and three terms to hold any out: pre-training alone may use them.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from k3tune.data.chat import CONTROL_TOKENS
from k3tune.data.tokenizer import K3Tokenizer

# Upper ends of each stage's share of the hash range, in percent.
_STAGE_ENDS = {
    "chain_sum": {"pretrain": 70, "sft": 80, "rl": 90, "evaluation": 100},
    # what SFT teaches is new: pre-training and RL see no word
    "spell_backward": {"sft": 80, "evaluation": 100},
}
STAGES = ("pretrain", "sft", "rl", "evaluation")
TASKS = tuple(_STAGE_ENDS)
SUM_LENGTHS = (4, 5)
"""Terms of the sums that stages after pre-training use."""
WORD_LENGTHS = (3, 5)
"""Shortest and longest word to spell."""

_REPLY_FORM = (
    "{}<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)
_CONTROL = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
_REPLY = re.compile(re.escape(_REPLY_FORM).replace(r"\{\}", "(.*)"), re.DOTALL)

_SUM_QUESTION = "State the final answer to the following arithmetic problem: {} ="
_WORD_QUESTION = "Spell this word backward (example: sun -> nus): {}"


class Problem(NamedTuple):
    """A question with its one right answer; ``subject`` is the sum or the word it is about."""

    task: str
    subject: str
    question: str
    answer: str


class Reply(NamedTuple):
    """What an assistant says in its think channel and in its response channel."""

    reasoning: str
    answer: str


def canonical(expression: str) -> str:
    """The form that sums with the same signed terms in another order share."""
    # 0 and -0 are one term
    return " ".join(f"{term:+d}" for term in sorted(signed_terms(expression)))


def signed_terms(expression: str) -> list[int]:
    """``4 - 1 + 7`` as ``[4, -1, 7]``."""
    return [int(term) for term in re.sub(r"([+-]) ", r"\1", expression).split()]


def stage_of(task: str, subject: str) -> str:
    """The one stage that may use this sum or word."""
    content = canonical(subject) if task == "chain_sum" else subject
    digest = hashlib.sha256(content.encode()).digest()
    place = int.from_bytes(digest[:8], "big") % 100
    return next(stage for stage, end in _STAGE_ENDS[task].items() if place < end)


def sum_problem(expression: str) -> Problem:
    """reasoning-gym's ``chain_sum`` question about an expression such as ``4 - 1 + 7``."""
    answer = str(sum(signed_terms(expression)))
    return Problem("chain_sum", expression, _SUM_QUESTION.format(expression), answer)


def word_problem(word: str) -> Problem:
    """reasoning-gym's ``spell_backward`` question about a word."""
    return Problem("spell_backward", word, _WORD_QUESTION.format(word), word[::-1])


def draw_expression(rng: random.Random, num_terms: int) -> str:
    """One-digit terms joined by ``+`` and ``-``, all equally likely."""
    parts = [str(rng.randrange(10))]
    for _ in range(num_terms - 1):
        parts += [rng.choice("+-"), str(rng.randrange(10))]
    return " ".join(parts)


def draw_sum(rng: random.Random, stage: str, num_terms: int) -> Problem:
    """A ``chain_sum`` problem that belongs to ``stage``.

    Raises:
        ValueError: for a length that cannot be held out, in any stage but pre-training.
    """
    if num_terms < min(SUM_LENGTHS):
        if stage != "pretrain":
            raise ValueError(
                f"expected sums of {min(SUM_LENGTHS)} terms or more in stage {stage}, found "
                f"{num_terms}: shorter ones are too few to hold out"
            )
        return sum_problem(draw_expression(rng, num_terms))
    while True:
        expression = draw_expression(rng, num_terms)
        if stage_of("chain_sum", expression) == stage:
            return sum_problem(expression)


@cache
def stage_words(stage: str) -> tuple[str, ...]:
    """reasoning-gym's lower-case words of ``WORD_LENGTHS`` that belong to ``stage``, sorted."""
    # an extra: pre-training draws no words and does without it
    from reasoning_gym import create_dataset

    shortest, longest = WORD_LENGTHS
    dataset = create_dataset(
        "spell_backward", size=1, seed=0, min_word_len=shortest, max_word_len=longest
    )
    words = {word for word in dataset.words if word.isascii() and word.isalpha() and word.islower()}
    return tuple(sorted(word for word in words if stage_of("spell_backward", word) == stage))


def draw_problems(task: str, stage: str, count: int, seed: int) -> list[Problem]:
    """Different problems of a stage; the same for the same seed.

    Args:
        task: one of ``TASKS``; sums alternate between the lengths of ``SUM_LENGTHS``.
        stage: one of ``STAGES``.
        count: how many.
        seed: of the draw.

    Raises:
        ValueError: if the stage has fewer words.
    """
    rng = random.Random(f"{task} {stage} {seed}")
    if task == "spell_backward":
        words = stage_words(stage)
        if count > len(words):
            raise ValueError(f"stage {stage} has {len(words)} words, {count} were asked for")
        return [word_problem(word) for word in rng.sample(words, count)]
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw_sum(rng, stage, SUM_LENGTHS[len(problems) % len(SUM_LENGTHS)])
        problems.setdefault(problem.subject, problem)
    return list(problems.values())


def worked_reply(rng: random.Random, problem: Problem, slip_rate: float) -> Reply:
    """Running totals in the think channel, as in ``4-1=3-7=-4+7=3``.

    Args:
        rng: of the slips.
        problem: a sum.
        slip_rate: how often a step is off by one or two; what follows builds on it.
    """
    first, *others = signed_terms(problem.subject)
    total, text = first, str(first)
    operations = problem.subject.split()[1::2]
    for operation, term in zip(operations, others, strict=True):
        total += term
        if rng.random() < slip_rate:
            total += rng.choice((-2, -1, 1, 2))
        text += f"{operation}{abs(term)}={total}"
    return Reply(text, str(total))


def direct_reply(rng: random.Random, problem: Problem, error_rate: float) -> Reply:
    """An empty think channel; the answer to a sum is off by one to three at ``error_rate``."""
    answer = problem.answer
    if rng.random() < error_rate:
        answer = str(int(answer) + rng.choice((-3, -2, -1, 1, 2, 3)))
    return Reply("", answer)


def messages(problem: Problem, reply: Reply | None = None) -> list[dict[str, str]]:
    """The chat about a problem: the question, and the reply if there is one."""
    chat = [{"role": "user", "content": problem.question}]
    if reply is not None:
        assistant = {"role": "assistant", "content": reply.answer}
        if reply.reasoning:
            assistant["reasoning_content"] = reply.reasoning
        chat.append(assistant)
    return chat


def parse_reply(ids: Sequence[int], tokenizer: K3Tokenizer) -> Reply | None:
    """What was said after ``<|open|>think<|sep|>``; None unless the markup is complete and exact.

    Args:
        ids: generated ids, up to and with the end of the message.
        tokenizer: of the base.
    """
    controls = [token for token in ids if token in map(tokenizer.control_id, CONTROL_TOKENS)]
    expected = [tokenizer.control_id(token) for token in _CONTROL.findall(_REPLY_FORM)]
    # text can spell a control token's name, so the tokens themselves are compared first
    if controls != expected:
        return None
    text = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
    match = _REPLY.fullmatch(text)
    return None if match is None else Reply(match[1], match[2])
