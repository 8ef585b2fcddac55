"""Two bounds for every comparison, both printed, so that a failure shows how far it was."""

import torch


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in fp64; 0 when both are zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    distance, size = (actual - expected).norm().item(), expected.norm().item()
    return distance / size if size else (0.0 if distance == 0 else float("inf"))


def assert_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    max_rel: float,
    rms_rel: float,
) -> None:
    """Compare by the largest error relative to the largest value, and by relative L2.

    Args:
        name: what is compared, for the message.
        actual, expected: tensors of one shape.
        max_rel: bound on ``max|actual - expected| / max|expected|``.
        rms_rel: bound on :func:`relative_l2`.
    """
    assert actual.shape == expected.shape, (
        f"{name}: {tuple(actual.shape)=} {tuple(expected.shape)=}"
    )
    assert torch.isfinite(actual).all(), (
        f"{name}: {(~torch.isfinite(actual)).sum()} values not finite"
    )
    if expected.numel() == 0:
        return
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    peak = expected.detach().double().abs().max().item()
    largest = difference / peak if peak else difference
    rms = relative_l2(actual, expected)
    figures = (
        f"{name}: max {largest:.2e} (bound {max_rel:.0e}), rms {rms:.2e} (bound {rms_rel:.0e})"
    )
    print(figures)
    assert largest <= max_rel and rms <= rms_rel, figures
