"""A worker that writes down how full its engine is: `python -m benchmarks.sampled_worker start …`, as `workers start`.

It is the ordinary worker; beside it a thread appends a line `SECONDS RUNNING OUTSTANDING FINISHED` every `LOOK_S` to
the file that `BENCHMARK_SAMPLES` names. Of `Node` and `ChunkWork` it only reads.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from workers import chunk, cli, node
from workers.attempt import Tried

LOOK_S = 0.05


class Sample(NamedTuple):
    """A look at an engine. `outstanding`: inside it or before it in the worker; `finished`: since it started."""

    at: float
    running: int
    outstanding: int
    finished: int


class Sampler(threading.Thread):
    """Writes samples until it is closed, or the process ends."""

    def __init__(self, path: Path, running: Callable[[], int], outstanding: Callable[[], int]) -> None:
        super().__init__(name="sampler", daemon=True)
        self._path = path
        self._running = running
        self._outstanding = outstanding
        self._ended = threading.Event()
        self.finished = 0

    def run(self) -> None:
        """See the class."""
        with open(self._path, "a", encoding="ascii", buffering=1) as file:
            while True:
                file.write(f"{time.monotonic():.3f} {self._running()} {self._outstanding()} {self.finished}\n")
                if self._ended.wait(LOOK_S):
                    return

    def close(self) -> None:
        """Take no more samples."""
        self._ended.set()
        self.join()


def read(path: Path) -> list[Sample]:
    """The samples of a file."""
    found = []
    for line in path.read_text("ascii").splitlines():
        at, running, outstanding, finished = line.split()
        found.append(Sample(float(at), int(running), int(outstanding), int(finished)))
    return found


def occupancy(samples: list[Sample], requests: int, max_num_seqs: int) -> tuple[float, float]:
    """Mean share of the engine's places that ran something, and seconds it is taken over.

    From the first running request until `max_num_seqs` of `requests` are left: from then on no schedule can keep all
    places taken.
    """
    begun = next(i for i, s in enumerate(samples) if s.running)
    start = samples[begun].finished
    looked = [s for s in samples[begun:] if s.finished - start <= requests - max_num_seqs]
    return sum(min(s.running, max_num_seqs) for s in looked) / len(looked) / max_num_seqs, looked[-1].at - looked[0].at


def main() -> None:
    """See the module."""
    path = Path(os.environ["BENCHMARK_SAMPLES"])
    samplers: list[Sampler] = []
    open_lane, finish = node.Node.open_lane, chunk.ChunkWork.finish

    @functools.wraps(open_lane)
    def opened(self: node.Node) -> None:
        open_lane(self)
        sampler = Sampler(path, lambda: self.thread.engine.stats().running, lambda: self.outstanding)
        samplers.append(sampler)
        sampler.start()

    @functools.wraps(finish)
    def finished(self: chunk.ChunkWork, row: int, tried: Tried, *, shared: bool = False) -> None:
        finish(self, row, tried, shared=shared)
        samplers[0].finished += 1

    node.Node.open_lane = opened  # type: ignore[method-assign]
    chunk.ChunkWork.finish = finished  # type: ignore[method-assign]
    sys.argv[0] = "workers"
    cli.main()


if __name__ == "__main__":
    main()
