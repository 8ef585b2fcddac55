"""The base's fingerprint sees every byte of the base, and nothing else."""

import torch

from k3tune.lora import attach_lora
from k3tune.lora.fingerprint import base_digests, base_fingerprint, combine_digests
from k3tune.model import load_base


def test_training_leaves_the_base_as_it_was(base, spec, ids):
    before = base_fingerprint(base)
    model = attach_lora(base, spec())
    assert base_fingerprint(model) == before
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert base_fingerprint(model) == before
    assert base_fingerprint(model.unload()) == before


def test_every_parameter_is_in_it(folder):
    model = load_base(folder)
    before = base_fingerprint(model)
    for name, parameter in model.named_parameters():
        content = parameter.data.view(-1).view(torch.uint8)
        content[-1] ^= 1
        assert base_fingerprint(model) != before, name
        content[-1] ^= 1
    assert base_fingerprint(model) == before


def test_a_dtype_is_in_it(folder):
    assert base_fingerprint(load_base(folder)) != base_fingerprint(
        load_base(folder, dtype=torch.float32)
    )


def test_processes_with_some_experts_each_have_it_together(folder):
    parts = [base_digests(load_base(folder, experts=experts)) for experts in ([4, 0], [1, 2, 3])]
    assert combine_digests(parts[0] | parts[1]) == base_fingerprint(load_base(folder))
    assert combine_digests(parts[0]) != base_fingerprint(load_base(folder))
