"""A control: rewards of a step handed out in random order, so that nothing can be learnt from them.

For ``recipes/grpo.py --rewards scripts/shuffled_reward.py:shuffled_match``. If a policy gets better
with these, the gain of the real rewards is not theirs.
"""

import random
from typing import Any

from k3tune.rl.rewards import exact_match


def shuffled_match(*, trainer_state: Any, **columns: Any) -> list[float]:
    """``exact_match``, in an order that depends on the step alone."""
    rewards = exact_match(**columns)
    random.Random(trainer_state.global_step).shuffle(rewards)
    return rewards
