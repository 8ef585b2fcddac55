"""How a written adapter is served: flags, command line, what must be patched, model card."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from k3tune.lora.export.written import Layout
from k3tune.lora.plan import listed
from k3tune.lora.spec import pattern_matches


def serving_command(layout: Layout, base: str, adapter: str, name: str) -> str | None:
    """The command line that serves the adapter once the engine is patched; None for PEFT.

    Args:
        layout: what was written.
        base: path or hub id of the base.
        adapter: path of the directory.
        name: the adapter's name in requests; a new one for every version, as servers key caches
            by it.
    """
    engine = layout.engine
    shared = [engine.shared_flag] if layout.form == "shared_outer" else []
    place = f"{name}={adapter}"
    if engine.name == "vllm":
        rank = next(value for value in engine.max_rank_values if value >= layout.rank)
        words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(rank)]
        words += ["--max-loras", "2", *shared, "--lora-modules", place]
        reduces = any(module.name.endswith("o_proj") for module in layout.modules)
        environment = "VLLM_KIMI_K3_GEMM_AR=0 " if reduces else ""
        return environment + shlex.join(words)
    if engine.name == "sglang":
        targets = layout.config_fields([])["target_modules"]
        words = ["python", "-m", "sglang.launch_server", "--model-path", base, "--enable-lora"]
        words += ["--max-lora-rank", str(layout.rank), "--lora-target-modules", *targets]
        # one of the slots is the base's
        words += ["--max-loras-per-batch", "2", "--lora-strict-loading", *shared]
        return shlex.join([*words, "--lora-paths", place])
    return None


def faults_to_patch(layout: Layout) -> list[str]:
    """What must be patched in the engine before this adapter works there."""
    return [
        f"{fault.what} ({fault.where})"
        for fault in layout.engine.faults
        if any(pattern_matches(fault.pattern, module.name) for module in layout.modules)
    ]


def verdict(layout: Layout) -> str:
    """Whether the engine serves this adapter as released."""
    count = len(faults_to_patch(layout))
    if not layout.engine.faults:
        return "any PEFT reader that has modules of these names takes these files"
    if not count:
        return f"{layout.engine.label} loads this adapter as released"
    return (
        f"{layout.engine.label} does not serve this adapter as released: {count} faults must be "
        "patched first; the files are what the patched engine reads"
    )


def model_card(layout: Layout, metadata: Mapping[str, Any], command: str | None) -> str:
    """``README.md`` of the directory."""
    export = metadata["export"]
    base = metadata["base"]
    lines = [
        "---",
        "library_name: peft",
        *([f"base_model: {base['name']}"] if base["name"] else []),
        "tags: [lora, kimi-k3, k3tune]",
        "---",
        "",
        f"# LoRA adapter of Kimi K3, for {layout.engine.label}",
        "",
        "The base is not part of these files and stays as published: the adapter is served beside "
        "it. Merging it into 4-bit experts would lose part of it.",
        "",
        "| | |",
        "|---|---|",
        f"| written for | {layout.engine.label} |",
        f"| form of the experts' factors | {layout.form or 'no experts adapted'} |",
        f"| modules | {len(layout.modules)}, rank up to {layout.rank} |",
        f"| version | {metadata['version'] if metadata['version'] is not None else 'not stated'} |",
        f"| base fingerprint | {base['fingerprint'] or base['sample'] or 'not known'} |",
        f"| trained as | {export['source']['form'] or 'no experts'} |",
        "",
        f"SHA-256 of every tensor: `tensors.sha256`. Written by k3tune {metadata['k3tune']}.",
    ]
    if command is not None:
        lines += ["", "## Serve", "", "```", command, "```", "", f"{verdict(layout)}."]
    lines += _section("To patch first", faults_to_patch(layout))
    lines += _section("Not as trained", layout.changes)
    lines += _section(
        "Left out", [f"{target}: {listed(names)}" for target, names in layout.dropped.items()]
    )
    lines += _section("Written as zeros", zeros_lines(layout))
    return "\n".join(lines) + "\n"


def zeros_lines(layout: Layout) -> list[str]:
    """The modules and experts written as zeros, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in layout.zeros.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{listed(names)} ({reason})" for reason, names in by_reason.items()]


def _section(title: str, items: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {item}" for item in items)] if items else []
