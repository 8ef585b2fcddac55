#!/usr/bin/env bash
# Fine-tunes k3-nano, the small base that comes with k3tune: SFT on a task it cannot do, and GRPO on
# one it half can, each measured before and after on problems that occur in no training. No GPU, no
# network after the setup.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
SECONDS=0
base="k3tune/assets/k3-nano"
folder="runs/demo"
adapter="$folder/sft/adapter"
count=256
question="Spell this word backward (example: sun -> nus):"
rm -rf "$folder"
mkdir -p "$folder"

step() {
    echo
    echo "== [$SECONDS s] $*"
}

# The likeliest answer to the question about $word, in a fresh process.
ask() {
    local options=("$@" --thinking-effort none --prompt "$question $word")
    echo "\$ k3tune generate ${options[*]@Q}"
    .venv/bin/k3tune generate "${options[@]}"
}

step "the base: $base"
.venv/bin/k3tune inspect "$base" | tee "$folder/inspect.txt"

step "data: words of reasoning-gym to spell backward, and sums that keep the old skill"
.venv/bin/python scripts/make_nano_data.py sft --out "$folder/train.jsonl"
head -n 2 "$folder/train.jsonl"

step "before: $count unseen problems a task"
.venv/bin/python scripts/evaluate_nano.py "$base" --count "$count" --json "$folder/before.json"

# accelerate gives a CPU process one thread unless told otherwise
launch=(.venv/bin/accelerate launch --config_file recipes/accelerate/single.yaml
    --num_cpu_threads_per_process "$(nproc)")

step "LoRA SFT: the same recipe trains all of K3 with another YAML"
"${launch[@]}" recipes/sft.py --config recipes/configs/nano_sft.yaml \
    --train_path "$folder/train.jsonl" --output_dir "$folder/sft"

step "after: the same problems, the adapter loaded into a fresh process"
.venv/bin/python scripts/evaluate_nano.py "$base" --adapter "$adapter" --count "$count" \
    --json "$folder/after.json"

step "one unseen word, without the adapter and with it"
word="$(.venv/bin/python -c '
import sys
sys.path.insert(0, "scripts")
from nano_tasks import draw_problems
print(draw_problems("spell_backward", "evaluation", 1, seed=1)[0].subject)')"
ask "$base"
ask "$base" --adapter "$adapter"

step "GRPO from the base: sums with their answers, rewarded for a right one"
.venv/bin/python scripts/make_nano_data.py rl --out "$folder/prompts.jsonl"
head -n 1 "$folder/prompts.jsonl"
"${launch[@]}" recipes/grpo.py --config recipes/configs/nano_grpo.yaml \
    --train_path "$folder/prompts.jsonl" --output_dir "$folder/grpo"

step "after GRPO: the same sums as before"
.venv/bin/python scripts/evaluate_nano.py "$base" --adapter "$folder/grpo/adapter" \
    --task chain_sum --count "$count" --json "$folder/after_grpo.json"

step "summary"
.venv/bin/python scripts/summarize_demo.py "$folder"
echo
echo "talk to it: .venv/bin/k3tune chat $base --adapter $adapter --thinking-effort none"
echo "train-rollout KL: .venv/bin/k3tune report $folder/grpo"
echo "demo: done in $SECONDS s after the setup"
