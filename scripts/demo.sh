#!/usr/bin/env bash
# Makes a tiny random Kimi K3 checkpoint in the published layout, then inspects it, scores token ids
# with it and continues a prompt. No GPU, no network after the setup.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
folder="runs/demo"
base="$folder/base"
rm -rf "$folder"
mkdir -p "$folder"

step() {
    echo
    echo "== $*"
}

step "a tiny checkpoint with random weights -> $base"
PYTHONPATH=tests .venv/bin/python scripts/make_tiny_checkpoint.py "$base"

step "k3tune inspect $base"
.venv/bin/k3tune inspect "$base"

step "k3tune generate $base: two prompts, the likeliest 12 tokens of each"
printf '[1, 2, 3, 4]\n[5, 6]\n' >"$folder/prompts.jsonl"
.venv/bin/k3tune generate "$base" --prompt-ids-file "$folder/prompts.jsonl" \
    --max-new-tokens 12 --json | tee "$folder/generated.jsonl"

step "k3tune score $base: prompts and continuations"
.venv/bin/python -c '
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps(row["prompt_ids"] + row["completion_ids"]))
' <"$folder/generated.jsonl" >"$folder/rows.jsonl"
.venv/bin/k3tune score "$base" --input "$folder/rows.jsonl" --out "$folder/scores.jsonl"

step "summary"
.venv/bin/python - "$folder" "$base" <<'PYTHON'
import json
import math
import sys
from pathlib import Path

folder, base = Path(sys.argv[1]), Path(sys.argv[2])


def rows(name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


vocabulary = json.loads((base / "config.json").read_text())["text_config"]["vocab_size"]
prompt, continuation = [], []
for made, scored in zip(rows("generated.jsonl"), rows("scores.jsonl"), strict=True):
    first = len(made["prompt_ids"])
    prompt += scored["logprobs"][1:first]
    continuation += scored["logprobs"][first:]
print(f"mean log-probability of the prompts' tokens:  {sum(prompt) / len(prompt):7.3f}")
print(f"mean log-probability of the likeliest tokens: {sum(continuation) / len(continuation):7.3f}")
print(f"a uniform guess over {vocabulary} tokens:           {-math.log(vocabulary):7.3f}")
print(f"files: {folder}")
PYTHON
echo "demo: done in $SECONDS s"
