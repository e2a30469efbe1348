"""Signals that end a command end it by an exception, so that what it was writing is put right."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does; one that is ignored (nohup) stays so."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, interrupt)
    except ValueError:
        pass  # Not the main thread: signals are the caller's business.
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
