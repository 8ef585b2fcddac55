"""What can be wrong with a sample, under a name that reports can count."""

from enum import StrEnum

from k3tune.errors import K3TuneError


class Problem(StrEnum):
    """Why a sample cannot be trained on."""

    INVALID_JSON = "invalid JSON"
    UNKNOWN_FORM = "unknown form"
    INVALID_MESSAGE = "invalid message"
    ROLE_ORDER = "role out of order"
    INVALID_TOOL_JSON = "invalid tool JSON"
    TOO_LONG = "longer than max_length"
    NOTHING_TRAINED = "no trained token"


class DataError(K3TuneError):
    """A conversation, a sample or a data file is not what it must be."""

    def __init__(self, message: str, problem: Problem = Problem.INVALID_MESSAGE) -> None:
        super().__init__(message)
        self.problem = problem
