"""Continuations of given token ids.

Shape letters: ``B`` prompts of a batch, ``T`` tokens of its longest prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from k3tune.errors import K3TuneError
from k3tune.model.modeling import K3ForCausalLM


def sample_rows(
    model: K3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    batch_size: int = 8,
) -> Iterator[list[int]]:
    """Yield the continuation of each prompt, in order, up to and with an end-of-text id.

    Args:
        model: the model, in eval mode.
        prompts: token ids, each inside the vocabulary, no prompt empty.
        max_new_tokens: longest continuation.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: smallest probability mass to sample from.
        top_k: number of likeliest tokens to sample from; 0 is all.
        seed: of torch's generators, set before the first token; None leaves them alone.
        batch_size: prompts that run together (a seed's samples depend on it).

    Raises:
        K3TuneError: naming the first empty prompt (from 1).
    """
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise K3TuneError(f"prompt {number} is empty, expected at least one token id")
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    if seed is not None:
        torch.manual_seed(seed)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        yield from _continuations(model, batch, max_new_tokens=max_new_tokens, **options)


@torch.no_grad()
def _continuations(
    model: K3ForCausalLM, prompts: Sequence[Sequence[int]], **options: Any
) -> list[list[int]]:
    eos = model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    # padding is masked, and cut off below: any id inside the vocabulary will do
    pad = 0
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for number, prompt in enumerate(prompts):
        ids_BT[number, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BT[number, longest - len(prompt) :] = 1
    output = model.generate(
        input_ids=ids_BT.to(model.device),
        attention_mask=mask_BT.to(model.device),
        pad_token_id=pad,
        **options,
    )
    return [_until_stop(row, stops) for row in output[:, longest:].tolist()]


def _until_stop(row: list[int], stops: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
    return row[: end + 1]
