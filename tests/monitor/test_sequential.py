"""The sequential tests against their stated false-alarm rate, by simulation."""

import numpy as np
import pytest

from k3tune.monitor.sequential import (
    CUSUMS,
    EWMA_LIMIT,
    EWMA_WEIGHT,
    STEPS_BETWEEN_ALARMS,
    SequentialTest,
    standardised,
)


def steps_until_alarm(z):
    """Steps until the first alarm of each row of z, or its length + 1."""
    cusums, ewma = [np.zeros(len(z)) for _ in CUSUMS], np.zeros(len(z))
    first = np.full(len(z), z.shape[1] + 1)
    for step, column in enumerate(z.T, start=1):
        ewma += EWMA_WEIGHT * (column - ewma)
        fired = ewma > EWMA_LIMIT
        for number, (slack, limit) in enumerate(CUSUMS):
            cusums[number] = np.maximum(0, cusums[number] + column - slack)
            fired |= cusums[number] > limit
        first = np.where(fired & (first > step), step, first)
    return first


def test_the_simulation_is_the_test():
    z = np.random.default_rng(5).normal(0.6, 1, size=(20, 200))
    for row, expected in zip(z, steps_until_alarm(z), strict=True):
        test, step = SequentialTest(two_sided=False), 0
        while not test.fired and step < 200:
            test.update(row[step])
            step += 1
        assert (step if test.fired else 201) == expected


def test_alarms_in_control_are_as_rare_as_stated():
    # one clean step in 142,000 may begin an alarm of either CUSUM
    first = steps_until_alarm(np.random.default_rng(0).normal(size=(10_000, 200)))
    alarms = int((first <= 200).sum())
    expected = len(CUSUMS) * 2_000_000 / STEPS_BETWEEN_ALARMS
    print(f"{alarms} alarms, {expected:.1f} expected at most")
    # three standard deviations of such a count
    assert alarms <= expected + 3 * expected**0.5


@pytest.mark.parametrize(("shift", "within"), [(1.5, 17), (3.0, 5), (4.0, 3), (6.0, 2)])
def test_a_lasting_shift_is_found(shift, within):
    first = steps_until_alarm(np.random.default_rng(1).normal(shift, 1, size=(1000, 60)))
    print(f"shift {shift}: mean {first.mean():.1f}, 95 % within {np.quantile(first, 0.95):.0f}")
    assert np.quantile(first, 0.95) <= within


def test_one_outlier_is_no_drift():
    test = SequentialTest(two_sided=False)
    test.update(1e6)
    assert not test.fired


def test_it_recovers_within_steps_however_long_the_fault_was():
    test = SequentialTest(two_sided=False)
    for _ in range(500):
        test.update(20.0)
    assert test.fired
    steps = 0
    while test.fired:
        test.update(0.0)
        steps += 1
    assert steps <= 20


def test_a_fall_counts_only_for_a_test_with_two_sides():
    for two_sided in (False, True):
        test = SequentialTest(two_sided=two_sided)
        for _ in range(20):
            test.update(-3.0)
        assert test.fired is two_sided


def test_a_test_goes_on_after_a_restart():
    z = np.random.default_rng(2).normal(1, 1, size=30)
    whole, first, second = (SequentialTest(two_sided=True) for _ in range(3))
    for value in z:
        whole.update(value)
    for value in z[:11]:
        first.update(value)
    second.restore(first.state())
    for value in z[11:]:
        second.update(value)
    assert second == whole


def test_what_the_floor_may_be_is_not_held_against_a_step():
    # the mean was measured to within 0.1: a step 0.2 above it is not above it
    assert standardised(1.2, 1.0, 0.05, 0.1, two_sided=False) == pytest.approx(0)
    assert standardised(1.3, 1.0, 0.05, 0.1, two_sided=False) == pytest.approx(2)
    assert standardised(0.7, 1.0, 0.05, 0.1, two_sided=True) == pytest.approx(-2)
    assert standardised(0.9, 1.0, 0.05, 0.1, two_sided=True) == 0
