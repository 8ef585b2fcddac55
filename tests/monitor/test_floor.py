"""Calibration: intervals clustered by prompt, and a file that is reused only where it holds."""

import json

import numpy as np
import pytest

from k3tune.errors import ConfigError, K3TuneError
from k3tune.monitor import Floor, mismatch
from k3tune.monitor.floor import FILE_NAME, cluster_interval, k3_interval
from k3tune.monitor.samples import make_samples
from k3tune.monitor.statistics import CHARTS

KEY = {
    "engine": {"engine": "local", "dtype": "float32", "activations": "mxfp8"},
    "trainer": {"dtype": "float32", "activations": "none"},
    "base": "5f2c",
    "sampling": {"temperature": 1.0, "top_p": 1.0},
}


def draw(num_prompts=40, each=4, *, spread=0.0, size=0.01, seed=0, length=20):
    """Samples with r normal, its size a factor e^(spread * normal) common to a prompt's samples."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(num_prompts), each)
    rollout = -rng.exponential(0.7, size=(len(prompts), length))
    factor = np.exp(spread * rng.normal(size=num_prompts))[prompts][:, None]
    train = rollout + size * factor * rng.normal(size=rollout.shape)
    return make_samples(train, rollout, rollout <= 0, prompts, np.zeros(len(prompts)))


def test_values_are_those_of_the_samples():
    samples = draw()
    floor, values = Floor.calibrate(samples, key=KEY), mismatch(samples)
    for name in ("k3", "k3_token_mean", "abs_mean"):
        interval = getattr(floor, name)
        assert interval.value == pytest.approx(values[name])
        assert interval.low < interval.value < interval.high
    assert (floor.num_prompts, floor.num_samples, floor.num_tokens) == (40, 160, 3200)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    # 200 calibrations of 24 prompts whose sizes differ: 95 % of the intervals hold the true mean
    true = 0.01**2 / 2 * np.exp(2 * 0.5**2)
    held = 0
    for seed in range(200):
        interval = k3_interval(draw(24, 4, spread=0.5, seed=seed))
        held += interval.low <= true <= interval.high
    print(f"{held / 2} % hold it")
    # a bootstrap over 24 clusters of a skewed size falls a little short
    assert held / 200 >= 0.85


def test_repeated_samples_of_a_prompt_do_not_narrow_it():
    rng = np.random.default_rng(0)
    each_once = rng.exponential(size=30)
    ones = np.ones(30)
    once = cluster_interval(each_once, ones, np.arange(30))
    eight = np.repeat(each_once, 8)
    clustered = cluster_interval(eight, np.ones(240), np.repeat(np.arange(30), 8))
    ignoring = cluster_interval(eight, np.ones(240), np.arange(240))
    assert clustered.high - clustered.low == pytest.approx(once.high - once.low, rel=1e-9)
    # the interval that forgets the prompts is sqrt(8) times too narrow
    assert ignoring.high - ignoring.low == pytest.approx((once.high - once.low) / 8**0.5, rel=0.1)


def test_a_chart_of_a_step_spreads_as_steps_do():
    floor = Floor.calibrate(draw(60, 8, spread=0.4), key=KEY)
    chart = CHARTS[0]
    small, large = (floor.reference(chart, prompts, 8) for prompts in (4, 16))
    assert small.std == pytest.approx(2 * large.std, rel=0.25)
    fresh = [
        floor.sums.of(draw(16, 8, spread=0.4, seed=1000 + i), floor.expected).value(chart)
        for i in range(100)
    ]
    assert np.std(fresh) == pytest.approx(large.std, rel=0.4)
    assert abs(np.mean(fresh) - large.mean) < 4 * large.error


def test_parts_are_measured_beside_it():
    parts = {"same_path": draw(size=1e-4), "mxfp8": draw(size=0.02)}
    record = Floor.calibrate(draw(), key=KEY, parts=parts).record(
        reused=False, not_reused=None, alarm_rate=0.0
    )
    assert record["parts"]["same_path"]["value"] == pytest.approx(5e-9, rel=0.1)
    assert record["parts"]["mxfp8"]["value"] == pytest.approx(2e-4, rel=0.1)
    assert record["parts"]["routing"] is None
    with pytest.raises(ConfigError, match=r"floor parts \['phase of the moon'\] are unknown"):
        Floor.calibrate(draw(), key=KEY, parts={"phase of the moon": draw()})


def test_it_is_read_back_as_it_was(tmp_path):
    floor = Floor.calibrate(draw(), key=KEY, parts={"mxfp8": draw(size=0.02)})
    floor.save(tmp_path)
    read = Floor.load(tmp_path)
    options = {"reused": True, "not_reused": None, "alarm_rate": 0.1}
    assert read.record(**options) == floor.record(**options)
    assert [read.reference(c, 4, 4) for c in CHARTS] == [floor.reference(c, 4, 4) for c in CHARTS]
    assert json.dumps(read.record(**options), allow_nan=False)


def test_it_holds_for_the_same_key_and_says_what_differs(tmp_path):
    Floor.calibrate(draw(), key=KEY).save(tmp_path)
    floor = Floor.load(tmp_path)
    assert floor.differs_from(json.loads(json.dumps(KEY))) is None
    other = {**KEY, "engine": {**KEY["engine"], "activations": "none"}}
    assert floor.differs_from(other) == (
        "the stored floor was measured with engine activations 'mxfp8' and the run has 'none': it "
        "is measured again"
    )
    assert "base '5f2c' and the run has '77aa'" in floor.differs_from({**KEY, "base": "77aa"})
    hotter = {**KEY, "sampling": {**KEY["sampling"], "temperature": 1.1}}
    assert "sampling temperature 1.0 and the run has 1.1" in floor.differs_from(hotter)


def test_a_folder_without_one_has_none(tmp_path):
    assert Floor.load(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 7}'])
def test_a_damaged_file_is_one_sentence(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(K3TuneError, match=r"floor\.json.*remove it"):
        Floor.load(tmp_path)


def test_what_cannot_be_calibrated_on_is_refused():
    with pytest.raises(ConfigError, match="has 3 prompts with a counted token, expected at least"):
        Floor.calibrate(draw(num_prompts=3), key=KEY)
    broken = draw()
    broken.train[2, 3] = np.nan
    with pytest.raises(ConfigError, match="1 log-probabilities of the floor calibration are not"):
        Floor.calibrate(broken, key=KEY)
