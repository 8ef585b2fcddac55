"""KDA through flash-linear-attention: what is handed over, and that it is the same rule.

fla runs on a GPU only; on a CPU a stand-in with fla-core 0.6's signature computes what its
documentation says, and the GPU test compares the real one.
"""

import sys
from types import ModuleType

import pytest
import torch

from closeness import relative_l2
from k3tune.model import kda, load_base
from k3tune_kernels.kda_rule import kda_rule


def documented_chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    safe_gate=False,
    cu_seqlens=None,
):
    """fla-core 0.6's ``chunk_kda`` by its docstring, with ``g`` the precomputed log-decay."""
    assert use_qk_l2norm_in_kernel and safe_gate
    assert scale is None and initial_state is None
    assert cu_seqlens is None or q.shape[0] == 1
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    ends = [q.shape[1]] if cu_seqlens is None else cu_seqlens[1:].tolist()
    outputs, states, start = [], [], 0
    for stop in ends:
        part = [x[:, start:stop] for x in (q, k, v, g, beta)]
        output, after = kda_rule(*part, backend="reference")
        outputs.append(output)
        states.append(after)
        start = stop
    final = torch.cat(states) if output_final_state else None
    return torch.cat(outputs, 1).to(v.dtype), final


@pytest.fixture
def documented_fla(monkeypatch):
    module = ModuleType("fla.ops.kda")
    module.chunk_kda = documented_chunk_kda
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
    monkeypatch.setattr(kda, "fla_accepts", lambda q: True)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_the_model_through_fla_equals_its_own_rule(
    fixtures, documented_fla, documents, monkeypatch
):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float64)
    ids = torch.randint(0, 316, (2, 12))
    options = {"use_cache": False}
    if documents:
        lengths = [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], list(range(12))]
        options["position_ids"] = torch.tensor(lengths)
    with torch.no_grad():
        through = model(ids, **options).logits
        monkeypatch.setattr(kda, "fla_accepts", lambda q: False)
        own = model(ids, **options).logits
    assert (through - own).abs().max() <= 1e-10


@torch.no_grad()
def test_a_padded_prompt_prefilled_through_fla_decodes_as_without(
    fixtures, documented_fla, monkeypatch
):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float64)
    ids = torch.randint(0, 316, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    through = model.generate(ids, **options)
    monkeypatch.setattr(kda, "fla_accepts", lambda q: False)
    own = model.generate(ids, **options)
    assert torch.equal(through.sequences, own.sequences)
    for actual, expected in zip(through.logits, own.logits, strict=True):
        assert (actual - expected).abs().max() <= 1e-10


def test_a_padded_batch_goes_through_fla_document_by_document(fixtures, documented_fla):
    model = load_base(fixtures / "k3_tiny", dtype=torch.float64)
    ids = torch.randint(0, 316, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        alone = model(ids[:1, 4:], use_cache=False).logits
    assert (logits[0, 4:] - alone[0]).abs().max() <= 1e-10


def test_without_a_gpu_the_plain_form_runs():
    assert not kda.fla_accepts(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_real_fla_equals_the_plain_form_forward_and_backward(fixtures, documents, monkeypatch):
    pytest.importorskip("fla")
    model = load_base(fixtures / "k3_tiny", dtype=torch.bfloat16, device="cuda")
    attention = model.model.layers[0].self_attn
    ids = torch.tensor([[0] * 70 + [1] * 30, [0] * 100], device="cuda") if documents else None
    results = []
    for accepted in (True, False):
        monkeypatch.setattr(kda, "fla_accepts", lambda q, accepted=accepted: accepted)
        x = torch.randn(2, 100, 128, generator=torch.Generator().manual_seed(0)).to(
            "cuda", torch.bfloat16
        )
        x.requires_grad_()
        output = attention(x, kda.Documents(ids, 100))
        output.float().square().sum().backward()
        results.append((output, x.grad))
    for actual, expected in zip(*results, strict=True):
        assert relative_l2(actual, expected) <= 1e-2
