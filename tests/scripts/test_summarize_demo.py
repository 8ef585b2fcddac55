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


def test_the_summary_has_scores_losses_times_and_places(tmp_path):
    before = {("spell_backward", 0.0): 0.0, ("spell_backward", 1.0): 0.01}
    before |= {("chain_sum", 0.0): 0.6, ("chain_sum", 1.0): 0.4, ("chain_sum, 4 terms", 0.0): 0.7}
    after = {name: value + 0.25 for name, value in before.items()}
    (tmp_path / "before.json").write_text(report(before, 21))
    (tmp_path / "after.json").write_text(report(after, 22))
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    (tmp_path / "sft" / "adapter" / "weights").write_bytes(bytes(3 << 20))
    log = RunLogWriter(tmp_path / "sft" / "run_log.jsonl")
    log.write("run", 0, {})
    for step, loss, speed in ((5, 2.0, 900.0), (10, 0.5, 1100.0)):
        values = {"loss": loss, "tokens_per_s": speed, "peak_memory_bytes": 512 << 20}
        log.write("train", step, values)
    log.write("end", 10, {"train_runtime": 100.4, "reason": "finished"})
    log.close()
    lines = summary(tmp_path).splitlines()
    assert "new task, spell_backward, greedy      0.0%   25.0%" in lines
    assert "old task, chain_sum, T = 1           40.0%   65.0%" in lines
    assert not any("4 terms" in line for line in lines)
    assert "loss per trained token: 2.000 -> 0.500 in 10 steps" in lines
    assert "training: 100 s, 1,000 tokens/s, peak memory 512 MiB" in lines
    assert "evaluation: 21 s before, 22 s after" in lines
    assert f"adapter: {tmp_path / 'sft' / 'adapter'} (3.0 MiB)" in lines
