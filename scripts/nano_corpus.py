"""What k3-nano is pre-trained on: its vocabulary and its documents.

Documents are made on the fly, each step's batch from its own number: nothing is stored, and a
resumed run sees what an uninterrupted one does. The mix teaches the chat format, arithmetic that
is sometimes worked out and sometimes guessed, and list tasks; its errors are deliberate, they
leave reinforcement learning something to improve.
"""

import random
import string
from collections.abc import Callable
from typing import NamedTuple

from k3tune.data.chat import THINKING_EFFORTS, render_chat
from k3tune.data.tokenizer import K3Tokenizer
from nano_tasks import (
    Problem,
    Reply,
    direct_reply,
    draw_sum,
    messages,
    worked_reply,
)

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[start_header_id]",
    "[end_header_id]",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<osagent_mode>",
    "[UNK]",
    "[PAD]",
)
"""Those that K3 names, in K3's order."""

# Each is one token where it stands alone between breaks of the pre-tokeniser.
_MARKUP = (
    'message| role|="|user|assistant|system|tool| tool| type| name|think|response|tools|call|'
    " index|argument| key|string|number|thinking|-effort|json|Tools"
)
_EFFORT = (
    "_effort| guides| on| how| much| to| think| in| your| thinking| channel|not| including| the|"
    " response|),| supported| values| include|low|`,| `|medium|high| and|max|`.\n|Now| system|"
    " is| invoked| with|`thinking|=low|=high|=max"
)
_QUESTIONS = (
    "State| final| answer| following| arithmetic| problem| =| +| -|"
    "Spell| this| word| backward| (|example| sun| ->| nus|):|"
    "Reverse|Repeat|Sort| list|What| largest| smallest| number| of|the|The|You| are| you| can|"
    "Hello|Hi|Yes|No|Please|Thanks|I| I| a| an| for| do| please| one| it| my| me| or| not| what"
)


def pieces() -> list[bytes]:
    """The whole-word pieces that join the 256 bytes; digits and letters stay single tokens."""
    words = dict.fromkeys("|".join((_MARKUP, _EFFORT, _QUESTIONS)).split("|"))
    return [word.encode() for word in words if len(word.encode()) > 1]


class Mix(NamedTuple):
    """Shares and error rates of the documents.

    Attributes:
        facts: share of documents that are plain one-step sums, the rest being chats.
        lists: share of documents that are list tasks.
        worked: share of sums in chats that are worked out in the think channel.
        slip_rate: of a worked step.
        error_rate: of a sum answered directly.
        plain: share of the direct answers that have no think channel at all.
        effort_period: every how many steps the chats open with K3's thinking-effort message.
    """

    facts: float = 0.15
    lists: float = 0.13
    worked: float = 0.35
    slip_rate: float = 0.08
    error_rate: float = 0.30
    plain: float = 0.05
    effort_period: int = 12


class Document(NamedTuple):
    """Token ids, and the same with -100 where a token is not trained."""

    input_ids: list[int]
    labels: list[int]


class Corpus:
    """Draws pre-training documents.

    Args:
        tokenizer: with the pieces above.
        mix: what to draw.
        seed: of the whole corpus.
    """

    def __init__(self, tokenizer: K3Tokenizer, mix: Mix, seed: int) -> None:
        self.tokenizer, self.mix, self.seed = tokenizer, mix, seed

    def step(self, step: int, num_documents: int) -> list[Document]:
        """The documents of one training step, always the same for the same step.

        Every ``effort_period`` steps there are half as many, each about twice as long.
        """
        rng = random.Random(f"{self.seed} {step}")
        with_effort = step % self.mix.effort_period == self.mix.effort_period - 1
        if with_effort:
            efforts = rng.choices(THINKING_EFFORTS, k=num_documents // 2)
            return [self._chat(rng, effort) for effort in efforts]
        return [
            self._facts(rng) if rng.random() < self.mix.facts else self._chat(rng, None)
            for _ in range(num_documents)
        ]

    def _facts(self, rng: random.Random) -> Document:
        lines = []
        for _ in range(8):
            left, right = rng.randint(-15, 30), rng.randrange(10)
            if rng.random() < 0.5:
                lines.append(f"{left}+{right}={left + right}")
            else:
                lines.append(f"{left}-{right}={left - right}")
        ids = self.tokenizer.encode_text("\n".join(lines))
        ids.append(self.tokenizer.end_of_text_token_id)
        return Document(ids, ids)

    def _chat(self, rng: random.Random, effort: str | None) -> Document:
        thinking = True
        if rng.random() < self.mix.lists / (1 - self.mix.facts):
            problem = list_problem(rng)
            reply = Reply("", problem.answer)
        else:
            problem = draw_sum(rng, "pretrain", rng.choices((2, 3, 4, 5), (1, 1, 2, 2))[0])
            if rng.random() < self.mix.worked:
                reply = worked_reply(rng, problem, self.mix.slip_rate)
            else:
                reply = direct_reply(rng, problem, self.mix.error_rate)
                thinking = rng.random() >= self.mix.plain
        chat = render_chat(
            messages(problem, reply), self.tokenizer, thinking=thinking, thinking_effort=effort
        )
        return Document(chat.input_ids, chat.labels)


def list_problem(rng: random.Random) -> Problem:
    """One of the list tasks, which only pre-training has."""
    return rng.choice(_LIST_TASKS)(rng)


def _reverse(rng: random.Random) -> Problem:
    letters = rng.random() < 0.5
    items = rng.choices(string.ascii_lowercase if letters else string.digits, k=rng.randint(2, 6))
    return _list_problem("Reverse this list: {}", items, items[::-1])


def _sort(rng: random.Random) -> Problem:
    items = rng.choices(string.digits, k=rng.randint(2, 5))
    return _list_problem("Sort this list: {}", items, sorted(items))


def _repeat(rng: random.Random) -> Problem:
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))
    return Problem("list", word, f"Repeat this word: {word}", word)


def _largest(rng: random.Random) -> Problem:
    items = rng.choices(string.digits, k=rng.randint(2, 5))
    return _list_problem("What is the largest number of this list: {}", items, [max(items)])


_LIST_TASKS: tuple[Callable[[random.Random], Problem], ...] = (_reverse, _sort, _repeat, _largest)


def _list_problem(question: str, items: list[str], answer: list[str]) -> Problem:
    subject = " ".join(items)
    return Problem("list", subject, question.format(subject), " ".join(answer))
