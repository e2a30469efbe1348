"""Shows a batch that is being followed: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from common import say
from producers.batch_view import BatchView
from producers.cli import wording
from producers.following import Meter

#: Seconds between two lines where there is no terminal and nothing but the numbers changed.
LINE_S = 5.0
#: Seconds between two lines where nothing changed at all: a log that goes silent looks like a hang.
SAME_S = 60.0


@contextlib.contextmanager
def display() -> Iterator[Callable[[BatchView], None]]:
    """Yields what shows a view, in the way that fits stderr."""
    if not sys.stderr.isatty():
        yield Lines(say.err).show
        return
    # Here, as it takes a terminal to need it: a command in a script starts without.
    from rich.live import Live

    from producers.cli.bar import frame

    meter = Meter()
    with Live(console=say.console(stderr=True), refresh_per_second=8, transient=True) as live:
        yield lambda seen: live.update(frame(seen, meter.add(seen, time.monotonic())))


class Lines:
    """A line when the status or the reason changes, every `LINE_S` while the numbers do, every `SAME_S` otherwise."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._meter = Meter()
        self._said: tuple[str, str | None, int] | None = None
        self._said_at = 0.0

    def show(self, seen: BatchView) -> None:
        """Say what is new, if it is time to."""
        now = self._clock()
        pace = self._meter.add(seen, now)
        state = (seen.status, seen.reason, seen.answered)
        turned = self._said is None or state[:2] != self._said[:2]
        if turned or now - self._said_at >= (SAME_S if state == self._said else LINE_S):
            self._write(wording.line(seen, pace))
            self._said, self._said_at = state, now
