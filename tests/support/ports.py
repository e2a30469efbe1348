"""Free loopback ports and waiting for a condition that sends no event."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout: float, what: str, every: float = 0.05) -> None:
    """Ask until `condition()` holds; `AssertionError` with `what` after `timeout` seconds.

    For what can only be asked (a port that opens, a queue that drains); where a line or an event can be waited for,
    wait for that.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still not: {what}")
        time.sleep(every)


def port_open(port: int) -> bool:
    """True when somebody listens on the loopback port."""
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0
