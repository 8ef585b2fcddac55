"""What SGLang's server speaks.

The server must run with ``--enable-lora``, data-parallel size 1 and, for samples that follow their
seeds, ``--enable-deterministic-inference``. Adapters go by path: the server must see the folder
under the same name. Its tensor endpoint unpickles what it is sent, and is never used.
"""

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

_NEUTRAL = {
    **NEUTRAL,
    "skip_special_tokens": False,
    "no_stop_trim": True,
}
# its seeds are 32-bit on some paths
_SEED_MASK = 2**31 - 1
_ID_BYTES = 4
_CAUSES = (
    (r"lora is not enabled|enable.lora|not found$", "start the server with --enable-lora"),
    (
        r"max.lora.rank|with rank",
        "the adapter's rank is {rank}: raise --max-lora-rank of the server, or lower lora_rank",
    ),
    (
        r"target.modules|unsupported",
        "the server does not adapt all of its modules: add them to --lora-target-modules, or "
        "export with k3tune export --format sglang --drop",
    ),
    (r"dp_size", "start the server with data-parallel size 1, and more servers instead"),
)


class SglangDialect:
    """Calls and answers of SGLang 0.5.23.

    Args:
        moe_layers: zero-based MoE layers of the base, to read ``routed_experts`` (the server needs
            ``--enable-return-routed-experts``); None does not ask for them.
        num_experts_per_token: of the base, to read them.
    """

    name = "sglang"

    def __init__(
        self, *, moe_layers: Sequence[int] | None = None, num_experts_per_token: int | None = None
    ) -> None:
        assert moe_layers is None or num_experts_per_token, f"{num_experts_per_token=}"
        self._moe_layers, self._width = moe_layers, num_experts_per_token or 0

    def facts_calls(self) -> tuple[Call, ...]:
        """Health, models and version."""
        return (Call("GET", "/health"), Call("GET", "/v1/models"), Call("GET", "/server_info"))

    def read_facts(self, answers: Sequence[Any]) -> ServerFacts:
        """The first model is the base."""
        _, models, info = answers
        numerics = {}
        if isinstance(info, dict):
            kept = ("version", "dtype", "quantization", "attention_backend", "moe_runner_backend")
            numerics = {key: info[key] for key in kept if key in info}
        return ServerFacts(str(member(models, "data", 0, "id")), numerics)

    def sample(self, wanted: Wanted, base: str) -> Call:
        """``/generate`` with ids in and out."""
        sampling = wanted.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "sampling_seed": wanted.seed & _SEED_MASK,
            **_NEUTRAL,
        }
        if sampling.stop_token_ids is not None:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        body = {
            "rid": wanted.request_id,
            "input_ids": list(wanted.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
            "lora_path": wanted.model,
        }
        if self._moe_layers is not None:
            body["return_routed_experts"] = True
        if _renormalises(wanted):
            body["return_sampling_mask"] = True
        return Call("POST", "/generate", body)

    def read_sample(self, answer: Any, wanted: Wanted, base: str) -> Sampled:
        """Ids come with their logprobs; ``output_ids`` must begin as these do."""
        meta = member(answer, "meta_info")
        prompt_ids = checked_ids(member(answer, "prompt_token_ids"), "prompt_token_ids")
        if member(meta, "id") != wanted.request_id or prompt_ids != wanted.prompt_ids:
            raise CallFailed(f"the answer {shown(meta['id'])} belongs to another request")
        reason = member(meta, "finish_reason", "type")
        if reason not in ("stop", "length"):
            raise CallFailed(f"the completion ended by {shown(reason)}, expected stop or length")
        logprobs, ids = _pairs(member(meta, "output_token_logprobs"), "output_token_logprobs")
        if _renormalises(wanted):
            if "output_token_sampling_logprobs" not in meta:
                raise CallFailed(
                    "the answer has no output_token_sampling_logprobs, and its other ones leave "
                    "out top-p and top-k: sample with top_p 1 and top_k 0, or a newer server",
                    again=False,
                )
            logprobs = _sampling_logprobs(meta["output_token_sampling_logprobs"])
        said = checked_ids(member(answer, "output_ids"), "output_ids")
        # some versions take the stop token off
        if said not in (ids, ids[:-1]):
            raise CallFailed(f"output_ids {shown(said)} are not those of the log-probabilities")
        sampled = check_sample(Sampled(ids, logprobs, reason), wanted)
        if self._moe_layers is None:
            return sampled
        num_tokens = len(wanted.prompt_ids) + len(ids)
        experts_TLA = self._read_experts(meta.get("routed_experts"), num_tokens)
        return sampled._replace(routed_experts=moe_rows(experts_TLA, num_tokens, self._moe_layers))

    def score(self, model: str | None, ids: Sequence[int], base: str, request_id: str) -> Call:
        """Logprobs of the input, at temperature 1."""
        body = {
            "rid": request_id,
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, **_NEUTRAL},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": model,
        }
        return Call("POST", "/generate", body)

    def read_scores(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """All but the first, which nothing precedes."""
        entries = member(answer, "meta_info", "input_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise CallFailed(
                f"input_token_logprobs are {shown(entries)}, expected {len(ids)} entries"
            )
        logprobs, scored = _pairs(entries[1:], "input_token_logprobs")
        if list(scored) != list(ids[1:]):
            raise CallFailed("input_token_logprobs are those of other ids")
        return list(logprobs)

    def load(self, name: str, path: str) -> Call:
        """By path."""
        return Call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def read_load(self, answer: Any) -> None:
        """``success`` must be true, also in a 200."""
        if member(answer, "success") is not True:
            raise CallFailed(str(answer.get("error_message") or shown(answer)), again=False)

    def unload(self, name: str) -> Call:
        """Returns once the requests that use it have ended."""
        return Call("POST", "/unload_lora_adapter", {"lora_name": name})

    def is_loaded_already(self, failure: CallFailed) -> bool:
        """It says that the name is loaded."""
        return "already loaded" in failure.reason

    def is_missing(self, failure: CallFailed, name: str) -> bool:
        """400 of adapters that are not loaded."""
        return failure.status == 400 and "not loaded" in failure.reason and name in failure.reason

    def explain(self, failure: CallFailed, *, rank: int) -> str:
        """By what the server says."""
        return explained(failure, _CAUSES, rank)

    def _read_experts(self, text: Any, num_tokens: int) -> np.ndarray:
        content = routing_bytes(text)
        row_bytes = (num_tokens - 1) * self._width * _ID_BYTES
        if not content or len(content) % row_bytes:
            raise CallFailed(
                f"routed_experts has {len(content)} bytes, expected a multiple of {row_bytes}, for "
                f"{num_tokens - 1} tokens and {self._width} experts a token"
            )
        return np.frombuffer(content, dtype="<i4").reshape(num_tokens - 1, -1, self._width)


def _renormalises(wanted: Wanted) -> bool:
    """Whether the drawn-from distribution is less than the whole vocabulary."""
    return wanted.sampling.top_p < 1 or wanted.sampling.top_k > 0


def _pairs(entries: Any, what: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Logprobs and ids of ``[[logprob, id, text or null], ...]``."""
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) >= 2 for entry in entries
    ):
        raise CallFailed(f"{what} are {shown(entries)}, expected [logprob, id, text] a token")
    logprobs = checked_logprobs([entry[0] for entry in entries], what)
    return logprobs, checked_ids([entry[1] for entry in entries], what)


def _sampling_logprobs(entries: Any) -> tuple[float, ...]:
    """One a token, alone or as the first of a list."""
    what = "output_token_sampling_logprobs"
    if isinstance(entries, list):
        entries = [entry[0] if isinstance(entry, list) and entry else entry for entry in entries]
    return checked_logprobs(entries, what)
