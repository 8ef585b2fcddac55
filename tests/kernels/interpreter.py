"""Real bf16 arithmetic for Triton's CPU interpreter (for tests only).

The interpreter keeps bf16 as 16-bit integers. As shipped, ``tl.dot`` and arithmetic work on those
bit patterns, fp32 becomes bf16 by truncation, and ``tl.dot_scaled`` takes bf16 through fp16 (or, in
Triton 3.7, is missing).
Importing this module replaces the methods concerned: operands are widened to fp32, results rounded
to nearest even. ``tl.sum`` over bf16 stays wrong: kernels cast to fp32 before every reduction.

It leans on the interpreter's internals, ran with the Triton versions of ``RAN_WITH``, and checks
itself at import against torch.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

RAN_WITH = ("3.7.1", "3.9.0")

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_shipped = {
    name: getattr(_Builder, name)
    for name in ("create_dot", "binary_op", "unary_op", "cast_impl", "create_fp_to_fp")
}


def _widened(handle: Any) -> Any:
    """A bf16 handle as fp32; any other as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return _Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(values: np.ndarray) -> Any:
    """fp32 values as a bf16 handle, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    top = ((bits + np.uint32(0x7FFF) + even) >> 16).astype(np.uint16)
    top = np.where(np.isnan(values), np.uint16(0x7FC0), top.reshape(np.shape(values)))
    return _Handle(top, tl.bfloat16)


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    return _shipped["create_dot"](self, _widened(a), _widened(b), d, *rest)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if lhs.dtype.scalar != tl.bfloat16:
        return _shipped["binary_op"](self, lhs, rhs, op)
    result = _shipped["binary_op"](self, _widened(lhs), _widened(rhs), op)
    # A comparison answers in booleans, which need no rounding.
    return _rounded(result.data) if result.data.dtype == np.float32 else result


def _unary_op(self: Any, arg: Any, op: Any) -> Any:
    if arg.dtype.scalar != tl.bfloat16:
        return _shipped["unary_op"](self, arg, op)
    return _rounded(op(_widened(arg).data))


def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return src
    if target == tl.bfloat16:
        values = src if source == tl.float32 else _shipped["cast_impl"](self, src, tl.float32)
        return _rounded(values.data)
    wide = _widened(src)
    return (
        wide
        if target == tl.float32 and source == tl.bfloat16
        else _shipped["cast_impl"](self, wide, dst_type)
    )


def _create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if tl.bfloat16 not in (source, target):
        return _shipped["create_fp_to_fp"](self, src, dst_type, rounding)
    nearest = (None, interpreter._ir.ROUNDING_MODE.RTNE)
    assert rounding in nearest, f"{rounding=} of bf16 is not emulated"
    return _cast_impl(self, src, dst_type)


def _get_bf16(self: Any, value: float) -> Any:
    return _rounded(np.array([value], dtype=np.float32))


def _create_dot_scaled(
    self: Any,
    lhs: Any,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: Any,
    fast_math: bool,
    lhs_k_pack: bool,
    rhs_k_pack: bool,
    acc: Any,
) -> Any:
    """The one form the kernels use: bf16 without scales, by E2M1 packed along K."""
    assert lhs_scale is None and lhs.dtype.scalar == tl.bfloat16, f"{lhs_scale=} {lhs.dtype=}"
    assert rhs_format == interpreter._ir.ScaleDotElemTypeTY.E2M1 and rhs_k_pack, f"{rhs_format=}"
    codes = np.stack([rhs.data & 15, rhs.data >> 4], axis=1).reshape(-1, rhs.data.shape[1])
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    values = np.where(codes & 8, -grid[codes & 7], grid[codes & 7])
    exponents = np.repeat(rhs_scale.data.T, 32, axis=0)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    weights = values * np.where(exponents == 255, np.float32("nan"), scales)
    return _Handle(np.matmul(_widened(lhs).data, weights) + acc.data, tl.float32)


_Builder.create_dot = _create_dot
_Builder.binary_op = _binary_op
_Builder.unary_op = _unary_op
_Builder.cast_impl = _cast_impl
_Builder.create_fp_to_fp = _create_fp_to_fp
_Builder.get_bf16 = _get_bf16
_Builder.create_dot_scaled = _create_dot_scaled


if triton.__version__.startswith("3.7"):
    # Its checks of a dot_scaled expect format names as compiled code passes them.
    _shipped_check = TritonSemantic.dot_scaled

    def _dot_scaled(self: Any, *args: Any) -> Any:
        named = [tl.constexpr(each) if isinstance(each, str) else each for each in args]
        return _shipped_check(self, *named)

    TritonSemantic.dot_scaled = _dot_scaled


@triton.jit
def _probe_kernel(a, b, wide, dot, rounded, total, product, scaled):
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(dot + at, tl.dot(x, y))
    tl.store(rounded + at, tl.load(wide + at).to(tl.bfloat16))
    tl.store(total + at, x + y)
    tl.store(product + at, (x.to(tl.float32) * y.to(tl.float32)).to(tl.bfloat16))
    code = tl.full((16, 32), 0x22, tl.uint8)
    exponent = tl.full((32, 1), 128, tl.uint8)
    acc = tl.zeros((32, 32), tl.float32)
    tl.store(scaled + at, tl.dot_scaled(x, None, "bf16", code, exponent, "e2m1", acc))


def _check_against_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    # Magnitudes beyond fp16 on both sides, halfway cases in the last bits.
    wide = torch.randn(32, 32, generator=generator) * torch.logspace(-9, 6, 32)
    a, b = wide.bfloat16(), torch.randn(32, 32, generator=generator).bfloat16()
    fp32 = [torch.empty(32, 32) for _ in range(2)]
    bf16 = [torch.empty(32, 32, dtype=torch.bfloat16) for _ in range(3)]
    (dot, scaled), (rounded, total, product) = fp32, bf16
    _probe_kernel[(1,)](a, b, wide, dot, rounded, total, product, scaled)
    matched = {
        "dot": torch.allclose(dot, a.float() @ b.float(), rtol=1e-5),
        "cast": torch.equal(rounded, a),
        "add": torch.equal(total, a + b),
        "product": torch.equal(product, a * b),
        "dot_scaled": torch.allclose(scaled, (2 * a.float()).sum(1, keepdim=True).expand(32, 32)),
    }
    wrong = [name for name, good in matched.items() if not good]
    if wrong:
        raise RuntimeError(
            f"Triton {triton.__version__}: the interpreter's bf16 {', '.join(wrong)} differs from "
            f"torch after the patch, which ran with Triton {', '.join(RAN_WITH)}; mend the patch"
        )


_check_against_torch()
