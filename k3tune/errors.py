"""Errors a user can cause: each says what was expected, what was found, and what to do."""


class K3TuneError(ValueError):
    """Base of the errors below; ``k3tune`` on the command line prints its message alone."""


class ConfigError(K3TuneError):
    """A model config, a recipe option or a combination of options is not usable."""


class CheckpointError(K3TuneError):
    """A checkpoint's files disagree with its config, its index or each other."""


class QuantizationError(K3TuneError):
    """Packed bytes and scales do not describe a weight."""


class AdapterError(K3TuneError):
    """An adapter's files or options do not fit the base they are meant for."""


class RolloutError(K3TuneError):
    """An engine cannot sample, lost samples, or serves another adapter than it was told to."""
