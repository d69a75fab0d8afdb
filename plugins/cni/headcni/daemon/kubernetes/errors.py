"""Why the API server could not be asked, or what it refused."""

from __future__ import annotations

from ...errors import IO_FAILURE, CniError

# Why a KubeError was raised.
CONFIG, NO_ANSWER, DENIED, GONE, MISSING, REFUSED, STOPPED = (
    "config",
    "no-answer",
    "denied",
    "gone",
    "missing",
    "refused",
    "stopped",
)


class KubeError(CniError):
    """The API server cannot be asked, or refused. `kind` is one of the words above."""

    def __init__(self, kind: str, msg: str, details: str = "", retry_after: float = 0.0) -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind
        self.retry_after = retry_after


def not_understood(why: str) -> KubeError:
    return KubeError(REFUSED, "the API server's answer cannot be understood", why)


def stopped() -> KubeError:
    return KubeError(STOPPED, "the daemon is stopping")
