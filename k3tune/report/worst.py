"""The tokens that trainer and engine disagree about most, over the whole run."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from k3tune.report.reading import Run

MAX_TOKENS = 40
_MAX_SAMPLES = 10
_LONGEST_TEXT, _LONGEST_CONTEXT = 60, 120
_FIELDS = ("sample", "prompt", "position", "token_id", "logp_train", "logp_rollout", "r")


def worst_tokens(run: Run) -> list[dict[str, Any]]:
    """Tokens by |r| from the largest down, at most :data:`MAX_TOKENS`.

    Texts are cut to a readable length, contexts at their front, and whatever does not print is
    written as an escape.
    """
    tokens = sorted(_tokens(run), key=lambda token: -abs(token["r"]))
    return tokens[:MAX_TOKENS]


def worst_samples(run: Run) -> list[dict[str, Any]]:
    """Samples by how much their tokens among the worst differ together."""
    samples: dict[tuple[int, Any], list[dict[str, Any]]] = defaultdict(list)
    for token in _tokens(run):
        samples[token["step"], token["sample"]].append(token)
    rows = [
        {
            "step": step,
            "sample": sample,
            "prompt": tokens[0]["prompt"],
            "tokens": len(tokens),
            "abs_r_sum": sum(abs(token["r"]) for token in tokens),
            "text": max(tokens, key=lambda token: abs(token["r"]))["context"],
        }
        for (step, sample), tokens in samples.items()
    ]
    return sorted(rows, key=lambda row: -float(row["abs_r_sum"]))[:_MAX_SAMPLES]


def _tokens(run: Run) -> Iterator[dict[str, Any]]:
    for record in run.worst:
        tokens = record.get("tokens")
        for token in tokens if isinstance(tokens, list) else ():
            if isinstance(token, dict) and isinstance(token.get("r"), int | float):
                yield {
                    "step": record["step"],
                    **{name: _number(token.get(name)) for name in _FIELDS},
                    "text": _printable(token.get("text"))[:_LONGEST_TEXT],
                    "context": _printable(token.get("context"))[-_LONGEST_CONTEXT:],
                }


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else None


def _printable(text: Any) -> str:
    """Text in which line breaks, control characters and the like are seen and do nothing."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
