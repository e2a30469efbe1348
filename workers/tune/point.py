"""One point of a sweep, in a process of its own: an engine with these numbers answers the sample.

`python -m workers.tune.point` reads a `Wanted` as JSON on stdin and prints a `Measured` on its last line of stdout. A
process of its own, because an engine that does not fit may take its process with it, and because only an end gives all
of its memory back.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from pathlib import Path

import msgspec

from common import logs
from common import registry as registries
from common import settings as setting_files
from common.errors import BatchmillError
from common.messages import Kind
from common.registry import ModelVersion
from workers import parent
from workers.attempt import Tried
from workers.credit import grown, shrunk
from workers.engine import echo
from workers.engine.base import Engine
from workers.engine_thread import EngineThread
from workers.lane import Lane
from workers.tune import sample

#: Seconds between looks at the engine's gauges.
LOOK_S = 0.1
#: Stands before the result on stdout, where libraries may print too.
RESULT = "measured "


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What is tried. `chunk`: requests of a chunk; 0: as the coordinator would size them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk: int = 0


class Wanted(msgspec.Struct, kw_only=True):
    """A point to measure."""

    model: str
    numbers: Numbers
    sample: str
    requests: int


class Measured(msgspec.Struct, kw_only=True):
    """What came of it; `problem` says in one line why there is nothing."""

    numbers: Numbers
    start_s: float = 0.0
    seconds: float = 0.0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: The highest share of the KV cache that was in use.
    kv_usage: float = 0.0
    preempted: int = 0
    #: Mean share of `max_num_seqs` that ran.
    occupancy: float = 0.0
    problem: str | None = None

    @property
    def requests_per_s(self) -> float:
        """Answers a second."""
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens a second."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


class _Chunk:
    """Requests that come and end together, as in a worker; see `workers.lane.Work`."""

    isolated = 0
    ahead = False

    def __init__(self, rows: list[tuple[int, bytes]], timeout_s: float, run: _Run) -> None:
        self._rows = rows
        self._run = run
        self.timeout_s = timeout_s
        self.left = len(rows)

    def request(self, row: int) -> tuple[int, bytes] | None:
        """See `lane.Work`."""
        return self._rows[row]

    def flight(self, row: int) -> None:
        """Every request is computed: shared answers would say nothing of the engine."""

    def alone(self, row: int) -> None:
        """Never happens, since nothing is shared."""

    def finish(self, row: int, tried: Tried, **_: bool) -> None:
        """See `lane.Work`."""
        self._rows[row] = (0, b"")  # Its body is done with.
        self.left -= 1
        self._run.finished(tried, self.left == 0)

    def names(self, row: int) -> tuple[int, bytes, int]:
        """See `lane.Work`."""
        return -1, b"", row


class _Run:
    """Feeds the lane as a worker's consumer does: K chunks, and more while those cannot keep the engine full.

    On the engine's loop.
    """

    def __init__(self, thread: EngineThread, rows: list[tuple[int, bytes]], chunk: int, base: int, timeout_s: float):
        self._lane = Lane(thread, self._low)
        self._engine = thread.engine
        self._waiting = [_Chunk(rows[at : at + chunk], timeout_s, self) for at in range(0, len(rows), chunk)][::-1]
        self._base = self._allowed = base
        self._held = 0
        self._left = len(rows)
        self._done = asyncio.Event()
        self.tried: list[Tried] = []

    async def run(self, measured: Measured) -> None:
        """Answer everything; fills in the figures."""
        looks: list[int] = []
        started = time.monotonic()
        self._fill()
        while not self._done.is_set():
            stats = self._engine.stats()
            looks.append(stats.running)
            measured.kv_usage = max(measured.kv_usage, stats.kv_usage)
            try:
                await asyncio.wait_for(self._done.wait(), LOOK_S)
            except TimeoutError:
                continue
        measured.seconds = time.monotonic() - started
        measured.preempted = self._engine.stats().preempted
        measured.occupancy = sum(looks) / len(looks) / self._engine.facts().max_num_seqs
        for tried in self.tried:
            answered = tried.outcome.kind is Kind.OUTPUT
            measured.answered += answered
            measured.failed += not answered
            measured.prompt_tokens += tried.outcome.prompt_tokens
            measured.completion_tokens += tried.outcome.completion_tokens

    def finished(self, tried: Tried, ended: bool) -> None:
        """A row is done, and with it, perhaps, its chunk."""
        self.tried.append(tried)
        self._left -= 1
        if ended:
            self._held -= 1
            self._allowed = shrunk(self._allowed, self._base, self._lane.outstanding, self._lane.limit)
            self._fill()
        if not self._left:
            self._done.set()

    def _low(self) -> None:
        self._allowed = grown(self._allowed, self._held, self._lane.outstanding, self._lane.limit)
        self._fill()

    def _fill(self) -> None:
        while self._held < self._allowed and self._waiting:
            chunk = self._waiting.pop()
            self._held += 1
            self._lane.enter(chunk, range(chunk.left))


def measure(wanted: Wanted) -> Measured:
    """Start the engine, answer the sample, stop it. What keeps an engine from starting becomes the `problem`."""
    settings = setting_files.load()
    numbers, measured = wanted.numbers, Measured(numbers=wanted.numbers)
    entry = with_numbers(registries.load().get(wanted.model), numbers)
    rows = sample.read(Path(wanted.sample), wanted.requests)
    # The entry's numbers count here, whatever the fleet's settings say of all models.
    settings = msgspec.structs.replace(settings, inference=msgspec.structs.replace(settings.inference, batch_size=None))
    least = math.ceil(1.1 * numbers.max_num_seqs / (settings.inference.chunks_in_flight - 1))
    chunk = numbers.chunk or max(settings.scheduler.chunk_requests, least)

    def make() -> Engine:
        if settings.inference.engine == "echo":
            return echo.EchoEngine(wanted.model, entry, settings)
        from workers.engine.vllm import VllmEngine

        return VllmEngine(wanted.model, entry, settings)

    deaths: list[str] = []
    started = time.monotonic()
    thread = EngineThread(make, deaths.append)
    try:
        thread.start()
    except BatchmillError as exc:
        measured.problem = str(exc)
        return measured
    measured.start_s = time.monotonic() - started

    async def run() -> None:
        answering = asyncio.ensure_future(
            _Run(thread, rows, chunk, settings.inference.chunks_in_flight, settings.inference.request_timeout_s).run(
                measured
            )
        )
        while not answering.done() and not deaths:
            await asyncio.wait((answering,), timeout=1.0)
        if deaths:
            answering.cancel()
            measured.problem = deaths[0]
        else:
            answering.result()

    thread.submit(run()).result()
    thread.stop(30)
    if measured.problem is None and not measured.answered:
        measured.problem = f"none of {measured.failed} requests was answered"
    return measured


def with_numbers(entry: ModelVersion, numbers: Numbers) -> ModelVersion:
    """The entry with these numbers in place of its own, however it spells them."""
    kept = {k: v for k, v in entry.engine.items() if k.replace("-", "_") not in NAMES}
    return msgspec.structs.replace(entry, engine=kept | {name: getattr(numbers, name) for name in NAMES})


#: The engine arguments that are tuned.
NAMES = ("max_num_seqs", "max_num_batched_tokens")


def main() -> None:
    """See the module."""
    parent.die_with_supervisor()
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted)
    logs.configure(setting_files.load().telemetry, "tune")
    try:
        measured = measure(wanted)
    except BatchmillError as exc:
        measured = Measured(numbers=wanted.numbers, problem=str(exc))
    sys.stdout.write(f"{RESULT}{msgspec.json.encode(measured).decode()}\n")
    sys.stdout.flush()
    # The engine has stopped; a library's thread that has not must not keep the sweep waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
