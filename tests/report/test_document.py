"""Every figure of a report can be traced to the log: computed again here, by other means."""

import json
import math
import re
from collections import defaultdict

import numpy as np
import pytest
from synthetic_logs import Scenario, grpo_records, sft_records, write_run

from k3tune.monitor.record import PROBABILITY_EDGES, R_EDGES, SURPRISE_EDGES
from k3tune.report.curves import CURVES
from k3tune.report.document import build_report
from k3tune.report.drawing import draw
from k3tune.report.plot import SECTIONS
from k3tune.report.tabulate import table_of

STEPS = 360


@pytest.fixture(scope="module")
def records():
    return grpo_records(Scenario(steps=STEPS, fault="stale adapter", fault_step=310))


@pytest.fixture(scope="module")
def report(records, tmp_path_factory):
    return build_report([write_run(tmp_path_factory.mktemp("run"), records)])


def plot_of(report, name):
    [plot] = [plot for plot in report.plots if plot.id == name]
    return plot


def logged(records, plot, name):
    """Step and value of a field, straight from the records."""
    spec = next(spec for spec in CURVES if plot.id.startswith(spec.id))
    above, _, below = name.partition("/") if "_limit" in name else (name, "", "")
    for record in records:
        if record["kind"] in spec.source:
            if above.startswith("canary_"):
                value = record["canary"][above.removeprefix("canary_")]
            else:
                value = record.get(above)
            if value is not None:
                yield record["step"], value / (record[below] if below else 1) / spec.scale


def test_every_point_of_every_curve_is_in_the_log(records, report):
    curves = [plot for plot in report.plots if plot.kind in ("curves", "stack")]
    assert len(curves) >= 18
    for plot in curves:
        for line in plot.lines:
            pairs = list(logged(records, plot, line.name))
            begin = 0
            for place, step in enumerate(line.x):
                stretch = []
                while begin < len(pairs) and pairs[begin][0] <= step:
                    stretch.append(pairs[begin][1])
                    begin += 1
                close = {"rel": 1e-5, "abs": 1e-12}
                assert line.mean[place] == pytest.approx(np.mean(stretch), **close)
                if line.low is not None:
                    assert line.low[place] == pytest.approx(min(stretch), **close)
                    assert line.high[place] == pytest.approx(max(stretch), **close)
            assert begin == len(pairs), line.name


def test_floor_and_alarms_stand_where_the_log_has_them(records, report):
    plot = plot_of(report, "kl")
    floor = next(record for record in records if record["kind"] == "floor")
    [band] = plot.bands
    assert [band.value, band.low, band.high] == pytest.approx(list(floor["k3"].values()), rel=1e-5)
    alarms = [record for record in records if record["kind"] == "alarm"]
    assert [mark.step for mark in plot.marks] == [record["step"] for record in alarms]
    assert [mark.text for mark in plot.marks] == [record["text"] for record in alarms]
    shown = report.facts["runs"][0]["alarm_records"]
    assert [alarm["value"] for alarm in shown] == [record["value"] for record in alarms]


def last_records(records):
    return [record for record in records if record["kind"] == "mismatch"][-50:]


def test_the_histogram_is_the_share_of_tokens_in_the_last_records(records, report):
    [line] = plot_of(report, "histogram").lines
    counts = np.sum([record["histogram"] for record in last_records(records)], axis=0)
    assert line.mean == pytest.approx(counts / counts.sum(), rel=1e-5)
    assert len(line.x) == len(R_EDGES) + 1


@pytest.mark.parametrize(
    ("plot", "field", "weight", "value"),
    [
        ("by_probability", "by_probability", "tokens", "abs_mean"),
        ("by_position", "by_position", "tokens", "k3"),
        ("by_length", "by_length", "samples", "k3"),
    ],
)
def test_buckets_are_means_weighted_by_what_they_counted(
    records, report, plot, field, weight, value
):
    sums, counts = defaultdict(float), defaultdict(float)
    for record in last_records(records):
        for bucket, count in enumerate(record[field][weight]):
            if count:
                sums[bucket] += count * record[field][value][bucket]
                counts[bucket] += count
    line = plot_of(report, plot).lines[0]
    for bucket, mean in enumerate(line.mean):
        if counts[bucket]:
            assert mean == pytest.approx(sums[bucket] / counts[bucket], rel=1e-5)
        else:
            assert mean is None


def test_buckets_are_named_by_what_they_hold(report):
    position = plot_of(report, "by_position").lines[0]
    assert position.x[:4] == ["0", "1 to 2", "3 to 6", "7 to 14"]
    assert plot_of(report, "by_length").lines[0].x[:3] == ["1", "2 to 3", "4 to 7"]
    names = plot_of(report, "by_probability").lines[0].x
    assert len(names) == len(PROBABILITY_EDGES) - 1 and names[4] == "0.1 to 0.25"


def test_the_scatter_counts_every_token_of_the_last_records(records, report):
    matrix = plot_of(report, "scatter").matrix
    counts = defaultdict(int)
    for record in last_records(records):
        for i, j, tokens in record["scatter"]:
            counts[i, j] += tokens
    size = len(SURPRISE_EDGES)
    expected = [[counts[i, j] or None for j in range(size)] for i in range(size)]
    assert matrix.values == expected


