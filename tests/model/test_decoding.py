"""Rows at different positions decode together as each of them alone, in whatever slots they are."""

import pytest
import torch

from checkpoints import ODD_SHAPES, build_checkpoint
from closeness import assert_close
from k3tune.model import load_base
from k3tune.model.rows import RowCache

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [9, 9], [1, 2, 3, 4, 5] * 8]
# the state and the decay rate stay fp32's exponentials: the rest is exact to fp64
BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-5}


@pytest.fixture(scope="module", params=[None, *ODD_SHAPES])
def folder(request, tmp_path_factory):
    shape = {} if request.param is None else ODD_SHAPES[request.param]
    return build_checkpoint(tmp_path_factory.mktemp("base"), **shape)


class Rows:
    """Prompts in a cache, and the tokens each of them has by now."""

    def __init__(self, model) -> None:
        self.model, self.tokens = model, []
        self.cache = RowCache(model.model.architecture, model.device)

    def enter(self, *prompts: list[int], times: int = 1) -> None:
        """Prefill with the padding in front, and join ``times`` each."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        filled = self.model.model(ids, mask, use_cache=True).cache
        pick = [number for number in range(len(prompts)) for _ in range(times)]
        self.cache.append(filled, pick, [len(prompts[number]) for number in pick])
        self.tokens += [list(prompts[number]) for number in pick]

    def step(self, *new: int) -> torch.Tensor:
        """Decode one token a row; the hidden states."""
        for row, token in zip(self.tokens, new, strict=True):
            row.append(token)
        return self.model.model.decode(torch.tensor(new), self.cache)[0]

    def alone(self) -> torch.Tensor:
        """What a pass over each row by itself gives for its last token."""
        passes = [self.model.model(torch.tensor([row])).last_hidden_state for row in self.tokens]
        return torch.stack([hidden[0, -1] for hidden in passes])

    def leave(self, *slots: int) -> None:
        """Drop rows, as the cache says."""
        moves = self.cache.drop(slots)
        for source, target in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True):
            self.tokens[target] = self.tokens[source]
        del self.tokens[moves.num_rows :]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@torch.no_grad()
def test_rows_that_enter_grow_and_leave_are_those_of_full_passes(folder, dtype):
    rows = Rows(load_base(folder, dtype=dtype))
    bound = BOUNDS[dtype]

    def check(*new: int) -> None:
        hidden = rows.step(*new)
        # in fp32 with every op in plain torch, the largest error is up to 2.3e-5
        assert_close("hidden", hidden, rows.alone(), max_rel=2 * bound, rms_rel=bound)

    rows.enter(*PROMPTS[:2])
    check(20, 21)
    check(22, 23)
    rows.enter(*PROMPTS[2:], times=2)
    check(30, 31, 32, 33, 34, 35)
    rows.leave(0, 4, 5)
    assert rows.cache.num_rows == 3
    check(40, 41, 42)
    rows.leave(2)
    rows.enter(PROMPTS[0])
    check(50, 51, 52)
    rows.leave(0, 1, 2)
    assert rows.cache.num_rows == 0


@torch.no_grad()
def test_a_row_outgrows_the_first_places(tmp_path):
    model = load_base(build_checkpoint(tmp_path), dtype=torch.float32)
    rows = Rows(model)
    rows.enter([7] * 126, [8])
    for token in range(5):
        hidden = rows.step(token, token)
    assert_close("hidden", hidden, rows.alone(), max_rel=2e-5, rms_rel=2e-5)


@torch.no_grad()
def test_decoding_gives_the_routing_of_each_row(tmp_path):
    model = load_base(build_checkpoint(tmp_path), dtype=torch.float32)
    rows = Rows(model)
    rows.enter(*PROMPTS)
    new = [20, 21, 22, 23]
    _, routing = model.model.decode(torch.tensor(new), rows.cache)
    for number, (prompt, token) in enumerate(zip(PROMPTS, new, strict=True)):
        full = model.model(torch.tensor([[*prompt, token]]), output_routing=True).routing
        for layer, used in routing.items():
            assert torch.equal(used.expert_ids[number, 0], full[layer].expert_ids[0, -1])
