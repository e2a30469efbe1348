"""How long to wait before something is tried again."""

from __future__ import annotations

#: Seconds before the second attempt of a request.
RETRY_FIRST_S = 0.5
#: Seconds, at most, between two attempts of a request.
RETRY_MOST_S = 30.0
#: Seconds before a connection is tried again, first and at most.
RECONNECT_FIRST_S = 0.1
RECONNECT_MOST_S = 5.0


def retry_delay(attempt: int) -> float:
    """Seconds between attempt number `attempt`, which failed, and the next one."""
    return float(min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** (attempt - 1)))


class Reconnect:
    """Growing delays between attempts to reach a server that is away."""

    def __init__(self) -> None:
        self._next = RECONNECT_FIRST_S

    def failed(self) -> float:
        """Seconds to wait now."""
        delay, self._next = self._next, min(RECONNECT_MOST_S, self._next * 2)
        return delay

    def worked(self) -> None:
        """Start over."""
        self._next = RECONNECT_FIRST_S
