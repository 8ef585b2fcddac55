"""What an excess over the floor comes from: cheap tests of closed form, each for one cause.

Every known cause leaves another trace in ``r = logp_train - logp_rollout``. To first order:

- a temperature T of one side alone makes r a multiple of ``logp + entropy``, by T - 1;
- a renormalised top-p of one side alone shifts r at uncertain tokens by the log of the kept mass,
  always to the same side and by at most ``-ln(top_p)``;
- log-probabilities off by one agree once one side is shifted by one token;
- a stale, absent or wrongly scaled adapter shows on the canary, whose scores move with nothing
  else;
- flipped routes leave the excess in the few tokens routed apart;
- one expert's missing factors leave it in the tokens that expert saw, whatever their entropy.

Shape letters: ``S`` samples, ``T`` tokens, ``N`` counted tokens, ``L`` MoE layers, ``E`` experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tune.monitor.binned import probability_bin
from k3tune.monitor.canary import CanaryCheck
from k3tune.monitor.estimators import k3_of, ratio_of
from k3tune.monitor.floor import Floor
from k3tune.monitor.routing import FAR_APART, token_overlap
from k3tune.monitor.samples import Bools, Floats, Samples
from k3tune.monitor.statistics import RESOLUTION, SIZE_CHARTS

# shares of the excess a cause must explain to be named
_SHARE_TEMPERATURE = 0.6
_SHARE_TOP_P = 0.4
_SHARE_ROUTING = 0.7
# Tokens with only equally routed ones before them have at most this share of the mean excess. On
# k3-nano they had 0.2 % with 1 % of the routes flipped, and 100 to 150 % with a stale or misscaled
# adapter, which flips routes as well.
_REST_ROUTING = 0.1
# below it a token is certain: no top-p cuts anything there
_UNCERTAIN_NATS = 0.1
_FEWEST_TOKENS = 8
# On k3-nano the largest of 160 experts scored up to 12 with a stale or misscaled adapter, and 10 to
# 27 with one expert's factors at zero. A canary whose sides differ by little of what they moved is
# neither, and lowers the bar to what chance does not reach with 82,000 experts.
_EXPERT_Z = 14.0
_EXPERT_Z_WITH_CANARY = 6.0
_LITTLE_MOVED = 0.25


@dataclass(frozen=True)
class Attribution:
    """A named cause.

    Attributes:
        cause: of :data:`k3tune.monitor.record.CAUSES`.
        text: a sentence for people.
        evidence: name -> number, what the sentence rests on.
    """

    cause: str
    text: str
    evidence: dict[str, float]


@dataclass(frozen=True)
class Excess:
    """A step's tokens beside what the floor expects of them.

    Attributes:
        samples: the step's.
        floor: the measured one.
        canary: what it said at this step, or None.
        version_lag: largest number of versions a sample is behind by its own account.
        fired: names of the charts whose tests fired: no trace is looked for in what may be noise.
        good: ``[S, T]``, counted tokens.
        r, k3, expected_k3: ``[N]``, of those.
    """

    samples: Samples
    floor: Floor
    canary: CanaryCheck | None
    version_lag: int
    fired: frozenset[str]
    good: Bools
    r: Floats
    k3: Floats
    expected_k3: Floats

    @classmethod
    def of(
        cls,
        samples: Samples,
        floor: Floor,
        canary: CanaryCheck | None,
        version_lag: int,
        fired: frozenset[str],
    ) -> "Excess":
        """Lay the tokens out."""
        good = samples.finite
        r = samples.log_ratio[good]
        expected = floor.expected.k3[probability_bin(samples.rollout[good])]
        return cls(samples, floor, canary, version_lag, fired, good, r, k3_of(r), expected)

    @property
    def is_large(self) -> bool:
        """Whether the mismatch itself left the floor, and not only a signed mean of it."""
        return not self.fired.isdisjoint(SIZE_CHARTS)

    @property
    def squares(self) -> float:
        """Sum of r^2 above the floor's (k3 is half of it for small r), at least a little."""
        above = float((self.r**2).sum() - 2 * self.expected_k3.sum())
        return max(above, RESOLUTION**2)


def attribute(excess: Excess) -> Attribution:
    """The first cause whose trace is there; ``unexplained`` if none is."""
    for test in _TESTS:
        found = test(excess)
        if found is not None:
            return found
    return Attribution(
        "unexplained",
        "no known cause leaves this trace: compare the kernels and options of engine and trainer",
        {},
    )


def off_by_one(samples: Samples) -> Attribution | None:
    """One side's log-probabilities belong to the neighbouring token."""
    good, r = samples.finite, samples.log_ratio
    if not good.any():
        return None
    apart = float(np.abs(r[good]).mean())
    both = good[:, 1:] & good[:, :-1]
    if both.sum() < _FEWEST_TOKENS or apart <= RESOLUTION:
        return None
    train, rollout = (np.where(good, side, 0.0) for side in (samples.train, samples.rollout))
    shifted = {
        1: float(np.abs(train[:, 1:] - rollout[:, :-1])[both].mean()),
        -1: float(np.abs(train[:, :-1] - rollout[:, 1:])[both].mean()),
    }
    shift = min(shifted, key=lambda step: shifted[step])
    if shifted[shift] > apart / 2:
        return None
    which = "of the token after" if shift == 1 else "of the token before"
    return Attribution(
        "off-by-one",
        f"the engine gives each token the log-probability {which} it: mean |r| is {apart:.1e} as "
        f"given and {shifted[shift]:.1e} shifted by one",
        {"abs_mean": apart, "abs_mean_shifted": shifted[shift]},
    )


