"""The demo's closing summary, from the files that its steps leave."""

import json

from k3tune.run_log import RunLogWriter
from summarize_demo import summary


def report(accuracies, seconds):
    scores = [
        {"task": task, "temperature": temperature, "accuracy": accuracy}
        for (task, temperature), accuracy in accuracies.items()
    ]
    return json.dumps({"base": "base", "seconds": seconds, "load_average": 1.5, "scores": scores})


def write_run(folder, records, seconds):
    """A run's adapter of 3 MiB and its log."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "weights").write_bytes(bytes(3 << 20))
    log = RunLogWriter(folder / "run_log.jsonl")
    log.write("run", 0, {})
    for kind, step, values in records:
        log.write(kind, step, values)
    log.write("end", records[-1][1], {"train_runtime": seconds, "reason": "finished"})
    log.close()


def test_the_summary_has_scores_losses_times_and_places(tmp_path):
    before = {("spell_backward", 0.0): 0.0, ("spell_backward", 1.0): 0.01}
    before |= {("chain_sum", 0.0): 0.6, ("chain_sum", 1.0): 0.4, ("chain_sum, 4 terms", 0.0): 0.7}
    after = {name: value + 0.25 for name, value in before.items()}
    after_grpo = {name: value + 0.3 for name, value in before.items() if "chain_sum" in name[0]}
    (tmp_path / "before.json").write_text(report(before, 21))
    (tmp_path / "after.json").write_text(report(after, 22))
    (tmp_path / "after_grpo.json").write_text(report(after_grpo, 23))
    sft = [
        ("train", step, {"loss": loss, "tokens_per_s": speed, "peak_memory_bytes": 512 << 20})
        for step, loss, speed in ((5, 2.0, 900.0), (10, 0.5, 1100.0))
    ]
    write_run(tmp_path / "sft", sft, 100.4)
    floor = {"k3": {"value": 1e-13, "low": 9e-14, "high": 2e-13}}
    grpo = [("floor", 0, floor)]
    for step in range(1, 21):
        record = {"reward": step / 20, "rollout_s": 0.5, "forward_backward_s": 1.5}
        verdict = "drifting" if step == 20 else "at floor"
        grpo += [("mismatch", step, {"k3": step * 1e-14, "verdict": verdict})]
        grpo += [("train", step, record)]
    write_run(tmp_path / "grpo", grpo, 60.6)

    lines = summary(tmp_path).splitlines()
    first, second = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert "new task, spell_backward, greedy      0.0%   25.0%" in first
    assert "old task, chain_sum, T = 1           40.0%   65.0%" in first
    assert not any("4 terms" in line for line in lines)
    assert "loss per trained token: 2.000 -> 0.500 in 10 steps" in first
    assert "training: 100 s, 1,000 tokens/s, peak memory 512 MiB" in first
    assert f"adapter: {tmp_path / 'sft' / 'adapter'} (3.0 MiB)" in first
    assert "chain_sum, T = 1                     40.0%   70.0%" in second
    assert "reward: 0.28 in the first 10 steps -> 0.78 in the last 10 of 20" in second
    assert "training: 61 s, of a step 0.5 s sampling and 1.5 s forward and backward" in second
    assert (
        "train-rollout KL (k3): at floor in 19 steps, drifting in 1 steps; largest 2.0e-13, floor "
        "1.0e-13 (95 % 9.0e-14 to 2.0e-13)"
    ) in second
    assert "evaluation: 21 s before, 22 s after SFT, 23 s after GRPO" in second
