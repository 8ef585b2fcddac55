"""MXFP4 compared bit by bit: with a decoder in plain Python, and with compressed-tensors."""

import math
from fractions import Fraction

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)

from k3tune.errors import QuantizationError
from k3tune.quant import MXFP4Tensor, dequantize, pack, quantize, unpack

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
PUBLISHED_SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4,
        type=QuantizationType.FLOAT,
        strategy=QuantizationStrategy.GROUP,
        group_size=32,
        scale_dtype=torch.uint8,
    ),
)


def bits(values):
    """Every bit as integers, so that -0.0 differs from 0.0 and infinities compare."""
    return values.view(INTEGERS[values.dtype]).tolist()


def python_value(code, scale_byte):
    magnitude = math.ldexp(MAGNITUDES[code & 7], scale_byte - 127)
    return -magnitude if code & 8 else magnitude


def python_scale_byte(group, rule):
    """The E8M0 byte of a group, by exact comparison of fractions."""
    amax = max(abs(Fraction(value)) for value in group)
    if amax == 0:
        return 0
    # far enough below for the loops to decide
    exponent = math.frexp(amax)[1] - 9
    if rule == "ceil":
        while Fraction(6) * Fraction(2) ** exponent < amax:
            exponent += 1
    else:
        while Fraction(2) ** (exponent + 1) <= amax:
            exponent += 1
        exponent -= 2
    return min(max(exponent + 127, 0), 254)


def python_code(value, scale_byte):
    """The code of the nearest E2M1 value; of two equally near, the one with an even code."""
    scaled = abs(Fraction(value)) / Fraction(2) ** (scale_byte - 127)
    distances = [abs(scaled - Fraction(magnitude)) for magnitude in MAGNITUDES]
    code = min(range(8), key=lambda candidate: (distances[candidate], candidate % 2))
    return code | 8 if math.copysign(1.0, value) < 0 else code


def assert_encoded_as_in_python(weight, rule):
    encoded = quantize(weight, scale_rule=rule)
    codes = unpack(encoded.packed)
    for row in range(weight.shape[0]):
        for group in range(encoded.num_groups):
            columns = slice(32 * group, 32 * group + 32)
            values = weight[row, columns].tolist()
            expected_byte = python_scale_byte(values, rule)
            assert encoded.scale[row, group].item() == expected_byte, f"{rule=} {values=}"
            expected = [python_code(value, expected_byte) for value in values]
            assert codes[row, columns].tolist() == expected, f"{rule=} {values=}"


@pytest.fixture(scope="module")
def every_byte_and_scale():
    """Row s holds all 256 bytes under scale byte s, for s in 0..254."""
    packed = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scale = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    return packed, scale


def test_every_byte_under_every_scale_decodes_to_its_exact_value(every_byte_and_scale):
    packed, scale = every_byte_and_scale
    expected = torch.tensor(
        [
            [python_value(code, byte) for pair in range(256) for code in (pair & 15, pair >> 4)]
            for byte in range(255)
        ],
        dtype=torch.float64,
    )
    assert bits(dequantize(packed, scale, dtype=torch.float64)) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_narrower_dtype_differs_from_fp64_only_by_infinities_of_scales_253_and_254(
    every_byte_and_scale, dtype
):
    packed, scale = every_byte_and_scale
    exact = dequantize(packed, scale, dtype=torch.float64)
    decoded = dequantize(packed, scale, dtype=dtype)
    assert bits(decoded) == bits(exact.to(dtype))
    inexact = decoded.double() != exact
    assert torch.equal(inexact, exact.abs() >= 2.0**128)
    assert sorted(set(inexact.nonzero()[:, 0].tolist())) == [253, 254]


def test_decoding_agrees_with_compressed_tensors_on_every_byte_and_scale(every_byte_and_scale):
    packed, scale = every_byte_and_scale
    theirs = MXFP4PackedCompressor.decompress(
        {"weight_packed": packed, "weight_scale": scale}, PUBLISHED_SCHEME
    )["weight"]
    assert bits(dequantize(packed, scale)) == bits(theirs)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_payload_agrees_with_compressed_tensors_under_our_scales(rule):
    weight = torch.randn(64, 256) * torch.exp2(torch.randint(-40, 40, (64, 1)).float())
    ties = torch.tensor([*MIDPOINTS, *(-value for value in MIDPOINTS), 6.0, -6.0])
    weight[:8, :16] = ties * torch.exp2(torch.arange(8.0))[:, None]
    weight[:8, 16:32] = 0.5
    ours = quantize(weight, scale_rule=rule)
    theirs = MXFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": torch.exp2(ours.scale.float() - 127)}, PUBLISHED_SCHEME
    )
    assert torch.equal(ours.packed, theirs["weight_packed"])
    assert torch.equal(ours.scale, theirs["weight_scale"])