def _not_finite(excess: Excess) -> Attribution | None:
    bad = int((excess.samples.mask & ~excess.good).sum())
    if not bad or excess.r.size >= bad:
        return None
    return Attribution(
        "not finite",
        f"{bad} tokens have a log-probability that is not finite",
        {"nan_count": float(bad)},
    )


def _off_by_one(excess: Excess) -> Attribution | None:
    return off_by_one(excess.samples)


def _canary(excess: Excess) -> Attribution | None:
    check = excess.canary
    if check is None or check.cause is None:
        return None
    names = ("engine_step", "trainer_step", "difference", "scale", "scale_fit")
    evidence = {name: check.record[name] for name in names if check.record[name] is not None}
    return Attribution(check.cause, check.text, evidence)


def _declared_lag(excess: Excess) -> Attribution | None:
    if excess.version_lag <= 0:
        return None
    return Attribution(
        "stale adapter",
        f"samples of this step came from an adapter up to {excess.version_lag} versions behind",
        {"version_lag": float(excess.version_lag)},
    )


def _temperature(excess: Excess) -> Attribution | None:
    if excess.samples.entropy is None or "slope" not in excess.fired:
        return None
    surprise = (excess.samples.train + excess.samples.entropy)[excess.good]
    squares = float((surprise**2).sum())
    if not squares:
        return None
    slope = float((excess.r * surprise).sum() / squares)
    share = slope**2 * squares / excess.squares
    if share < _SHARE_TEMPERATURE:
        return None
    hotter = "engine" if slope > 0 else "trainer"
    return Attribution(
        "temperature",
        f"r is {slope:+.3f} times logp + entropy: the {hotter}'s temperature is about "
        f"{1 + abs(slope):.2f} times the other side's, or one side applies none",
        {"slope": slope, "share": min(share, 1.0)},
    )


def _top_p(excess: Excess) -> Attribution | None:
    uncertain = _uncertain(excess)
    count = int(uncertain.sum())
    if count < _FEWEST_TOKENS or "bias" not in excess.fired:
        return None
    offset = float(excess.r[uncertain].mean())
    share = count * offset**2 / excess.squares
    if share < _SHARE_TOP_P:
        return None
    cut = "engine" if offset < 0 else "trainer"
    is_mean = float(ratio_of(excess.r).mean())
    return Attribution(
        "top-p",
        f"r is off by {offset:+.4f} on average at uncertain tokens and mean w is "
        f"{is_mean:.4f} instead of 1: the {cut} renormalises over a top-p (or "
        "top-k) the other side does not apply",
        {"offset": offset, "share": min(share, 1.0), "is_mean": is_mean},
    )


def _routing(excess: Excess) -> Attribution | None:
    overlap = token_overlap(excess.samples)
    if overlap is None or not (excess.is_large or "apart" in excess.fired):
        return None
    return _routed_below(excess, overlap, FAR_APART) or _routed_below(excess, overlap, 1.0)


def _routed_below(excess: Excess, overlap: Floats, limit: float) -> Attribution | None:
    """Whether the excess is that of tokens with less than ``limit`` of their experts in common."""
    apart = overlap < limit
    if not apart.any():
        return None
    # a flip reaches the tokens after it through the context
    reached = np.maximum.accumulate(apart, axis=1)
    if excess.samples.prompt_overlap is not None:
        reached = reached | (excess.samples.prompt_overlap < limit)[:, None]
    above = excess.k3 - excess.expected_k3
    apart_N, before_N = apart[excess.good], ~reached[excess.good]
    share = float(above[apart_N].sum() / max(float(above.sum()), RESOLUTION**2))
    told = int(before_N.sum()) >= _FEWEST_TOKENS
    if excess.is_large and told and above[before_N].mean() > _REST_ROUTING * above.mean():
        return None
    floor = excess.floor.router_mismatch
    # where the numerics flip routes as well, most tokens come after some flip
    scattered = limit == 1.0 and floor is not None and floor.value > 0
    explained = excess.is_large and share >= _SHARE_ROUTING
    if not explained and (scattered or (excess.is_large and not told)):
        return None
    tokens = float(apart_N.mean())
    others = "other experts" if limit == 1.0 else "mostly other experts"
    whose = f"{share:.0%} of the excess is theirs, and none is in tokens before the first of them"
    return Attribution(
        "routing flips",
        f"the engine routed {tokens:.1%} of the tokens to {others}: "
        + (whose if excess.is_large else "more than its numerics do"),
        {"tokens": tokens, "share": share},
    )


