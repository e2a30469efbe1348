"""Engines that are up and not asked stand still, so that they take nothing from the one that is.

An idle vLLM engine spins for a second after its last step, and its threads then wake some 1,300 times a second: with
both cores computing, an engine beside two idle ones took 49 s for what it does in 39 s alone.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil


def engines() -> set[psutil.Process]:
    """The processes of all engines that this process and those below it have started."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.startswith("VLLM::") for word in process.cmdline()):
                found.add(process)
    return found


class Engines:
    """Whose engines are up, by a name."""

    def __init__(self) -> None:
        self._of: dict[str, set[psutil.Process]] = {}

    def note(self, who: str) -> None:
        """All that came up since the last call are this one's."""
        self._of[who] = engines() - set().union(*self._of.values())

    @contextlib.contextmanager
    def only(self, who: str) -> Iterator[None]:
        """All engines but this one's stand still."""
        others = set().union(*(found for name, found in self._of.items() if name != who))
        try:
            _signal(others, signal.SIGSTOP)
            yield
        finally:
            _signal(others, signal.SIGCONT)


def _signal(processes: set[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
