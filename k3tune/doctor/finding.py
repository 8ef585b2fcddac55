"""One thing the doctor found, and how findings are written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "failure"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "failure")
_SIGNS = {"ok": "ok     ", "warning": "WARNING", "failure": "FAILURE"}


@dataclass(frozen=True)
class Finding:
    """What was found about one topic.

    Attributes:
        topic: such as ``torch`` or ``disk``; several findings may share one.
        level: ``ok``, ``warning`` (works, with the drawback said) or ``failure``.
        text: what was found, a sentence.
        next_step: what to do about it; None where nothing is to do.
        facts: the figures behind the text, JSON values, with units in their names.
    """

    topic: str
    level: Level
    text: str
    next_step: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.level in LEVELS, f"{self.level=}"
        assert self.level == "ok" or self.next_step, f"{self.topic}: {self.level} needs a next step"


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among findings; ``ok`` for none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def as_json(findings: Iterable[Finding], took_s: float) -> dict[str, Any]:
    """Findings as one JSON object: ``verdict``, ``took_s`` and ``findings`` in order."""
    findings = list(findings)
    return {
        "verdict": worst(findings),
        "took_s": round(took_s, 3),
        "findings": [
            {
                "topic": finding.topic,
                "level": finding.level,
                "text": finding.text,
                "next_step": finding.next_step,
                "facts": dict(finding.facts),
            }
            for finding in findings
        ],
    }


def as_text(findings: Iterable[Finding], took_s: float) -> str:
    """Findings as lines for a terminal, and a closing count."""
    findings = list(findings)
    width = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{_SIGNS[finding.level]}  {finding.topic:<{width}}  {finding.text}")
        if finding.next_step:
            lines.append(f"{'':7}  {'':<{width}}  -> {finding.next_step}")
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    lines.append(
        f"{counts['ok']} ok, {_counted(counts['warning'], 'warning')}, "
        f"{_counted(counts['failure'], 'failure')}, in {took_s:.1f} s"
    )
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
