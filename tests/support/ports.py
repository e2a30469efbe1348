"""Loopback ports of our own, and waiting for a condition that sends no event."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds that a wait lasts at least before it fails. A deadline ends a test that is broken, it measures nothing: on a
#: busy machine a process may get no turn for many seconds.
PATIENCE_S = 60.0

#: The kernel gives ports from here on to whoever connects somewhere, so nobody can hold one of them free.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_240
_RESERVED: list[int] = []


def free_port(*offsets: int) -> int:
    """A port that is this process's until it ends; so are those `offsets` above it.

    Reserved by a lock on a file of its number, which all test processes of this machine share: two of them never get
    the same one, though neither listens on it yet.
    """
    folder = Path(tempfile.gettempdir()) / f"batchmill-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    chance = random.SystemRandom()
    highest = _highest()
    while True:
        port = chance.randrange(_LOWEST, highest - max(offsets, default=0))
        if all(_reserve(folder, port + offset) for offset in (0, *offsets)):
            return port


def _highest() -> int:
    with contextlib.suppress(OSError, ValueError):
        first = int(_EPHEMERAL.read_text().split()[0])
        if first > _LOWEST + 5_000:
            return first
    return 32_768


def _reserve(folder: Path, port: int) -> bool:
    file = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
    except OSError:
        os.close(file)
        return False
    # Open, and so locked, for as long as this process lives.
    _RESERVED.append(file)
    return True


def wait_until(
    condition: Callable[[], bool], timeout: float, what: str | Callable[[], str], every: float = 0.05
) -> None:
    """Ask until `condition()` holds; `AssertionError` with `what` after `timeout` seconds, or `PATIENCE_S` if more.

    For what can only be asked (a port that opens, a queue that drains); where a line or an event can be waited for,
    wait for that. A `what` to be called says how things stand in the end.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > max(timeout, PATIENCE_S):
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"after {time.monotonic() - began:.0f} s still not: {said}")
        time.sleep(every)


def port_open(port: int) -> bool:
    """True when somebody listens on the loopback port."""
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0