def test_the_even_column_is_the_low_nibble():
    assert pack(torch.tensor([[0x1, 0xF]], dtype=torch.uint8)).tolist() == [[0xF1]]
    assert unpack(torch.tensor([[0xF1]], dtype=torch.uint8)).tolist() == [[0x1, 0xF]]


def test_pack_and_unpack_are_inverse_for_every_byte():
    every = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    assert torch.equal(pack(unpack(every)), every)
    assert unpack(every).shape == (2, 8, 32)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("exponent", [-140, -127, -3, 0, 5, 100])
def test_every_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearer(rule, exponent):
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64)
    around = [
        torch.nextafter(midpoints, torch.zeros_like(midpoints)),
        midpoints,
        torch.nextafter(midpoints, torch.full_like(midpoints, 9.0)),
    ]
    values = torch.cat([*around, *(-value for value in around)])
    weight = torch.zeros(1, 64, dtype=torch.float64)
    weight[0, :31], weight[0, 32:43] = values[:31], values[31:]
    # 6 fixes the scale of both groups at 2^exponent under "ceil", and at the same under "floor"
    weight[0, 31] = weight[0, 63] = 6.0
    assert_encoded_as_in_python(weight * 2.0**exponent, rule)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scale_at_and_just_around_powers_of_two_and_six_times_them(rule, dtype):
    powers = 2.0 ** torch.arange(-130, 127, 8).double()
    peaks = torch.cat([powers, 1.5 * powers]).to(dtype)
    above = (peaks.view(INTEGERS[dtype]) + 1).view(dtype)
    below = (peaks.view(INTEGERS[dtype]) - 1).view(dtype)
    weight = torch.zeros(3 * len(peaks), 32, dtype=dtype)
    weight[:, 7] = torch.cat([peaks, above, below])
    weight[:, 8] = -weight[:, 7] / 3
    assert_encoded_as_in_python(weight, rule)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_subnormal_weights_are_encoded_exactly(rule, dtype):
    patterns = torch.arange(1, 129, dtype=INTEGERS[dtype])
    if dtype == torch.float32:
        patterns = patterns << 16
    assert_encoded_as_in_python(patterns.view(dtype).view(4, 32), rule)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_random_weights_of_mixed_size_are_encoded_as_in_python(rule):
    weight = torch.randn(12, 96) * torch.exp2(torch.randint(-9, 9, (12, 96)).float())
    assert_encoded_as_in_python(weight, rule)
    assert_encoded_as_in_python(weight.half(), rule)


def test_zeros_keep_their_sign_and_take_scale_byte_zero():
    weight = torch.zeros(1, 64)
    weight[0, 1] = -0.0
    encoded = quantize(weight, scale_rule="ceil")
    assert encoded.scale.tolist() == [[0, 0]]
    assert bits(dequantize(encoded, dtype=torch.float32)) == bits(weight)


def test_what_quantize_returns_is_what_dequantize_takes():
    weight = torch.randn(3, 5, 64)
    encoded = quantize(weight, scale_rule="ceil")
    together = dequantize(encoded, dtype=torch.float64)
    assert torch.equal(together, dequantize(encoded.packed, encoded.scale, dtype=torch.float64))
    assert ((together - weight).abs() <= weight.abs().amax(-1, keepdim=True) / 4).all()


def test_a_tensor_with_a_second_scale_and_bytes_without_one_are_refused():
    encoded = quantize(torch.zeros(2, 32), scale_rule="ceil")
    with pytest.raises(QuantizationError, match="or one MXFP4Tensor, found MXFP4Tensor and Ten"):
        dequantize(encoded, encoded.scale, name="w1")
    with pytest.raises(QuantizationError, match="found Tensor and NoneType: pass either"):
        dequantize(encoded.packed)


def test_floor_saturates_where_ceil_takes_the_next_scale():
    weight = torch.full((1, 32), 7.5)
    floor, ceil = (quantize(weight, scale_rule=rule) for rule in ("floor", "ceil"))
    assert dequantize(floor.packed, floor.scale).unique().tolist() == [6.0]
    assert dequantize(ceil.packed, ceil.scale).unique().tolist() == [8.0]


