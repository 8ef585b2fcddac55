"""What vLLM's server speaks, and ``k3tune serve`` with it.

The server must run with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, one API server, ``--enable-lora``
and, for any sampling but temperature 1 alone, ``--logprobs-mode processed_logprobs``. Adapters go
by path: the server must see the folder under the same name.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from k3tune.files import shown
from k3tune.rl.engines.http import Call, CallFailed
from k3tune.rl.engines.http_answers import (
    check_sample,
    checked_ids,
    checked_logprobs,
    member,
    moe_rows,
    routing_bytes,
)
from k3tune.rl.engines.http_dialect import NEUTRAL, Sampled, ServerFacts, Wanted, explained

_CAUSES = (
    (
        r"not found$|^nothing$",
        "it has no such call: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
    ),
    (r"lora is not enabled", "start the server with --enable-lora"),
    (
        r"max_lora_rank",
        "the adapter's rank is {rank}: raise --max-lora-rank of the server, or lower lora_rank",
    ),
    (
        r"expected target modules|unsupported lora|not supported",
        "the server does not adapt all of its modules: export with k3tune export --format vllm "
        "--drop, or train other targets",
    ),
)


class VllmDialect:
    """Calls and answers of vLLM 0.33.

    Args:
        moe_layers: zero-based MoE layers of the base, to read ``routed_experts`` (the server needs
            ``--enable-return-routed-experts``); None ignores them.
    """

    name = "vllm"

    def __init__(self, *, moe_layers: Sequence[int] | None = None) -> None:
        self._moe_layers = moe_layers

    def facts_calls(self) -> tuple[Call, ...]:
        """Health, models and version."""
        return (Call("GET", "/health"), Call("GET", "/v1/models"), Call("GET", "/version"))

    def read_facts(self, answers: Sequence[Any]) -> ServerFacts:
        """The first model without a parent is the base."""
        _, models, version = answers
        listed = member(models, "data")
        bases = [card for card in listed if isinstance(card, dict) and not card.get("parent")]
        if not bases:
            raise CallFailed(f"/v1/models lists no base: {shown(listed)}", again=False)
        numerics = version if isinstance(version, dict) else {"version": str(version)}
        return ServerFacts(str(member(bases[0], "id")), numerics)

    def sample(self, wanted: Wanted, base: str) -> Call:
        """``/v1/completions`` with ids in and out, and logprobs of the sampled tokens alone."""
        sampling = wanted.sampling
        body: dict[str, Any] = {
            "model": wanted.model or base,
            "prompt": list(wanted.prompt_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": wanted.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": wanted.request_id,
            **NEUTRAL,
        }
        if sampling.stop_token_ids is not None:
            # without ignore_eos the base's own ids would end a completion, too
            body |= {"ignore_eos": True, "stop_token_ids": list(sampling.stop_token_ids)}
        return Call("POST", "/v1/completions", body)

    def read_sample(self, answer: Any, wanted: Wanted, base: str) -> Sampled:
        """One choice, of this request and of the adapter asked for."""
        said, identity = member(answer, "model"), str(member(answer, "id"))
        if said != (wanted.model or base):
            raise CallFailed(
                f"the answer is of model {shown(said)}, expected {wanted.model or base}"
            )
        choice = member(answer, "choices", 0)
        prompt_ids = checked_ids(member(choice, "prompt_token_ids"), "prompt_token_ids")
        if wanted.request_id not in identity or prompt_ids != wanted.prompt_ids:
            raise CallFailed(f"the answer {shown(identity)} belongs to another request")
        reason = member(choice, "finish_reason")
        if reason not in ("stop", "length"):
            raise CallFailed(f"the completion ended by {shown(reason)}, expected stop or length")
        sampled = Sampled(
            checked_ids(member(choice, "token_ids"), "token_ids"),
            checked_logprobs(member(choice, "logprobs", "token_logprobs"), "token_logprobs"),
            reason,
        )
        check_sample(sampled, wanted)
        if self._moe_layers is None:
            return sampled
        num_tokens = len(wanted.prompt_ids) + len(sampled.completion_ids)
        experts_TLA = _read_npy(member(choice, "routed_experts"))
        routed = moe_rows(experts_TLA, num_tokens, self._moe_layers)
        return sampled._replace(routed_experts=routed)

    def score(self, model: str | None, ids: Sequence[int], base: str, request_id: str) -> Call:
        """``prompt_logprobs``, which are at temperature 1 in every mode of the server."""
        body = {
            "model": model or base,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "request_id": request_id,
            **NEUTRAL,
        }
        return Call("POST", "/v1/completions", body)

    def read_scores(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """The entry of each token among those of its position."""
        entries = member(answer, "choices", 0, "prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise CallFailed(f"prompt_logprobs are {shown(entries)}, expected {len(ids)} entries")
        values = [
            member(entry, str(token), "logprob")
            for token, entry in zip(ids[1:], entries[1:], strict=True)
        ]
        return list(checked_logprobs(values, "prompt_logprobs"))

    def load(self, name: str, path: str) -> Call:
        """By path."""
        return Call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def read_load(self, answer: Any) -> None:
        """A 200 is enough: weights are on the device before it."""

    def unload(self, name: str) -> Call:
        """The name; the engine's slot is reused when another adapter needs it."""
        return Call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def is_loaded_already(self, failure: CallFailed) -> bool:
        """It says that the name has been loaded."""
        return failure.status == 400 and "already" in failure.reason

    def is_missing(self, failure: CallFailed, name: str) -> bool:
        """404 of a model that does not exist."""
        return failure.status == 404 and name in failure.reason

    def explain(self, failure: CallFailed, *, rank: int) -> str:
        """By what the server says."""
        return explained(failure, _CAUSES, rank)


def _read_npy(text: Any) -> np.ndarray:
    try:
        array = np.load(io.BytesIO(routing_bytes(text)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise CallFailed(f"routed_experts is no .npy file ({error})") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise CallFailed("routed_experts holds no integers")
    return array
