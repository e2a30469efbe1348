"""`python -m tests.support.kill_points POINT:N[:half] coordinate …`: a `producers` command that dies at a chosen call.

The process is ended with SIGKILL at its N-th call of a function that makes something last: right before it, right
after it (`POINT+:N`), or, for a write, with half of the bytes written. Nothing of the product knows about this.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

#: What can be asked for: where the function is looked up, and its name there.
POINTS = {
    "append": ("os", "pwritev"),
    "header": ("os", "pwrite"),
    "log-sync": ("os", "fdatasync"),
    "sync": ("os", "fsync"),
    "rename": ("os", "replace"),
    "create": ("os", "link"),
    "remove": ("os", "unlink"),
    "ack": ("kombu.message", "Message.ack"),
}


def die() -> None:
    """As `kill -9` does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(spec: str) -> None:
    """Let this process die at the point that `spec` names."""
    name, number, *half = spec.split(":")
    after = name.endswith("+")
    where, attribute = POINTS[name.removesuffix("+")]
    owner: Any = __import__(where, fromlist=["_"])
    *path, attribute = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, attribute, _dying(getattr(owner, attribute), int(number), after=after, half=bool(half)))


def _dying(real: Callable[..., Any], number: int, *, after: bool, half: bool) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return real(*args, **named)
        if half:
            fd, buffers, offset = args
            data = b"".join(buffers)
            os.pwrite(fd, data[: len(data) // 2], offset)
        if after:
            real(*args, **named)
        die()

    return call


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from producers.__main__ import main

    main()
