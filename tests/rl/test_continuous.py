"""The sampler: rows of any position in one batch, each with its own distribution and stream."""

import math

import pytest
import torch

from checkpoints import build_checkpoint
from k3tune.errors import RolloutError
from k3tune.model import load_base
from k3tune.model.scoring import score_rows
from k3tune.rl.engines import ContinuousSampler, SampledToken
from k3tune.rl.engines.draw import RowSampling, draw, log_distribution, uniforms
from k3tune.rl.rollout import MAX_SEED, Sampling

VOCAB = 96
STOP = VOCAB - 3
PROMPTS = [[5], [7, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 3, 8], [40] * 30, [60, 2, 2, 17, 33]]
FREE = Sampling(max_new_tokens=12, stop_token_ids=())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A dense KDA, a KDA, an MLA and a last KDA layer: states on both sides of the latents."""
    folder = build_checkpoint(
        tmp_path_factory.mktemp("base"),
        num_hidden_layers=4,
        mla_layers=[2],
        num_experts=5,
        vocab_size=VOCAB,
    )
    return load_base(folder, dtype=torch.float32)


def run(sampler: ContinuousSampler) -> dict[object, list[SampledToken]]:
    """Step until nothing is left."""
    tokens: dict[object, list[SampledToken]] = {}
    while sampler.num_active or sampler.num_waiting:
        for token in sampler.step():
            tokens.setdefault(token.key, []).append(token)
    return tokens


def sample(model, prompts=PROMPTS, sampling=FREE, seeds=None, **options):
    """Tokens of each prompt, in order."""
    sampler = ContinuousSampler(model, **options)
    for number, prompt in enumerate(prompts):
        sampler.submit(number, prompt, sampling, number if seeds is None else seeds[number])
    tokens = run(sampler)
    return [tokens[number] for number in range(len(prompts))]


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def k3(model, prompts, sampled, **options) -> float:
    """Mean of ``e^r - 1 - r`` of a scoring pass over what was sampled, at temperature 1."""
    rows = [[*prompt, *ids(row)] for prompt, row in zip(prompts, sampled, strict=True)]
    total, count = 0.0, 0
    for row, prompt, tokens in zip(score_rows(model, rows), prompts, sampled, strict=True):
        for scored, token in zip(row[len(prompt) :], tokens, strict=True):
            r = scored - token.logprob
            total, count = total + math.expm1(r) - r, count + 1
    return total / count


def test_logprobs_are_those_of_a_scoring_pass(model):
    assert k3(model, PROMPTS, sample(model)) < 1e-9


def test_logprobs_are_those_of_a_scoring_pass_when_rows_queue(model):
    sampled = sample(model, PROMPTS * 3, max_batch_size=4)
    assert k3(model, PROMPTS * 3, sampled) < 1e-9


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 64])
def test_tokens_depend_on_prompt_and_seed_alone(model, max_batch_size):
    alone = [sample(model, [prompt], seeds=[n])[0] for n, prompt in enumerate(PROMPTS)]
    together = sample(model, max_batch_size=max_batch_size)
    assert list(map(ids, together)) == list(map(ids, alone))
    for row, expected in zip(together, alone, strict=True):
        for token, other in zip(row, expected, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_same_call_gives_the_same_numbers(model):
    first, second = sample(model), sample(model)
    assert [t.logprob for row in first for t in row] == [t.logprob for row in second for t in row]


def test_another_seed_gives_other_tokens(model):
    assert list(map(ids, sample(model))) != list(map(ids, sample(model, seeds=range(50, 56))))


def test_samples_of_one_prompt_differ_by_their_seeds(model):
    rows = sample(model, [PROMPTS[3]] * 4)
    assert len({tuple(ids(row)) for row in rows}) == 4
    again = sample(model, [PROMPTS[3]] * 4, seeds=[3, 2, 1, 0])
    assert list(map(ids, again)) == [ids(row) for row in reversed(rows)]


def test_rows_may_be_longer_than_the_first_buffers(model):
    prompts = [[3] * 150, [8, 9]]
    sampled = sample(model, prompts, Sampling(max_new_tokens=140, stop_token_ids=()))
    assert [len(row) for row in sampled] == [140, 140]
    assert k3(model, prompts, sampled) < 1e-9


def test_a_row_ends_with_its_stop_id_or_at_its_length(model):
    free = ids(sample(model, [PROMPTS[2]])[0])
    stop = free[4]
    [row] = sample(model, [PROMPTS[2]], Sampling(max_new_tokens=12, stop_token_ids=(stop, 200)))
    length = free.index(stop) + 1
    assert ids(row) == free[:length]
    assert [token.finish_reason for token in row] == [None] * (length - 1) + ["stop"]
    [cut] = sample(model, [PROMPTS[2]], Sampling(max_new_tokens=3, stop_token_ids=()))
    assert [token.finish_reason for token in cut] == [None, None, "length"]


def test_the_checkpoints_own_stop_ids_are_used_unless_others_are_given(model):
    rows = sample(model, [[n] for n in range(40)], Sampling(max_new_tokens=60))
    stopped = [row for row in rows if row[-1].finish_reason == "stop"]
    assert stopped and all(ids(row).index(STOP) == len(row) - 1 for row in stopped)


def test_prompts_enter_while_others_run_and_each_has_its_own_settings(model):
    sampler = ContinuousSampler(model, max_batch_size=3)
    sampler.submit("a", PROMPTS[0], Sampling(max_new_tokens=6, stop_token_ids=()), 0)
    sampler.submit("b", PROMPTS[1], Sampling(max_new_tokens=2, stop_token_ids=()), 1)
    first = sampler.step()
    assert [token.key for token in first] == ["a", "b"]
    sampler.submit("c", PROMPTS[2], Sampling(max_new_tokens=4, top_k=1, stop_token_ids=()), 2)
    sampler.submit("d", PROMPTS[3], Sampling(max_new_tokens=4, top_k=1, stop_token_ids=()), 3)
    assert (sampler.num_active, sampler.num_waiting) == (2, 2)
    second = sampler.step()
    assert sorted(token.key for token in second) == ["a", "b", "c"]
    assert (sampler.num_active, sampler.num_waiting) == (2, 1)
    tokens = run(sampler)
    for key, prompt, seed, length in (("c", 2, 2, 4), ("d", 3, 3, 4)):
        settings = Sampling(max_new_tokens=length, top_k=1, stop_token_ids=())
        [expected] = sample(model, [PROMPTS[prompt]], settings, seeds=[seed])
        given = [*(t for t in second if t.key == key), *tokens[key]]
        assert ids(given) == ids(expected)
    assert len(tokens["a"]) == 4


def test_a_cancelled_row_is_gone_and_the_others_go_on(model):
    sampler = ContinuousSampler(model, max_batch_size=2)
    for number in range(4):
        sampler.submit(number, PROMPTS[number], FREE, number)
    start = sampler.step()
    assert sampler.cancel(0) and sampler.cancel(3) and not sampler.cancel("nobody")
    tokens = run(sampler)
    assert set(tokens) == {1, 2}
    expected = sample(model)
    assert [start[1].token_id, *ids(tokens[1])] == ids(expected[1])
    assert ids(tokens[2]) == ids(expected[2])
    sampler.submit(0, PROMPTS[0], FREE, 0)
    assert ids(run(sampler)[0]) == ids(expected[0])


@pytest.mark.parametrize("max_batch_size", [2, 64])
def test_routed_experts_are_those_of_a_full_pass(model, max_batch_size):
    rows = sample(model, return_routing=True, max_batch_size=max_batch_size)
    for prompt, tokens in zip(PROMPTS, rows, strict=True):
        routed = torch.cat([token.routed_experts for token in tokens])
        row = torch.tensor([[*prompt, *ids(tokens)][:-1]])
        full = model.model(row, output_routing=True).routing
        expected = torch.stack([full[layer].expert_ids[0] for layer in sorted(full)], dim=1)
        assert routed.dtype == torch.int16 and torch.equal(routed.long(), expected)


def direct(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> list[float]:
    """Log-probabilities of one row, token by token in Python."""
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: top_k or None]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if mass >= top_p * total and top_p < 1:
            break
        kept.append(token)
        mass += weights[token]
    return [math.log(w / mass) if t in kept else -math.inf for t, w in enumerate(weights)]


def test_the_distribution_is_that_of_temperature_top_k_and_top_p_in_turn():
    settings = [
        Sampling(1, temperature, top_p, top_k)
        for temperature in (0.3, 1.0, 1.7)
        for top_p in (0.2, 0.9, 1.0)
        for top_k in (0, 1, 7, 500)
    ]
    logits = 2 * torch.randn(len(settings), 50)
    rows = RowSampling.of(settings, torch.device("cpu"))
    actual = log_distribution(logits, rows, filtered=True)
    expected = [
        direct(row, s.temperature, s.top_p, s.top_k)
        for row, s in zip(logits, settings, strict=True)
    ]
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_of_equally_likely_tokens_the_first_stay():
    rows = RowSampling.of([Sampling(1, top_k=2), Sampling(1, top_p=0.5)], torch.device("cpu"))
    actual = log_distribution(torch.zeros(2, 4), rows, filtered=True)
    half, none = math.log(0.5), -math.inf
    torch.testing.assert_close(actual, torch.tensor([[half, half, none, none]] * 2))


def test_sampled_logprobs_are_of_the_distribution_drawn_from(model):
    settings = Sampling(12, temperature=0.7, top_p=0.8, top_k=20, stop_token_ids=())
    for prompt, tokens in zip(PROMPTS, sample(model, sampling=settings), strict=True):
        logits = model(torch.tensor([[*prompt, *ids(tokens)]])).logits[0]
        for place, token in enumerate(tokens, start=len(prompt) - 1):
            expected = direct(logits[place], 0.7, 0.8, 20)[token.token_id]
            assert token.logprob == pytest.approx(expected, abs=1e-4)


def test_the_likeliest_token_alone_has_probability_one(model):
    tokens = sample(model, sampling=Sampling(8, top_k=1, stop_token_ids=()))
    for prompt, row in zip(PROMPTS, tokens, strict=True):
        logits = model(torch.tensor([[*prompt, *ids(row)]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids(row)
        assert [token.logprob for token in row] == [0.0] * 8


def test_draws_follow_the_distribution():
    log_probs = torch.tensor([0.5, 0.0, 0.3, 0.2]).log()
    count = 100_000
    seeds, counters = torch.arange(100).repeat(1000), torch.arange(1000).repeat_interleave(100)
    tokens = draw(log_probs.expand(count, -1), uniforms(seeds, counters))
    shares = tokens.bincount(minlength=4) / count
    # four standard deviations of the largest share
    torch.testing.assert_close(shares, log_probs.exp(), rtol=0, atol=4 * (0.25 / count) ** 0.5)
    assert shares[1] == 0


def test_streams_are_uniform_and_independent_of_each_other():
    seeds = torch.tensor([0, 1, 2, MAX_SEED - 1, MAX_SEED])
    values = torch.stack([uniforms(seeds, torch.full((5,), n)) for n in range(4000)])
    assert values.min() >= 0 and values.max() < 1
    bound = 4 / 4000**0.5
    # neighbouring seeds, and neighbouring numbers of one stream
    assert (values.T.corrcoef() - torch.eye(5)).abs().max() < bound
    assert torch.stack([values[:-1, 0], values[1:, 0]]).corrcoef()[0, 1].abs() < bound
    for stream in values.T:
        counts = torch.histc(stream, 20, 0, 1)
        # chi-square with 19 degrees of freedom: 1 in 10^4 exceeds 51
        assert ((counts - 200).square() / 200).sum() < 51


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt 'x' is empty"),
        ({"prompt_ids": [3, VOCAB]}, f"holds ids from 3 to {VOCAB}, expected ids of the"),
        ({"prompt_ids": [-1]}, "holds ids from -1"),
        ({"seed": -1}, "the seed of prompt 'x' is -1, expected 0 to"),
        ({"seed": MAX_SEED + 1}, "expected 0 to 9223372036854775807"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model, change, message):
    sampler = ContinuousSampler(model)
    given = {"key": "x", "prompt_ids": [1], "sampling": FREE, "seed": 0} | change
    with pytest.raises(RolloutError, match=message):
        sampler.submit(**given)
    assert sampler.num_waiting == 0 and sampler.step() == []


def test_a_key_is_taken_until_its_row_ends(model):
    sampler = ContinuousSampler(model)
    one = Sampling(max_new_tokens=1, stop_token_ids=())
    sampler.submit("x", [1], one, 0)
    with pytest.raises(RolloutError, match="'x' is sampled already"):
        sampler.submit("x", [2], one, 0)
    sampler.step()
    sampler.submit("x", [2], one, 0)


def test_logits_that_are_not_finite_name_the_row(model):
    sampler = ContinuousSampler(model)
    sampler.submit("good", [1], FREE, 0)
    sampler.step()
    weight = model.lm_head.weight
    held = weight[4].clone()
    try:
        weight.data[4] = math.nan
        with pytest.raises(RolloutError, match="'good' after 1 sampled tokens are not finite"):
            sampler.step()
    finally:
        weight.data[4] = held


def test_no_batch_is_an_error(model):
    with pytest.raises(RolloutError, match="max_batch_size is 0, expected at least 1"):
        ContinuousSampler(model, max_batch_size=0)
