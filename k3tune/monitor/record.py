"""What the monitor writes into a run's log: four kinds beside those of :mod:`k3tune.run_log`.

``r = logp_train - logp_rollout`` at a sampled token, both of the distribution tokens were drawn
from, in nats; ``w = e^r``. Only unmasked completion tokens count. A field is null where it does not
apply, and a number that is not finite is null too (its cause is in ``nan_count``). An *interval* is
``{"value", "low", "high"}``: an estimate and its 95 % bounds. Standard library only.

``floor``: once a run, when training starts.

- ``k3``, ``k3_token_mean``, ``abs_mean``: intervals of the mismatch with the adapter at B = 0, by
  a bootstrap over prompts.
- ``num_prompts``, ``num_samples``, ``num_tokens``: what it was measured on.
- ``key``: what it depends on: ``engine`` (the engine's numerics), ``trainer`` (the trainer's),
  ``base`` (a hash over the base's bytes), ``sampling``.
- ``parts``: interval of k3 by cause, :data:`PARTS`; null where not measured.
- ``router_mismatch``: interval of the share of (token, layer) whose expert sets differ, or null.
- ``by_probability``: as in ``mismatch``.
- ``reused``: read from the run's folder rather than measured; ``not_reused``: the sentence that
  says what differs, where there was one that did not fit; else null.
- ``alarm_rate``: chance of a false alarm in one clean step, as designed.

``mismatch``: every optimizer step, of all samples the step trained on.

- ``verdict``: one of :data:`VERDICTS`; ``excess``: k3 above the floor's value (nats), null where
  not calibrated; ``excess_ratio``: k3 over what the floor predicts for these tokens.
- ``attribution``: one of :data:`CAUSES`, or null at the floor; ``attribution_text``: a sentence;
  ``evidence``: name -> number, what the sentence rests on.
- ``ewma``: of the standardised step KL (an exponentially weighted mean); ``cusum``: the largest of
  its cumulative sums, each over its own limit; ``ewma_limit``, ``cusum_limit`` (1): a test fires
  above them.
- ``adapter_version`` (the trainer's), ``version_lag`` (largest of the samples),
  ``stale_samples``.
- ``num_samples``, ``num_tokens``; ``nan_count`` (tokens with a logprob that is not finite on either
  side: left out of everything below), ``clamp_count`` (tokens whose k3 was cut to [-10, 10]),
  ``clamp_count_sequence`` (samples whose summed r was cut to [-20, 20]), ``masked_fraction``
  (tokens the importance correction took out of the loss), ``truncated_fraction`` (whose ratio it
  cut).
- ``k3`` (mean of ``e^r - 1 - r`` a sample, then over samples: the headline, estimates
  KL(rollout || train)), ``k3_token_mean`` (over all tokens), ``k1`` (of -r), ``k2`` (of r^2 / 2),
  ``k1_token_mean``, ``k2_token_mean``, ``k3_reverse`` (of ``e^-r - 1 + r``: the other direction,
  explodes on one rare token), ``js`` (Jensen-Shannon).
- ``abs_mean``, ``abs_std``, ``abs_median``, ``abs_p95``, ``abs_max``: of |r|;
  ``mult_prob_error``: mean e^|r|.
- ``is_mean``, ``is_std``, ``is_min``, ``is_max``: of w; ``is_out_of_bounds``: share of w outside
  :data:`IS_BOUNDS`; ``is_sequence_mean``, ``_min``, ``_max``: of e^(sum r);
  ``is_geometric_mean``, ``_min``, ``_max``: of e^(mean r).
- ``ess`` and ``ess_sequence``: ``(sum w)^2 / (n sum w^2)`` over tokens, samples; ``chi2`` and
  ``chi2_sequence``: mean w^2 - 1.
- ``ppl_train``, ``ppl_rollout``: e^(-mean logp), tokens of all samples; ``ppl_ratio`` (train over
  rollout); ``log_ppl_diff`` and ``log_ppl_abs_diff``: over samples, train minus rollout.
- ``entropy``: mean of the trainer's distribution; ``kl_entropy_ratio``: k3_token_mean over it.
- ``router_mismatch`` (share of (token, layer)), ``router_mismatch_tokens`` (share of tokens with at
  least one such layer), ``router_overlap`` (mean share of common experts),
  ``router_mismatch_layers`` (a value a MoE layer, in order); null without the rollout's experts.
- ``histogram``: tokens by r, one count a bin of :data:`R_EDGES`, which is open at both ends: one
  more count than edges.
- ``scatter``: ``[[i, j, tokens], ...]``, the non-empty cells of -logp_train (i) by -logp_rollout
  (j), both in bins of :data:`SURPRISE_EDGES` (bin n starts at edge n, the last is open).
- ``by_probability``: ``tokens``, ``abs_mean`` and ``k3``, lists over bins of rollout probability
  (:data:`PROBABILITY_EDGES`, bin n from edge n to n + 1).
- ``by_position``: ``tokens`` and ``k3`` over buckets of the token's place in the completion,
  ``by_length``: ``samples`` and ``k3`` over buckets of the completion's length: bucket n is from
  2^n - 1 to 2^(n+1) - 2 for places (from 0), from 2^n to 2^(n+1) - 1 for lengths; lists end with
  the last bucket that is not empty.
- ``canary``: ``verdict`` (:data:`CANARY_VERDICTS`), ``engine_moved`` and ``trainer_moved`` (mean
  absolute change of a token's logprob since version 0), ``engine_step`` and ``trainer_step`` (since
  the version before), ``difference`` (mean |engine - trainer| now), ``floor`` (the same at version
  0), ``scale`` (the engine's change over the trainer's, least squares over the 95 % of the tokens
  that fit best) and ``scale_fit`` (R^2 of that); null without one.

``worst``: with every ``mismatch`` that has a token: ``tokens``, a list from the largest |r| down:
``sample`` (in the step), ``prompt`` (number of the prompt's group), ``position`` (in the
completion), ``token_id``, ``text`` (null without a tokenizer), ``context`` (text of the tokens
before it), ``logp_train``, ``logp_rollout``, ``r``.

``alarm``: when a test fires: ``alarm`` (:data:`ALARMS`), ``cause`` (of :data:`CAUSES`), ``text`` (a
sentence), ``value`` and ``limit``.
"""

