"""Shows a batch that is being followed: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common import say
from producers.batch_view import BatchView
from producers.cli import wording
from producers.following import Meter, Pace

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


def frame(seen: BatchView, pace: Pace) -> Group:
    """One picture of the bar; fits 80 columns."""
    total = seen.request_counts.total
    head = Text.assemble((seen.id, "bold"), "  ", wording.plain(seen.model), no_wrap=True, overflow="ellipsis")
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        ProgressBar(total=max(1, total), completed=seen.answered if total else 1),
        f"{seen.answered:,}/{total:,}  {wording.percent(seen):>3}%",
    )
    foot = Text(" · ".join([wording.status(seen), *wording.facts(seen, pace)]), no_wrap=True, overflow="ellipsis")
    why = wording.reason(seen)
    return Group(head, row, foot, *([Text(wording.plain(why), style="yellow")] if why else []))