@pytest.mark.parametrize(
    ("rule", "largest"), [("ceil", 6.0 * 2.0**127), ("floor", math.nextafter(2.0**130, 0))]
)
def test_a_group_beyond_the_largest_scale_is_refused_with_its_place(rule, largest):
    weight = torch.ones(2, 3, 64, dtype=torch.float64)
    weight[1, 2, 40] = -largest
    encoded = quantize(weight, scale_rule=rule)
    assert dequantize(encoded, dtype=torch.float64)[1, 2, 40] == -6.0 * 2.0**127
    for value in (math.nextafter(largest, math.inf), 1e308):
        weight[1, 2, 40] = -value
        with pytest.raises(
            QuantizationError, match=r"w1: .*2\^127.* first -.* at \[1\], row 2, col.* 40"
        ):
            quantize(weight, scale_rule=rule, name="w1")


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_decoded_values_survive_encoding(rule):
    scale = torch.randint(2, 255, (16, 4), dtype=torch.uint8)
    packed = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    values = dequantize(packed, scale, dtype=torch.float64)
    again = quantize(values, scale_rule=rule)
    assert bits(dequantize(again.packed, again.scale, dtype=torch.float64)) == bits(values)


def test_stacked_experts_decode_as_each_alone():
    packed = torch.randint(0, 256, (3, 8, 32), dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 8, 2), dtype=torch.uint8)
    together = dequantize(packed, scale)
    for expert in range(3):
        assert torch.equal(together[expert], dequantize(packed[expert], scale[expert]))


def test_a_tensor_knows_its_logical_shape_and_bytes():
    weight = MXFP4Tensor(
        torch.zeros(5, 12, 48, dtype=torch.uint8), torch.zeros(5, 12, 3, dtype=torch.uint8)
    )
    assert weight.shape == (5, 12, 96)
    assert (weight.out_features, weight.in_features, weight.num_groups) == (12, 96, 3)
    assert weight.num_bytes == 5 * 12 * 96 * 4.25 / 8


def test_scale_byte_255_is_refused_by_name_and_place():
    packed = torch.zeros(2, 4, 32, dtype=torch.uint8)
    scale = torch.full((2, 4, 2), 127, dtype=torch.uint8)
    scale[1, 2, 1] = scale[1, 3, 0] = 255
    with pytest.raises(QuantizationError, match=r"experts\.w1: scale byte 255 .*at \[1\], row 2, "):
        dequantize(packed, scale, name="experts.w1")
    with pytest.raises(QuantizationError, match="row 2, group 1, 2 in all"):
        dequantize(packed[1], scale[1])


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (
            torch.zeros(4, 16),
            torch.zeros(4, 1).byte(),
            "w2: expected uint8 packed and scale, found torch.float32 and",
        ),
        (
            torch.zeros(4, 16).byte(),
            torch.zeros(4, 1),
            "found torch.uint8 and torch.float32: pass the bytes",
        ),
        (torch.zeros(16).byte(), torch.zeros(1).byte(), r"w2: expected packed .* found \(16,\)"),
        (torch.zeros(4, 17).byte(), torch.zeros(4, 1).byte(), "I a multiple of 32"),
        (torch.zeros(4, 32).byte(), torch.zeros(4, 1).byte(), r"w2: .* needs scale \(4, 2\)"),
        (torch.zeros(4, 32).byte(), torch.zeros(3, 2).byte(), r"found \(3, 2\)"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(packed, scale, message):
    with pytest.raises(QuantizationError, match=message):
        dequantize(packed, scale, name="w2")


def test_other_dtypes_of_the_result_are_refused():
    with pytest.raises(QuantizationError, match=r"w2: expected dtype .* found torch\.int8"):
        dequantize(torch.zeros(4, 16).byte(), torch.zeros(4, 1).byte(), dtype=torch.int8, name="w2")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_refused_with_their_place(value):
    weight = torch.zeros(3, 64)
    weight[2, 40] = value
    with pytest.raises(
        QuantizationError, match=rf"w1: expected finite .* 1 .*{value} at row 2, column 40"
    ):
        quantize(weight, scale_rule="ceil", name="w1")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 48), "multiple of 32, found 48 columns"),
        (torch.zeros(32), r"shape \[32\]"),
        (torch.zeros(4, 32, dtype=torch.int8), r"found torch\.int8"),
    ],
)
def test_weights_that_cannot_be_encoded_are_refused(weight, message):
    with pytest.raises(QuantizationError, match=message):
        quantize(weight, scale_rule="floor")


def test_the_scale_rule_must_be_named():
    with pytest.raises(TypeError, match="scale_rule"):
        quantize(torch.zeros(1, 32))
    with pytest.raises(QuantizationError, match="'ceil' or 'floor', found 'round'"):
        quantize(torch.zeros(1, 32), scale_rule="round")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(2, 3).byte(), "3 columns, expected an even number"),
        (torch.full((2, 4), 16).byte(), "holds 16, expected E2M1 codes 0..15: 8 of 8"),
        (torch.zeros(2, 4), "codes is torch.float32"),
    ],
)
def test_codes_that_do_not_pack_are_refused(codes, message):
    with pytest.raises(QuantizationError, match=message):
        pack(codes)