def _expert(excess: Excess) -> Attribution | None:
    if excess.samples.train_experts is None or excess.samples.entropy is None:
        return None
    z_LE, hits_LE = _expert_scores(excess)
    layer, expert = np.unravel_index(int(np.argmax(z_LE)), z_LE.shape)
    z = float(z_LE[layer, expert])
    if z < (_EXPERT_Z_WITH_CANARY if _differs_by_little(excess.canary) else _EXPERT_Z):
        return None
    return Attribution(
        "expert",
        f"the excess sits in the {int(hits_LE[layer, expert])} tokens of expert {expert} in MoE "
        f"layer number {layer} (from 0), at {z:.0f} standard errors: its factors differ",
        {"moe_layer": float(layer), "expert": float(expert), "z": z},
    )


def _adapter_part(excess: Excess) -> Attribution | None:
    """What only the canary sees: too small for the sampled tokens to say which expert it is."""
    check = excess.canary
    if check is None or not _differs_by_little(check):
        return None
    share = check.record["difference"] / check.record["trainer_moved"]
    return Attribution(
        "expert",
        f"engine and trainer move the canary alike up to {share:.1%}, more than their numerics "
        "explain: a part of the adapter differs, such as one expert's factors",
        {"share": share},
    )


def _adapter_rounding(excess: Excess) -> Attribution | None:
    check = excess.canary
    if check is None or check.record["verdict"] != "moved together":
        return None
    record = check.record
    if record["difference"] <= 2 * record["floor"] + RESOLUTION:
        return None
    share = record["difference"] / record["trainer_moved"]
    return Attribution(
        "adapter rounding",
        f"the canary moved together up to {share:.1%} of the way: the engine rounds the adapter's "
        "factors, which no floor measured at B = 0 holds",
        {"share": share},
    )


def _activation_precision(excess: Excess) -> Attribution | None:
    part = excess.floor.parts.get("mxfp8")
    if part is None or part.low <= excess.floor.k3.high or not excess.is_large:
        return None
    k3 = float(excess.k3.mean())
    if not part.low / 2 <= k3 <= part.high * 2:
        return None
    return Attribution(
        "activation precision",
        f"k3 is {k3:.1e}, and MXFP8 activations on one side alone were measured at {part.low:.1e} "
        f"to {part.high:.1e}: one side rounds them and the other does not",
        {"k3": k3, "part": part.value},
    )


_TESTS: tuple[Callable[[Excess], Attribution | None], ...] = (
    _not_finite,
    _off_by_one,
    _canary,
    _declared_lag,
    _temperature,
    _top_p,
    _routing,
    _expert,
    _adapter_part,
    _adapter_rounding,
    _activation_precision,
)


def _differs_by_little(check: CanaryCheck | None) -> bool:
    if check is None or check.record["verdict"] != "differ":
        return False
    return bool(check.record["difference"] < _LITTLE_MOVED * check.record["trainer_moved"])


def _uncertain(excess: Excess) -> Bools:
    if excess.samples.entropy is not None:
        return excess.samples.entropy[excess.good] > _UNCERTAIN_NATS
    return np.exp(excess.samples.rollout[excess.good]) < 1 - _UNCERTAIN_NATS


def _expert_scores(excess: Excess) -> tuple[Floats, Any]:
    """How many standard errors log|r| of each expert's tokens is above that of all others.

    What entropy explains of log|r| is taken out first: experts of uncertain tokens would stand out
    under any fault.
    """
    assert excess.samples.train_experts is not None and excess.samples.entropy is not None
    experts_NLA = excess.samples.train_experts[excess.good]
    size = np.log(np.abs(excess.r) + _LOG_FLOOR)
    entropy = np.log(excess.samples.entropy[excess.good] + _ENTROPY_FLOOR)
    design = np.stack([np.ones_like(entropy), entropy, entropy**2], axis=1)
    rest_N = size - design @ np.linalg.lstsq(design, size, rcond=None)[0]
    num_tokens, num_layers = experts_NLA.shape[:2]
    num_experts = int(experts_NLA.max()) + 1
    hits, sums = (np.zeros((num_layers, num_experts)) for _ in range(2))
    for layer in range(num_layers):
        chosen = experts_NLA[:, layer]
        hits[layer] = np.bincount(chosen.ravel(), minlength=num_experts)
        weights = np.repeat(rest_N, chosen.shape[1])
        sums[layer] = np.bincount(chosen.ravel(), weights=weights, minlength=num_experts)
    others = np.maximum(num_tokens - hits, 1)
    # the rest has mean 0, so the others' sum is minus theirs
    difference = sums / np.maximum(hits, 1) + sums / others
    spread = rest_N.std() * np.sqrt(1 / np.maximum(hits, 1) + 1 / others)
    z = np.where(hits >= _FEWEST_TOKENS, difference / np.maximum(spread, _LOG_FLOOR), 0.0)
    return z, hits


# an r of 0 has a logarithm too; far below what fp32 resolves
_LOG_FLOOR = 1e-7
_ENTROPY_FLOOR = 1e-4
