"""The native kernel of attention over cached latents: every instruction set against fp64."""

import pytest
import torch

from closeness import relative_l2
from cpu_cases import ISAS, needs_library
from k3tune_kernels import dispatch
from k3tune_kernels.latent_attention import latent_attention
from k3tune_kernels.latent_attention.cpu_op import latent_attention_cpu

pytestmark = needs_library
ON_EACH = pytest.mark.parametrize("isa", ISAS)
# fp32 result of the same fp32 inputs, against fp64
BOUND = 1e-6


def attended(query, latents, last, value_width: int, scale: float) -> torch.Tensor:
    """Row by row in fp64, over the places a row has."""
    rows = []
    for q, c, place in zip(query.double(), latents.double(), last.tolist(), strict=True):
        seen = c[: place + 1]
        rows.append((scale * q @ seen.T).softmax(-1) @ seen[:, :value_width])
    return torch.stack(rows)


@ON_EACH
@pytest.mark.parametrize(
    ("rows", "heads", "places", "dim", "value_width"),
    [(64, 4, 100, 80, 64), (1, 1, 1, 8, 8), (3, 5, 33, 37, 13), (2, 96, 40, 576, 512)],
)
def test_attention_over_latents_of_rows_at_different_places(
    isa, rows, heads, places, dim, value_width
):
    query, last = torch.randn(rows, heads, dim), torch.randint(0, places, (rows,))
    # as a cache gives them: a part of a longer buffer
    latents = torch.randn(rows, places + 5, dim)[:, :places]
    out = latent_attention_cpu(query, latents, last, value_width, dim**-0.5, isa=isa)
    assert relative_l2(out, attended(query, latents, last, value_width, dim**-0.5)) <= BOUND


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_lies_beyond_a_rows_last_place_does_not_count(backend):
    query, latents, last = torch.randn(3, 2, 16), torch.randn(3, 9, 16), torch.tensor([0, 4, 8])
    expected = attended(query, latents, last, 8, 1.0)
    latents[0, 1:], latents[1, 5:] = 1e3, 1e3
    out = latent_attention(query, latents, last, value_width=8, scale=1.0, backend=backend)
    assert relative_l2(out, expected) <= BOUND


def test_scores_that_differ_widely_neither_overflow_nor_vanish():
    query, latents = torch.full((1, 1, 8), 30.0), torch.randn(1, 50, 8)
    last = torch.tensor([49])
    out = latent_attention(query, latents, last, value_width=8, scale=1.0, backend="cpu")
    assert relative_l2(out, attended(query, latents, last, 8, 1.0)) <= 1e-5


def test_a_row_depends_on_no_other_row_and_on_no_thread_count():
    query, latents, last = torch.randn(70, 4, 80), torch.randn(70, 60, 80), torch.arange(70) % 60
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(latent_attention_cpu(query, latents, last, 64, 0.1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
    alone = [
        latent_attention_cpu(query[i : i + 1], latents[i : i + 1], last[i : i + 1], 64, 0.1)
        for i in range(70)
    ]
    assert torch.equal(torch.cat(alone), results[0])


def test_other_dtypes_are_the_references():
    query, latents, last = torch.randn(2, 3, 16), torch.randn(2, 5, 16), torch.tensor([1, 4])
    wide = latent_attention(query.double(), latents.double(), last, value_width=8, scale=1.0)
    assert wide.dtype == torch.float64
    assert dispatch.explain("latent_attention").backend == "reference"
    none = latent_attention(query[:0], latents[:0], last[:0], value_width=8, scale=1.0)
    assert none.shape == (0, 3, 8) and dispatch.explain("latent_attention").backend == "cpu"
