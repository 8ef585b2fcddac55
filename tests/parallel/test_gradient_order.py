"""The order in which gradients become ready, held against the other processes'."""

import pytest
import torch

from k3tune.errors import K3TuneError
from k3tune.parallel.gradient_order import GradientOrder

CPU = torch.device("cpu")


class Processes:
    """Two processes one after the other: the second sees what the first sent."""

    def __init__(self):
        self.sent = []

    def first(self, values):
        self.sent.append(values)
        return values

    def second(self, values):
        return torch.maximum(values, self.sent.pop(0))


@pytest.fixture
def processes():
    return Processes()


def factors():
    return {name: torch.nn.Parameter(torch.ones(2)) for name in ("A", "B")}


def backward(parameters, *names):
    """One step whose gradients come one after the other."""
    for name in names:
        parameters[name].sum().backward()


def test_one_order_passes_step_by_step(processes):
    one, other = factors(), factors()
    orders = GradientOrder(one, CPU, processes.first), GradientOrder(other, CPU, processes.second)
    for names in ("AB", "BA"):
        for parameters, order in zip((one, other), orders, strict=True):
            backward(parameters, *names)
            order.check()


def test_another_order_is_an_error_that_names_the_first(processes):
    one, other = factors(), factors()
    orders = GradientOrder(one, CPU, processes.first), GradientOrder(other, CPU, processes.second)
    backward(one, "A", "B")
    backward(other, "B", "A")
    orders[0].check()
    with pytest.raises(
        K3TuneError, match=r"here first B, A\), expected one order.*zero_stage to 1"
    ):
        orders[1].check()


def test_a_gradient_that_is_missing_is_another_order(processes):
    one, other = factors(), factors()
    orders = GradientOrder(one, CPU, processes.first), GradientOrder(other, CPU, processes.second)
    backward(one, "A", "B")
    backward(other, "A")
    orders[0].check()
    with pytest.raises(K3TuneError, match="different orders"):
        orders[1].check()


def test_without_a_backward_since_nothing_is_exchanged():
    def refused(values):
        raise AssertionError(values)

    GradientOrder(factors(), CPU, refused).check()
