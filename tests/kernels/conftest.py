"""What every kernel test shares: uninitialised memory is poisoned."""

import sys
from pathlib import Path

import pytest
import torch

# Helpers of these tests (cases, interpreter) are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

# A device context knows torch.empty by identity and looks once, at its first use: that must be
# before it is replaced here, or later models on the meta device would fill the memory.
with torch.device("cpu"):
    torch.zeros(1)


@pytest.fixture(autouse=True)
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and its kin return NaN (or the largest integer), so a hole is seen."""

    def poisoned(make):
        def call(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype is torch.bool else tensor.fill_(_largest(tensor.dtype))

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def _largest(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).max
