"""Long curves become short ones that hide no spike."""

import numpy as np
import pytest

from k3tune.report.number_text import figure
from k3tune.report.thinning import MAX_POINTS, thin


def test_a_short_curve_stands_as_it_is():
    curve = thin(np.arange(1, 6), np.array([3.0, 1.0, np.nan, 2.0, 5.0]))
    assert curve.steps == [1, 2, 4, 5]
    assert curve.mean == curve.low == curve.high == [3.0, 1.0, 2.0, 5.0]


def test_stretches_of_a_long_curve_hold_their_mean_least_and_largest():
    values = np.random.default_rng(0).normal(size=10_007)
    values[5003] = 99.0
    curve = thin(np.arange(len(values)), values)
    assert len(curve.steps) == MAX_POINTS and curve.steps[-1] == len(values) - 1
    begin = 0
    for place, end in enumerate(curve.steps):
        stretch = values[begin : end + 1]
        assert curve.mean[place] == pytest.approx(stretch.mean(), rel=1e-5, abs=1e-5)
        assert curve.low[place] == pytest.approx(stretch.min(), rel=1e-5)
        assert curve.high[place] == pytest.approx(stretch.max(), rel=1e-5)
        begin = end + 1
    assert max(curve.high) == 99.0


def test_a_curve_of_nothing_is_empty():
    assert thin(np.arange(3), np.full(3, np.nan)).steps == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "", "–"),  # noqa: RUF001
        (0.0, "", "0"),
        (120.0, "", "120"),
        (12345.0, "", "12,345"),
        (0.61234, "", "0.612"),
        (4.1e-7, "", "4.10e-7"),
        (-5.67e-4, "", "-5.67e-4"),
        (123456.7, "", "1.23e5"),
        (0.0, "%", "0 %"),
        (0.00068, "%", "0.068 %"),
        (912e6, "bytes", "912 MB"),
        (1.56e12, "bytes", "1.56 TB"),
    ],
)
def test_numbers_read_as_people_write_them(value, unit, text):
    assert figure(value, unit) == text
