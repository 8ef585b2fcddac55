"""``generate``: greedy, sampled, batched, with beams; the cache stays small."""

import pytest
import torch

from k3tune.errors import ConfigError
from k3tune.model import load_base
from k3tune.model.cache import KDACacheLayer, MLACacheLayer

NEW = 8


@pytest.fixture(scope="module")
def model(fixtures):
    return load_base(fixtures / "k3_tiny", dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, 316, (2, 6), generator=torch.Generator().manual_seed(2))


def greedy(model, ids: torch.Tensor, count: int) -> list[int]:
    tokens = ids.clone()
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, ids.shape[1] :].tolist()


def test_greedy_generation_is_the_argmax_of_full_passes(model, prompts):
    output = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
    for row in range(2):
        assert output[row, 6:].tolist() == greedy(model, prompts[row : row + 1], NEW)


def test_left_padding_does_not_change_a_row(model, prompts):
    ids = torch.cat([torch.full((1, 3), 319), prompts[:1]], 1)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    long = torch.cat([prompts[:, :3], prompts], 1)[1:]
    output = model.generate(
        torch.cat([ids, long]),
        attention_mask=torch.cat([mask, torch.ones_like(long)]),
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert output[0, 9:].tolist() == greedy(model, prompts[:1], NEW)
    assert output[1, 9:].tolist() == greedy(model, long, NEW)


def test_a_left_padded_prompt_may_be_prefilled_in_pieces(model, prompts):
    ids = torch.cat([torch.full((2, 6), 319), prompts], 1)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    whole = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options), whole)


def test_sampling_repeats_under_a_seed(model, prompts):
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(prompts, max_new_tokens=NEW, do_sample=True, top_p=0.9)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_generation_stops_at_the_eos_id(model, prompts):
    third = greedy(model, prompts[:1], NEW)[2]
    output = model.generate(
        prompts[:1], max_new_tokens=NEW, do_sample=False, eos_token_id=third, pad_token_id=319
    )
    stop = greedy(model, prompts[:1], NEW).index(third) + 1
    assert output.shape[1] == 6 + stop and output[0, -1] == third


def test_generation_knows_the_checkpoints_eos_id(model):
    assert model.generation_config.eos_token_id == 317


def test_beams_and_returned_sequences_reorder_the_cache(model, prompts):
    with_cache = model.generate(prompts, max_new_tokens=NEW, num_beams=3, do_sample=False)
    without = model.generate(
        prompts, max_new_tokens=NEW, num_beams=3, do_sample=False, use_cache=False
    )
    assert torch.equal(with_cache, without)


@torch.no_grad()
def test_the_cache_holds_latents_and_states_not_expanded_keys(model, prompts):
    architecture = model.model.architecture
    cache = model(prompts, use_cache=True).past_key_values
    assert cache.get_seq_length() == 6
    for layer in cache.layers:
        if isinstance(layer, MLACacheLayer):
            width = architecture.kv_lora_rank + architecture.qk_rope_head_dim
            assert layer.compressed_BSC.shape == (2, 6, width)
        else:
            assert isinstance(layer, KDACacheLayer)
            assert layer.state.value_BHKV.shape == (2, 4, 32, 32)
            assert [x.shape for x in layer.conv_inputs] == [(2, 3, 128)] * 3


@torch.no_grad()
def test_rows_of_a_cache_can_be_picked_and_repeated(model, prompts):
    whole = model(prompts, use_cache=True).past_key_values
    whole.batch_select_indices(torch.tensor([1]))
    whole.batch_repeat_interleave(2)
    new = torch.tensor([[5], [5]])
    logits = model(new, past_key_values=whole).logits
    expected = model(torch.cat([prompts[1:], new[:1]], 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected.expand_as(logits))
    whole.reset()
    assert whole.get_seq_length() == 0
    torch.testing.assert_close(model(prompts, past_key_values=whole).logits, model(prompts).logits)


def test_what_the_cache_cannot_do_is_refused(model, prompts):
    cache = model(prompts, use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="keeps no history"):
        cache.crop(1)
    with pytest.raises(ConfigError, match="one kind of cache"):
        model.generate(prompts, max_new_tokens=1, cache_implementation="static")
    model.generate(prompts, max_new_tokens=1, cache_implementation="dynamic")
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompts, max_new_tokens=4, prompt_lookup_num_tokens=2)
