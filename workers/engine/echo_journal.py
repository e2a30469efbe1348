"""Which requests the echo engine took up and finished, in a file that outlives any kill. For tests.

One line an event: `+` (taken up) or `=` (answered), monotonic seconds (one clock for all processes of a machine), and
the hash of the request's body. Processes may share a file: a line is one append.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import xxhash


class Event(NamedTuple):
    """One line."""

    kind: str
    at: float
    request: str


class Journal:
    """Appends to a file; what was written is there even when the process is killed a moment later."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def taken(self, body: bytes) -> None:
        """A request is in the engine."""
        self._note(b"+", body)

    def answered(self, body: bytes) -> None:
        """It has its answer."""
        self._note(b"=", body)

    def _note(self, kind: bytes, body: bytes) -> None:
        os.write(self._fd, b"%b %.3f %016x\n" % (kind, time.monotonic(), xxhash.xxh3_64_intdigest(body)))


def read(path: str) -> list[Event]:
    """All events so far, in the order of the file; none when there is no file."""
    try:
        with open(path, encoding="ascii") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        kind, at, request = line.split(" ")
        events.append(Event(kind, float(at), request))
    return events
