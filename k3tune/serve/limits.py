"""What a server takes on, and how it refuses the rest."""

from dataclasses import dataclass

from k3tune.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds of one server.

    Attributes:
        max_body_bytes: of a request.
        max_model_len: tokens of prompt and completion together.
        max_batch_size: rows that are sampled together.
        max_waiting: requests that may wait for a place; more are told to come back.
        max_adapters: adapters loaded at once.
        body_timeout_s: for a request's body to arrive.
        shutdown_timeout_s: for running requests to end once the server is told to stop.

    Raises:
        ConfigError: naming the first that is out of range.
    """

    max_body_bytes: int = 8 << 20
    max_model_len: int = 32768
    max_batch_size: int = 64
    max_waiting: int = 256
    max_adapters: int = 8
    body_timeout_s: float = 30.0
    shutdown_timeout_s: int = 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "body_timeout_s" else 1
            if value < least:
                raise ConfigError(f"{name} is {value!r}, expected at least {least}")


class Refused(Exception):
    """A request that is not served.

    Attributes:
        status: of HTTP.
        sentence: what was expected, what was got.
        retry_after_s: when to come back, where that may help.
    """

    def __init__(self, status: int, sentence: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after_s = status, sentence, retry_after_s
