"""The two big products, the decode and the activation of the CPU kernels, each on its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import relative_l2
from cpu_cases import ISAS, needs_library
from k3tune_kernels.cpu import products
from k3tune_kernels.mxfp4 import decode
from k3tune_kernels.situ_glu import reference as situ_reference

pytestmark = needs_library

ALL_BYTES = torch.arange(256, dtype=torch.uint8).view(16, 16)
# fp32 result of the same bf16 or fp32 inputs, against fp64
BOUND = 1e-6


def random_weight(outputs: int, inputs: int, low: int = 110, high: int = 130):
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.randint(low, high + 1, (outputs, inputs // 32), dtype=torch.uint8)
    return packed, scale


def both_errors(rows: int, packed, scale, dtype, isa) -> tuple[float, float]:
    """Relative L2 to fp64 of ``x W^T`` and of ``g W``."""
    weight = decode(packed.contiguous(), scale.contiguous(), torch.float64)
    x = torch.randn(rows, weight.shape[1]).to(dtype)
    g = torch.randn(rows, weight.shape[0]).to(dtype)
    return (
        relative_l2(products.project(x, packed, scale, isa=isa), x.double() @ weight.T),
        relative_l2(
            products.project(g, packed, scale, transposed=True, isa=isa), g.double() @ weight
        ),
    )


def test_decode_is_exact_for_every_byte_and_scale():
    packed = ALL_BYTES.expand(255, 16, 16)
    scale = torch.arange(255, dtype=torch.uint8)[:, None, None].expand(255, 16, 1)
    actual = products.decode(packed, scale)
    expected = decode(packed.contiguous(), scale.contiguous())
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_decode_under_a_nan_scale_is_nan():
    assert products.decode(ALL_BYTES, torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 12),
    inputs=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_products_of_any_shape_are_within_the_gate(isa, rows, outputs, inputs, dtype, seed):
    torch.manual_seed(seed)
    packed, scale = random_weight(32 * outputs, 32 * inputs)
    assert max(both_errors(rows, packed, scale, dtype, isa)) <= BOUND


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [*range(1, 18), 64, 300])
def test_every_number_of_rows_takes_a_path_within_the_gate(isa, rows):
    # wider than any block, and no multiple of the widest
    packed, scale = random_weight(416, 1184)
    assert max(both_errors(rows, packed, scale, torch.bfloat16, isa)) <= BOUND


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_long_sums_stay_within_the_gate(isa, rows):
    packed, scale = random_weight(64, 7168)
    assert both_errors(rows, packed, scale, torch.bfloat16, isa)[0] <= BOUND
    packed, scale = random_weight(7168, 64)
    assert both_errors(rows, packed, scale, torch.bfloat16, isa)[1] <= BOUND


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_scale_exponent_is_exact(isa, rows, dtype):
    # one product a result, by a power of two that keeps it in fp32's normal range
    for exponent in range(255):
        packed, _ = random_weight(64, 1024)
        scale = torch.full((64, 32), exponent, dtype=torch.uint8)
        power = max(-100, min(100, 127 - exponent))
        for transposed in (False, True):
            x = torch.zeros(rows, 64 if transposed else 1024, dtype=dtype)
            x[:, 37] = 2.0**power
            actual = products.project(x, packed, scale, transposed=transposed, isa=isa)
            weight = decode(packed, scale, torch.float64) * 2.0**power
            if exponent >= 253:
                # 4 and 6 are beyond bf16 and fp32; beside them a zero activation gives NaN
                continue
            expected = weight[37] if transposed else weight[:, 37]
            assert torch.equal(actual.double(), expected.expand_as(actual)), exponent


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exponent", [253, 254])
def test_the_largest_scales_give_the_values_that_fp32_holds(isa, exponent):
    # codes up to 1.5: their values are finite under every scale
    packed = torch.randint(0, 4, (64, 512), dtype=torch.uint8) * 17
    packed |= torch.randint(0, 2, (64, 512), dtype=torch.uint8) * 0x80
    scale = torch.full((64, 32), exponent, dtype=torch.uint8)
    x = torch.randn(4, 1024).bfloat16() * 2.0**-100
    weight = decode(packed, scale, torch.float64)
    assert relative_l2(products.project(x, packed, scale, isa=isa), x.double() @ weight.T) <= BOUND
    packed[0, 0] = 0x07
    assert products.project(x, packed, scale, isa=isa)[:, 0].isinf().all()


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_under_an_extreme_scale_leave_the_others_exact(isa):
    packed, scale = random_weight(64, 1024)
    scale[3, 5], packed[3, 80:96] = 0, 0
    scale[9, 0], packed[9, :16] = 254, 0x80
    for rows in (1, 6, 20):
        assert max(both_errors(rows, packed, scale, torch.bfloat16, isa)) <= BOUND


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 4, 5, 12, 16, 20])
@pytest.mark.parametrize("place", ["first", "between", "last block", "behind the blocks"])
def test_one_scale_beyond_bf16_is_met_wherever_it_lies(isa, rows, place):
    # several spans of inputs, and groups behind the last block of both dimensions
    packed, scale = random_weight(1088, 4128)
    groups = scale.shape[1]
    row, group = {
        "first": (0, 0),
        "between": (700, 61),
        "last block": (1087, groups - 2),
        "behind the blocks": (1070, groups - 1),
    }[place]
    scale[row, group] = 1
    codes = packed[row, 16 * group : 16 * group + 16]
    codes.fill_(0x11)  # subnormal in bf16: the dot product would read zeros
    weight = decode(packed, scale, torch.float64)
    inputs = slice(32 * group, 32 * group + 32)
    x = torch.zeros(rows, 4128, dtype=torch.bfloat16)
    x[:, inputs] = 2.0**100
    assert torch.equal(
        products.project(x, packed, scale, isa=isa).double()[:, row],
        (x.double() @ weight.T)[:, row],
    )
    g = torch.zeros(rows, 1088, dtype=torch.bfloat16)
    g[:, row] = 2.0**100
    back = products.project(g, packed, scale, transposed=True, isa=isa)
    assert torch.equal(back.double()[:, inputs], (g.double() @ weight)[:, inputs])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_may_be_strided_and_bytes_lie_at_odd_addresses(isa, dtype):
    packed, scale = random_weight(2 * 96, 544)
    odd_packed = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape)
    odd_scale = torch.empty(scale.numel() + 3, dtype=torch.uint8)[3:].view(scale.shape)
    odd_packed.copy_(packed), odd_scale.copy_(scale)
    for rows in (1, 7, 20):
        assert max(both_errors(rows, odd_packed[::2], odd_scale[::2], dtype, isa)) <= BOUND


@pytest.mark.parametrize("isa", ISAS)
def test_situ_and_its_gradients_are_within_the_gate_where_saturated_too(isa):
    near = torch.linspace(-6, 6, 4096)
    tiny = torch.logspace(-30, -1, 2048)
    gate = torch.cat([near, tiny, -tiny, torch.linspace(-88, 88, 4096)])
    up = torch.cat([torch.randn(8192) * 30, torch.linspace(-800, 800, 4096)])
    grad = torch.randn(len(gate))
    actual = products.situ_glu(gate, up, grad, 4.0, 25.0, isa)
    wide = (gate.double(), up.double())
    expected = (
        situ_reference.forward(*wide, 4.0, 25.0),
        *situ_reference.backward(grad.double(), *wide, 4.0, 25.0),
    )
    for part in (slice(0, 4096), slice(4096, 8192), slice(8192, None)):
        for a, e in zip(actual, expected, strict=True):
            assert relative_l2(a[part], e[part]) <= 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_situ_of_nan_is_nan_and_of_infinity_its_limit(isa):
    gate = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 8)
    up = torch.tensor([1.0, float("inf"), 1.0, float("nan")] * 8)
    out, d_gate, d_up = products.situ_glu(gate, up, torch.ones(32), 4.0, 25.0, isa)
    assert out[0].isnan() and out[3].isnan() and d_gate[0].isnan() and d_up[3].isnan()
    assert out[1] == 100.0 and out[2] == 0.0
    assert d_gate[1] == 0.0 and d_up[1] == 0.0
