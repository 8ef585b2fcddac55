"""MXFP4 decode and encode, compared as bits against arithmetic done value by value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tune_kernels.mxfp4 import decode, encode

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL_BYTES = torch.arange(256, dtype=torch.uint8).view(16, 16)


def value_of(code: int) -> float:
    return math.copysign(MAGNITUDES[code & 7], -1.0 if code & 8 else 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_decode_is_exact_for_every_byte_and_scale(dtype):
    packed = ALL_BYTES.expand(255, 16, 16)
    scale = torch.arange(255, dtype=torch.uint8)[:, None, None].expand(255, 16, 1)
    decoded = decode(packed, scale, dtype)
    values = torch.tensor(
        [[value_of(byte & 15), value_of(byte >> 4)] for byte in range(256)], dtype=torch.float64
    ).view(1, 16, 32)
    expected = values * torch.tensor([2.0 ** (s - 127) for s in range(255)]).double()[:, None, None]
    assert decoded.shape == (255, 16, 32)
    assert torch.equal(decoded.double(), expected.to(dtype).double())
    assert torch.equal(decoded.signbit(), expected.signbit())


def test_values_beyond_the_dtype_become_infinite_and_none_is_lost_below():
    top = torch.full((16, 1), 254, dtype=torch.uint8)
    bottom = torch.zeros(16, 1, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        assert decode(ALL_BYTES, top, dtype).max() == float("inf")
        smallest = decode(ALL_BYTES, bottom, dtype)
        assert smallest[smallest > 0].min().double() == 2.0**-128


def test_a_nan_scale_gives_nan_everywhere():
    scale = torch.full((16, 1), 255, dtype=torch.uint8)
    assert decode(ALL_BYTES, scale).isnan().all()


def test_decode_takes_views():
    packed, scale = encode(torch.randn(4, 64, 96), scale_rule="ceil")
    whole = decode(packed, scale)
    strided = decode(packed[::2, 1::3], scale[::2, 1::3])
    assert torch.equal(strided, whole[::2, 1::3])


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_encode_returns_every_value_it_can_represent(rule):
    # Each group of 32 holds a magnitude of 6 or 4, so that both rules choose the scale it has.
    scale = torch.arange(1, 254, dtype=torch.uint8)[:, None, None].expand(253, 16, 1)
    packed = ALL_BYTES.clone().expand(253, 16, 16).clone()
    packed[..., 0] = 0x76
    weight = decode(packed, scale, torch.float64)
    repacked, rescale = encode(weight, scale_rule=rule)
    assert torch.equal(repacked, packed)
    assert torch.equal(rescale, scale)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.floats(-1e30, 1e30, allow_nan=False, allow_subnormal=True), min_size=32, max_size=32
    ),
    rule=st.sampled_from(["ceil", "floor"]),
)
def test_encode_rounds_to_the_nearest_value_and_ties_to_even(values, rule):
    weight = torch.tensor(values, dtype=torch.float64)[None]
    packed, scale = encode(weight, scale_rule=rule)
    amax = max(abs(v) for v in values)
    if amax:
        fraction, power = math.frexp(amax)
        exponent = power - 3 + (rule == "ceil" and fraction > 0.75)
        assert scale.item() == min(max(exponent + 127, 0), 254)
    unit = 2.0 ** (scale.item() - 127)
    for index, value in enumerate(values):
        code = (packed[0, index // 2].item() >> (4 * (index % 2))) & 15
        target = min(abs(value) / unit, 6.0)
        distances = [abs(m - target) for m in MAGNITUDES]
        nearest = [c for c in range(8) if distances[c] == min(distances)]
        assert (code & 7) == (
            nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        )
        assert bool(code & 8) == (math.copysign(1, value) < 0)


def test_the_ceil_rule_never_saturates_and_the_floor_rule_may():
    weight = torch.full((1, 32), 7.0)
    assert decode(*encode(weight, scale_rule="ceil"))[0, 0] == 8.0
    assert decode(*encode(weight, scale_rule="floor"))[0, 0] == 6.0


def test_an_all_zero_group_takes_the_smallest_scale():
    packed, scale = encode(torch.zeros(2, 64), scale_rule="ceil")
    assert not packed.any() and not scale.any()


@pytest.mark.parametrize(
    ("weight", "rule", "message"),
    [
        (torch.zeros(2, 48), "ceil", "multiple of 32, found 48"),
        (torch.full((2, 32), float("nan")), "ceil", "finite"),
        (torch.zeros(2, 32), "nearest", "'ceil' or 'floor', found 'nearest'"),
    ],
)
def test_encode_says_what_it_cannot_do(weight, rule, message):
    with pytest.raises(ValueError, match=message):
        encode(weight, scale_rule=rule)


def test_decode_says_what_it_cannot_do():
    packed, scale = encode(torch.zeros(2, 64), scale_rule="ceil")
    with pytest.raises(ValueError, match=r"needs scale \(2, 2\), found \(2, 1\)"):
        decode(packed, scale[:, :1])
    with pytest.raises(ValueError, match="uint8"):
        decode(packed.int(), scale)
    with pytest.raises(ValueError, match="bf16, fp32 or fp64"):
        decode(packed, scale, torch.float16)
