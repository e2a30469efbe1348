"""One clock for all that share a Redis broker: the server's.

kombu notes on every delivery when it was made, by the clock of the machine that took it, and any client puts back what
is older than the visibility timeout by its own clock. So one machine whose clock is ten minutes off has its messages
delivered to others while it works on them (slow clock), or takes everybody else's (fast clock), over and over.
"""

from __future__ import annotations

import time
from typing import Any

from kombu.transport import redis as transport

#: The server's clock minus ours, in seconds.
_offset = 0.0


def now() -> float:
    """Unix seconds by the clock of the Redis followed last; by ours before that."""
    return time.time() + _offset


def follow(client: Any) -> None:
    """Set `now` by the server that a redis-py client is connected to; one round trip, whose half is the error."""
    global _offset
    before = time.time()
    seconds, microseconds = client.time()
    _offset = seconds + microseconds / 1e6 - (before + time.time()) / 2


def install() -> None:
    """Let kombu's Redis transport go by `now`; may be called again."""
    transport.time = now
