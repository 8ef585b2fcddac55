"""The chunked delta rule is the recurrent one, for every chunk size, length and document split."""

import pytest
import torch

from closeness import relative_l2
from k3tune.model.kda_rule import DeltaState, kda_chunked, kda_recurrent

LENGTHS = (1, 4, 5, 6, 15, 16, 17, 63, 64, 65, 130)
HEADS, WIDTH = 3, 24


def inputs(length: int, *, batch: int = 2, dtype=torch.float32, strong_decay: bool = False):
    """Unit keys, bounded decays: what the layer hands to the rule."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (normal(batch, length, HEADS, WIDTH) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    shift = 8.0 if strong_decay else 0.0
    log_decay = -5 * (3 * normal(batch, length, HEADS, WIDTH) + shift).sigmoid()
    beta = normal(batch, length, HEADS).sigmoid()
    return [x.to(dtype) for x in (q, k, v, log_decay, beta)]


def start(batch: int = 2, *, documents: bool, dtype=torch.float32) -> DeltaState:
    generator = torch.Generator().manual_seed(7)
    value = torch.randn(batch, HEADS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return DeltaState(value.to(dtype), torch.zeros(batch, dtype=torch.long) if documents else None)


def split(length: int) -> torch.Tensor:
    """Documents of random lengths; the first token may go on with the state's document."""
    generator = torch.Generator().manual_seed(length + 1)
    return (torch.rand(2, length, generator=generator) < 0.15).cumsum(1)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
def test_chunked_equals_recurrent(chunk_size, length, documents):
    ids = split(length) if documents else None
    expected, expected_state = kda_recurrent(
        *inputs(length, dtype=torch.float64), start(documents=documents, dtype=torch.float64), ids
    )
    actual, state = kda_chunked(*inputs(length), start(documents=documents), ids, chunk_size)
    assert relative_l2(actual, expected) <= 1e-6
    assert relative_l2(state.value_BHKV, expected_state.value_BHKV) <= 1e-6
    if documents:
        assert torch.equal(state.document_B, expected_state.document_B)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("rule", [kda_recurrent, kda_chunked])
def test_no_state_is_a_state_of_zero(rule, documents):
    ids = split(70) if documents else None
    zero = start(documents=documents).value_BHKV * 0
    document = ids[:, 0] if documents else None
    expected, expected_state = rule(*inputs(70), DeltaState(zero, document), ids)
    actual, state = rule(*inputs(70), None, ids)
    assert relative_l2(actual, expected) <= 1e-6
    assert relative_l2(state.value_BHKV, expected_state.value_BHKV) <= 1e-6


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_strongest_decay_stays_in_range(chunk_size):
    q, k, v, log_decay, beta = inputs(100, strong_decay=True)
    assert log_decay.mean() < -4.9
    expected, _ = kda_recurrent(q, k, v, log_decay, beta, start(documents=False))
    actual, _ = kda_chunked(q, k, v, log_decay, beta, start(documents=False), chunk_size=chunk_size)
    assert torch.isfinite(actual).all()
    assert relative_l2(actual, expected) <= 1e-5


def test_identical_keys_do_not_lose_precision():
    # the inverse of a full lower triangle of ones: where a power series would cancel
    q, k, v, log_decay, beta = inputs(64)
    k = k[:, :1].expand_as(k)
    log_decay, beta = torch.full_like(log_decay, -1e-6), torch.ones_like(beta)
    expected, _ = kda_recurrent(q, k, v, log_decay, beta, start(documents=False))
    actual, _ = kda_chunked(q, k, v, log_decay, beta, start(documents=False), chunk_size=64)
    assert relative_l2(actual, expected) <= 1e-5


@pytest.mark.parametrize("cut", [1, 20, 64, 99])
def test_a_sequence_may_be_cut_anywhere(cut):
    whole, ids = inputs(100), split(100)
    expected, expected_state = kda_chunked(*whole, start(documents=True), ids)
    first, state = kda_chunked(*[x[:, :cut] for x in whole], start(documents=True), ids[:, :cut])
    second, state = kda_chunked(*[x[:, cut:] for x in whole], state, ids[:, cut:])
    assert relative_l2(torch.cat([first, second], 1), expected) <= 1e-6
    assert relative_l2(state.value_BHKV, expected_state.value_BHKV) <= 1e-6


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_gradients_of_both_forms_are_right(documents):
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2]]) if documents else None
    tensors = [x[..., :2, :3] if x.ndim == 4 else x[..., :2] for x in inputs(7, batch=1)]
    tensors = [x.double().requires_grad_() for x in tensors]
    document = torch.zeros(1, dtype=torch.long) if documents else None
    value = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def chunked(value, *tensors):
        output, state = kda_chunked(*tensors, DeltaState(value, document), ids, 4)
        return output, state.value_BHKV

    def recurrent(value, *tensors):
        output, state = kda_recurrent(*tensors, DeltaState(value, document), ids)
        return output, state.value_BHKV

    assert torch.autograd.gradcheck(chunked, (value, *tensors))
    assert torch.autograd.gradcheck(recurrent, (value, *tensors))
