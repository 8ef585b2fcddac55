"""Why a run that had started was stopped."""

from k3tune.errors import K3TuneError


class TrainingError(K3TuneError):
    """A step cannot be taken: the loss is not finite, or nothing of a batch is trained."""
