"""Shows how far a large file is read, on a terminal and only when it takes a while."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from common import collector, say

#: Is called with the bytes (as stored) and the lines read so far.
Progress = Callable[[int, int], None]

#: Seconds before anything is shown: a bar that flashes up for a small file says nothing.
PATIENCE_S = 0.5


@contextlib.contextmanager
def reading(source: str) -> Iterator[Progress | None]:
    """Yields what intake reports to, or None where nobody would see it."""
    collector.keep()
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("reading"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[lines]:,} requests"),
    )
    bar = Progress(*columns, console=say.console(stderr=True), transient=True, expand=True)
    task = bar.add_task("reading", total=size_of(source), lines=0)
    began = time.monotonic()

    def show(bytes_read: int, lines: int) -> None:
        bar.update(task, completed=bytes_read, lines=lines)
        if not bar.live.is_started and time.monotonic() - began > PATIENCE_S:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def size_of(source: str) -> int | None:
    """Bytes of a local file; None where that is not known beforehand (stdin, a pipe, a URL)."""
    try:
        return os.stat(source).st_size or None
    except OSError:
        return None