VERDICTS = ("at floor", "above floor", "drifting", "not calibrated")
"""``above floor``: this step's KL alone is out of the floor's range; ``drifting``: a sequential
test over the steps so far fired."""

CAUSES = (
    "stale adapter",
    "adapter not applied",
    "adapter scale",
    "adapter rounding",
    "expert",
    "temperature",
    "top-p",
    "off-by-one",
    "routing flips",
    "activation precision",
    "not finite",
    "unexplained",
)
"""``expert``: a part of the adapter differs: the excess sits in the tokens of one expert, or the
canary moves nearly alike on both sides."""

ALARMS = ("kl", "drift", "temperature", "top-p", "off-by-one", "routing", "canary", "not finite")
"""The test that fired: the step's KL, the sequential tests, or one for a single cause."""

CANARY_VERDICTS = (
    "moved together",
    "nothing moved",
    "engine did not move",
    "trainer did not move",
    "differ",
)

PARTS = ("same_path", "decode_prefill", "mxfp8", "routing", "adapter_rounding")
"""Causes a floor is split by."""

IS_BOUNDS = (0.5, 2.0)

R_EDGES = tuple(
    sign * 10.0 ** (half / 2)
    for sign, halves in ((-1, range(2, -13, -1)), (1, range(-12, 3)))
    for half in halves
)
"""Half decades of |r| from 1e-6 to 10 on both sides of 0, 30 edges."""

SURPRISE_EDGES = (
    *(0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
)
"""Of -logp, nats."""

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
