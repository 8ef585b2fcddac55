"""MXFP8 rounding, exact: against torch's own E4M3 and the specification's rule for scales."""

import math

import pytest
import torch

from k3tune.errors import QuantizationError
from k3tune.quant.mxfp8 import round_mxfp8, round_mxfp8_straight_through
from k3tune_kernels.mxfp8 import decode, encode

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = E4M3[E4M3.float().isfinite()]


def group_of(*values: float) -> torch.Tensor:
    """The values, and zeros up to a group of 32."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def by_definition(group: list[float]) -> list[float]:
    """The rounding of one group in Python's own arithmetic, which is exact here."""
    amax = max(map(abs, group))
    exponent = max(math.floor(math.log2(amax)) - 8, -127) if amax else -127
    rounded = []
    for value in group:
        scaled = min(abs(value) / 2.0**exponent, 448.0)
        # three bits behind the leading one, but steps of 2^-9 at the least
        step = 2.0 ** (max(math.floor(math.log2(scaled)), -6) - 3) if scaled else 1.0
        rounded.append(math.copysign(round(scaled / step) * step * 2.0**exponent, value))
    return rounded


def test_every_finite_e4m3_value_stays_what_it_is():
    # 448 in the group makes the scale 1
    rows = FINITE.float()[:, None].repeat(1, 32)
    rows[:, 1] = 448.0
    assert torch.equal(round_mxfp8(rows), rows)


def test_values_between_are_rounded_as_torch_rounds_to_e4m3():
    values = torch.linspace(-448.0, 448.0, 32 * 4001).view(-1, 32).contiguous()
    values[:, 0] = 448.0
    expected = values.to(torch.float8_e4m3fn).float()
    assert torch.equal(round_mxfp8(values), expected)


@pytest.mark.parametrize("exponent", [-140, -127, -126, -30, 0, 7, 100])
def test_random_groups_are_rounded_by_the_definition(exponent):
    generator = torch.Generator().manual_seed(exponent)
    groups = torch.randn(40, 32, generator=generator) * torch.rand(40, 1, generator=generator)
    groups = torch.ldexp(groups, torch.tensor(exponent))
    expected = torch.tensor([by_definition(group) for group in groups.tolist()])
    assert torch.equal(round_mxfp8(groups), expected)


def test_ties_go_to_the_even_value():
    # 256 makes the scale 1; between 16 and 32 the step is 2
    rounded = round_mxfp8(group_of(256.0, 17.0, 19.0, -17.0, 17.001))
    assert rounded[:5].tolist() == [256.0, 16.0, 20.0, -16.0, 18.0]


def test_what_exceeds_448_after_scaling_saturates():
    # the scale of 511 is 1: its power of two is that of E4M3's largest value
    rounded = round_mxfp8(group_of(511.0, -500.0, 449.0, 3.0))
    assert rounded[:4].tolist() == [448.0, -448.0, 448.0, 3.0]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(448.0, 127), (256.0, 127), (255.9, 126), (1.0, 119), (0.0, 0), (2.0**-140, 0)],
)
def test_the_scale_is_the_power_of_two_of_the_largest_value_less_eight(amax, byte):
    _, scale = encode(group_of(-amax))
    assert scale.tolist() == [byte]


def test_a_value_far_below_its_groups_largest_becomes_zero_or_the_smallest_step():
    rounded = round_mxfp8(group_of(256.0, 2.0**-11, 1.6 * 2.0**-10))
    assert rounded[:3].tolist() == [256.0, 0.0, 2.0**-9]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_value_that_is_not_finite_becomes_nan_and_others_do_not(bad):
    x = torch.ones(2, 64)
    x[0, 40] = bad
    rounded = round_mxfp8(x)
    assert rounded[0, 32:].isnan().all()
    assert torch.equal(rounded[0, :32], torch.ones(32)) and torch.equal(rounded[1], torch.ones(64))
    values, scale = encode(x)
    assert scale[0].tolist() == [119, 255] and values[0, 32:].float().isnan().all()


def test_rounding_is_a_projection_and_encode_decode():
    x = torch.randn(5, 3, 96)
    once = round_mxfp8(x)
    assert torch.equal(round_mxfp8(once), once)
    assert torch.equal(decode(*encode(x)), once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept_and_holds_every_result(dtype):
    x = torch.randn(4, 64).to(dtype)
    rounded = round_mxfp8(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.double(), round_mxfp8(x.float()).double())


def test_groups_are_those_of_a_row_also_in_a_strided_view():
    x = torch.randn(64, 6).T
    assert torch.equal(round_mxfp8(x), torch.stack([round_mxfp8(row) for row in x]))


def test_no_row_is_no_problem():
    assert round_mxfp8(torch.zeros(0, 32)).shape == (0, 32)


def test_the_gradient_passes_straight_through():
    x = torch.randn(3, 32, requires_grad=True)
    weight = torch.randn(3, 32)
    rounded = round_mxfp8_straight_through(x)
    assert torch.equal(rounded, round_mxfp8(x.detach()))
    (rounded * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("round_it", [round_mxfp8, round_mxfp8_straight_through])
@pytest.mark.parametrize("x", [torch.zeros(2, 33), torch.zeros(32, dtype=torch.int32)])
def test_what_cannot_be_rounded_is_refused(round_it, x):
    with pytest.raises(QuantizationError, match="multiple of 32 columns, found torch"):
        round_it(x)