@pytest.mark.parametrize("name", ["router_heat", "load_heat"])
def test_heat_maps_hold_means_of_stretches_of_steps(records, report, name):
    matrix = plot_of(report, name).matrix
    layers = len(matrix.rows)
    if name == "router_heat":
        # of 360 records every second is kept
        rows = {
            record["step"]: record["router_mismatch_layers"]
            for record in [record for record in records if record["kind"] == "mismatch"][::2]
        }
    else:
        rows = {
            record["step"]: [record[f"router_load/{layer + 1}"] for layer in range(layers)]
            for record in records
            if record["kind"] == "train"
        }
    begin = 0
    for column, last in enumerate(map(int, matrix.columns)):
        stretch = [row for step, row in rows.items() if begin < step <= last]
        shown = [matrix.values[layer][column] for layer in range(layers)]
        assert shown == pytest.approx(np.mean(stretch, axis=0), rel=1e-5)
        begin = last


def test_the_floors_parts_keep_their_intervals(records, report):
    [line] = plot_of(report, "floor_parts").lines
    floor = next(record for record in records if record["kind"] == "floor")
    parts = [floor["k3"], *(part for part in floor["parts"].values() if part)]
    assert line.mean == pytest.approx([part["value"] for part in parts], rel=1e-5)
    assert line.low == pytest.approx([part["low"] for part in parts], rel=1e-5)
    assert "adapter rounding" not in line.x


def test_worst_tokens_are_those_of_the_log_from_the_largest_down(records, report):
    shown = report.facts["runs"][0]["worst_tokens"]
    every = [t["r"] for record in records if record["kind"] == "worst" for t in record["tokens"]]
    assert len(shown) == 40
    sizes = [abs(token["r"]) for token in shown]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == max(map(abs, every))
    for token in shown:
        record = next(r for r in records if r["kind"] == "worst" and r["step"] == token["step"])
        [source] = [t for t in record["tokens"] if t["r"] == token["r"]]
        assert all(token[name] == source[name] for name in ("logp_train", "sample", "token_id"))
    samples = report.facts["runs"][0]["worst_samples"]
    assert samples[0]["abs_r_sum"] >= sizes[0]


def drawn_points(svg, name):
    """Points of a line in an SVG, ``[points, 2]``."""
    path = re.search(rf'<g id="{name}">\s*<path d="([^"]*)"', svg)[1]
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path), dtype=float)


def test_lines_are_drawn_through_their_values(report):
    checked = 0
    for plot in report.plots:
        if plot.kind != "curves":
            continue
        svg = draw(plot, 1)
        for number, line in enumerate(plot.lines):
            points = drawn_points(svg, f"{plot.id}-{number}")
            log = plot.log
            shown = [(x, y) for x, y in zip(line.x, line.mean, strict=True) if not log or y > 0]
            assert len(points) == len(shown), line.name
            x, y = np.array(shown).T
            for value, drawn in zip((x, np.log10(y) if log else y), points.T, strict=True):
                if np.ptp(value) > 1e-9 * max(abs(value).max(), 1e-30):
                    slope, offset = np.polyfit(value, drawn, 1)
                    assert np.abs(slope * value + offset - drawn).max() < 0.05
                    checked += 1
    assert checked > 60


def test_every_plot_says_what_it_shows_and_has_a_table(report):
    assert len({plot.id for plot in report.plots}) == len(report.plots)
    for plot in report.plots:
        assert plot.section in SECTIONS and plot.title and plot.unit
        assert plot.how.endswith(".") and len(plot.how) > 30
        heads, rows = table_of(plot, ["run"])
        assert rows and all(len(row) == len(heads) for row in rows)
    assert [SECTIONS.index(plot.section) for plot in report.plots] == sorted(
        SECTIONS.index(plot.section) for plot in report.plots
    )


def test_an_sft_log_has_its_plots_and_names_those_it_lacks(tmp_path):
    report = build_report([write_run(tmp_path, sft_records())])
    names = {plot.id for plot in report.plots}
    assert names >= {"loss", "accuracy", "grad_norm", "tokens_per_s", "memory", "load_heat"}
    assert "kl" not in names and "KL of engine and trainer" in report.facts["missing"]
    lines = {line.name: line for line in plot_of(report, "loss").lines}
    assert lines["eval_loss"].x == [20, 40, 60]


def test_runs_stand_side_by_side_under_names_that_tell_them_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for seed, folder in enumerate(folders):
        write_run(folder, grpo_records(Scenario(steps=20, seed=seed)))
    report = build_report(folders)
    assert [run["name"] for run in report.facts["runs"]] == ["a/run", "b/run"]
    assert {line.run for line in plot_of(report, "kl").lines} == {0, 1}
    assert {plot.run for plot in report.plots if plot.kind == "heat"} == {0, 1}
    heads, _ = table_of(plot_of(report, "kl"), ["a/run", "b/run"])
    assert "b/run: mean over samples" in heads


def test_a_kl_of_exactly_zero_is_drawn(tmp_path):
    records = grpo_records(Scenario(steps=8))
    for record in records:
        if record["kind"] in ("mismatch", "floor"):
            record["k3"] = (
                0.0
                if record["kind"] == "mismatch"
                else dict.fromkeys(("value", "low", "high"), 0.0)
            )
            record["k3_token_mean"] = 0.0
    report = build_report([write_run(tmp_path, records)])
    assert 'id="kl-0"' in draw(plot_of(report, "kl"), 1)
    assert report.facts["runs"][0]["k3"]["value"] == 0


def test_facts_are_finite_json(report):
    text = json.dumps(report.facts, allow_nan=False, default=str)
    assert math.isfinite(json.loads(text)["runs"][0]["k3"]["value"])
