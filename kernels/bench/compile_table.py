"""Compile every kernel for every target and write the figures into ``kernels/README.md``.

    python kernels/bench/compile_table.py

Needs no GPU. The table replaces what stands between the two marker lines of the README.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from k3tune_kernels.ahead_of_time import (
    COMPILED_OPS,
    MATRIX_INSTRUCTIONS,
    TARGETS,
    Compiled,
    compile_named,
    specializations,
)

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- compile table begins -->", "<!-- compile table ends -->"
_SHORT = dict(zip(MATRIX_INSTRUCTIONS, ("tcgen05", "wgmma", "mma", "mfma"), strict=True))


def cell(compiled: Compiled) -> str:
    """Registers, KB of shared memory, and the matrix instructions; spills only if there are any."""
    used = [short for name, short in _SHORT.items() if name in compiled.matrix_instructions]
    spills = f", {compiled.spilled_bytes} B spilled" if compiled.spilled_bytes else ""
    memory = f"{compiled.shared_bytes / 1024:.0f}"
    return f"{compiled.registers} / {memory}{spills} {' '.join(used)}".rstrip()


def table(figures: dict[tuple[str, str], Compiled]) -> list[str]:
    """Markdown rows: a kernel and configuration a row, a target a column."""
    names = list(dict.fromkeys(name for name, _ in figures))
    lines = [
        f"| kernel, configuration | {' | '.join(TARGETS)} |",
        "|---" * (len(TARGETS) + 1) + "|",
    ]
    for name in names:
        cells = [
            cell(figures[name, target]) if (name, target) in figures else "" for target in TARGETS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Compile on two processes and rewrite the README's table."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        pending = {
            (each.name, target): pool.submit(compile_named, op, target, each.name)
            for op in COMPILED_OPS
            for target in TARGETS
            for each in specializations(op, target)
        }
        figures = {key: future.result() for key, future in pending.items()}
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    made_with = f"Triton {triton.__version__}; registers a thread / KB of shared memory."
    lines = [BEGIN, "", made_with, "", *table(figures), "", END]
    README.write_text(before + "\n".join(lines) + after)
    print(f"{len(figures)} figures written to {README.name}")


if __name__ == "__main__":
    main()
