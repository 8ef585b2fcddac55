"""Before a run's first step: the servers' base must be the trainer's."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from k3tune.lora import disable_adapter
from k3tune.lora.inject import base_of
from k3tune.model.scoring import score_rows
from k3tune.rl.calibration import as_sampled

if TYPE_CHECKING:
    from k3tune.rl.grpo import K3GRPOTrainer

logger = logging.getLogger(__name__)

# prompts of the run, and the most tokens of each: another checkpoint shows in a few
_NUM_ROWS, _MOST_TOKENS = 4, 512


@runtime_checkable
class ServesBase(Protocol):
    """An engine with a base of its own; the local one samples from the trainer's."""

    def check_base(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        expected: Sequence[Sequence[float]],
    ) -> float:
        """See :meth:`k3tune.rl.engines.replicas.HttpEngine.check_base`."""


def check_served_base(trainer: "K3GRPOTrainer") -> None:
    """Score some of the run's prompts by both bases, without adapters.

    Every process must call it: those that share experts or a trunk run along.

    Args:
        trainer: at the start of a run, fresh or resumed.

    Raises:
        RolloutError: if the log-probabilities differ by more than numerics explain.
    """
    engine = trainer.engine
    if not isinstance(engine, ServesBase):
        return
    data = trainer.train_dataset
    numbers = range(min(_NUM_ROWS, len(data)))
    rows = [list(data[number]["input_ids"])[:_MOST_TOKENS] for number in numbers]
    with disable_adapter(trainer.model), as_sampled(trainer.model, trainer.rollout.activations):
        scores = score_rows(base_of(trainer.model), rows)
    expected = [[value for value in row if value is not None] for row in scores]
    apart = engine.check_base([(row[:1], row[1:]) for row in rows], expected)
    logger.info("the servers' base is the trainer's, within %.2e nats a token", apart)
