"""A fleet in simulated time: the coordinator's real book, packing and fair queue, and workers that are arithmetic.

A worker's engine runs up to `SEQS` requests at a time, first come first served, each step giving every one of them a
token; a step takes longer the more of them there are, and reading a prompt takes time of its own, without the prefix
that the worker's KV cache has. Beside the engine a worker behaves as `workers/` does: K chunks
at a time, more while fewer requests are here than keep the engine full, results sent by 256 or every 2 s.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.live import WorkerFacts
from common.messages import VERSION, Kind, Part, Results, Usage
from common.settings import Scheduler
from producers.batch import Batch
from producers.coordinator import losses, packing, sticky, stragglers
from producers.coordinator.book import Book
from producers.coordinator.capacity import capacity
from producers.coordinator.lanes import Outstanding
from producers.coordinator.packing import Wait
from producers.coordinator.records import Dispatch, Lost, sent_slice
from producers.coordinator.weights import Weights

MODEL = "simulated@1"
#: Requests in an engine at a time.
SEQS = 256
#: Chunks a worker has at a time, and the most it takes while its engine runs low.
CHUNKS, MOST_CHUNKS = 3, 32
#: Seconds of an engine's step: with nothing in it, and more for each request. 256 requests: 26 ms, 9,850 tokens/s.
STEP_S, STEP_MORE_S = 0.008, 0.00007
#: Seconds in which an engine reads a token of a prompt: 50,000 tokens/s.
READ_S = 0.00002
#: Seconds from one process to another, and of the coordinator's one dispatching thread for each chunk.
NETWORK_S, DISPATCH_S = 0.02, 0.002
#: A worker sends results when it has this many, or this many seconds after it last did.
FLUSH_RESULTS, FLUSH_S = 256, 2.0
#: Seconds between the coordinator's looks at who holds what.
LOOK_S = 1.0


def step_s(running: int) -> float:
    """Seconds in which every one of `running` requests gets a token."""
    return STEP_S + STEP_MORE_S * running


class Prompts(NamedTuple):
    """The prompts of a batch in planned order: a prefix, which others have too, and something of their own."""

    #: Which prefix each request has, ascending.
    prefixes: npt.NDArray[np.int64]
    prefix_tokens: int
    own_tokens: int
    #: How many prefixes a worker's KV cache holds.
    kept: int

    def shared(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Bytes that each row has in common with the one before it, as the plan says."""
        before = np.append(-1, self.prefixes)[start:end]
        return np.where(self.prefixes[start:end] == before, 4 * self.prefix_tokens, 0)


class _Run:
    """A chunk on a worker."""

    def __init__(self, chunk: str, now: float, rows: int) -> None:
        self.chunk = chunk
        self.began = now
        self.left = rows
        self.seq = 0
        self.done: list[tuple[str, int]] = []
        self.dropped = False


class Worker:
    """One engine. `speed`: of its steps, 1 is like the others."""

    def __init__(self, fleet: Fleet, name: str, speed: float) -> None:
        self.name = name
        self._fleet = fleet
        self._slowness = 1 / speed
        self.runs: dict[str, _Run] = {}
        #: Chunks in its own queue.
        self.own: deque[Outstanding] = deque()
        self._waiting: deque[tuple[_Run, str, int, int]] = deque()
        #: (tokens at which it ends, number, run, batch, position), by what is in the engine.
        self._inside: list[tuple[float, int, _Run, str, int]] = []
        self._numbers = itertools.count()
        self._tokens = 0.0
        #: Seconds of reading that come before the next step.
        self._reading = 0.0
        #: Prefixes that its KV cache has, the least recently used first.
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._at = 0.0
        self._turn = 0

    @property
    def takes(self) -> bool:
        """True while it takes another chunk."""
        held = len(self.runs)
        here = len(self._inside) + len(self._waiting)
        return held < CHUNKS or (held < MOST_CHUNKS and here < 2 * SEQS + 8)

    def take(self, chunk: Outstanding) -> None:
        """Begin with a chunk."""
        now = self._fleet.now
        self._advance()
        run = self.runs[chunk.id] = _Run(chunk.id, now, sum(len(s.positions) for s in chunk.shares))
        for share in chunk.shares:
            tokens = self._fleet.tokens[share.batch]
            for pos, more in zip(share.positions.tolist(), tokens[share.positions].tolist(), strict=True):
                self._waiting.append((run, share.batch, pos, more))
        self._fill()
        self._fleet.after(FLUSH_S, lambda: self._tick(run))

    def drop(self, chunk_id: str) -> None:
        """Abort what is left of a chunk: its requests were answered elsewhere."""
        run = self.runs.pop(chunk_id, None)
        if run is None:
            return
        self._advance()
        run.dropped = True
        self._inside = [entry for entry in self._inside if entry[2] is not run]
        heapq.heapify(self._inside)
        self._fill()
        self._fleet.offer()

    def _advance(self) -> None:
        now = self._fleet.now
        passed = now - self._at
        read = min(passed, self._reading)
        self._reading -= read
        if self._inside:
            self._tokens += (passed - read) / (step_s(len(self._inside)) * self._slowness)
        self._at = now

    def _fill(self) -> None:
        while self._waiting and len(self._inside) < SEQS:
            run, batch, pos, tokens = self._waiting.popleft()
            if not run.dropped:
                heapq.heappush(self._inside, (self._tokens + tokens, next(self._numbers), run, batch, pos))
                self._fleet.started_at[batch] = self._at
                if batch in self._fleet.prompts:
                    self._reading += self._read(self._fleet.prompts[batch], pos) * READ_S * self._slowness
        self._turn += 1
        if self._inside:
            turn = self._turn
            ahead = max(0.0, self._inside[0][0] - self._tokens) * step_s(len(self._inside)) * self._slowness
            self._fleet.after(self._reading + ahead, lambda: self._ended(turn))

    def _read(self, prompts: Prompts, pos: int) -> int:
        """Tokens of a prompt that have to be computed."""
        prefix = int(prompts.prefixes[pos])
        had = prefix in self._prefixes
        self._prefixes[prefix] = None
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > prompts.kept:
            self._prefixes.popitem(last=False)
        computed = prompts.own_tokens + (0 if had else prompts.prefix_tokens)
        self._fleet.computed += computed
        return computed

    def _ended(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        self._tokens = max(self._tokens, self._inside[0][0])
        changed = False
        while self._inside and self._inside[0][0] <= self._tokens:
            _, _, run, batch, pos = heapq.heappop(self._inside)
            run.done.append((batch, pos))
            run.left -= 1
            if not run.left or len(run.done) >= FLUSH_RESULTS:
                self._send(run)
                changed = True
        self._fill()
        if changed or len(self._inside) + len(self._waiting) == 2 * SEQS:
            self._fleet.offer()

    def _tick(self, run: _Run) -> None:
        if run.chunk in self.runs and not run.dropped:
            if run.done:
                self._send(run)
            self._fleet.after(FLUSH_S, lambda: self._tick(run))

    def _send(self, run: _Run) -> None:
        parts = []
        for batch in dict.fromkeys(b for b, _ in run.done):
            rows = np.array([p for b, p in run.done if b == batch], dtype="<u4")
            columns = rows.tobytes(), bytes([Kind.OUTPUT]) * len(rows), bytes(4 * len(rows))
            usage = Usage(completion_tokens=int(self._fleet.tokens[batch][rows].sum()))
            parts.append(Part(batch, *columns, b"", usage))
        run.done = []
        elapsed = self._fleet.now - run.began if not run.left else 0.0
        results = Results(VERSION, run.chunk, MODEL, self.name, run.seq, not run.left, parts, None, elapsed)
        run.seq += 1
        if not run.left:
            del self.runs[run.chunk]
        self._fleet.after(NETWORK_S, lambda: self._fleet.answered(results))


class Fleet:
    """The coordinator's side and the clock. `tokens`: batch → how many tokens each of its answers takes."""

    def __init__(self, scheduler: Scheduler, speeds: list[float]) -> None:
        self.now = 0.0
        self.book = Book()
        self.tokens: dict[str, npt.NDArray[np.int64]] = {}
        #: When the last request of each batch so far entered an engine, and when each batch was answered whole.
        self.started_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.messages = 0
        #: Requests that were sent a second time, and chunks that were taken from one worker for another.
        self.copied = 0
        self.stolen = 0
        #: Prompts of the batches whose prompts count, and tokens of them that were computed.
        self.prompts: dict[str, Prompts] = {}
        self.computed = 0
        self._looked_at = 0.0
        self._costs: dict[str, npt.NDArray[np.int64]] = {}
        self._scheduler = scheduler
        self._weights = Weights(scheduler)
        self.workers = [Worker(self, f"w{n}", speed) for n, speed in enumerate(speeds)]
        self._by_name = {w.name: w for w in self.workers}
        self._facts = [_facts(w.name) for w in self.workers]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Outstanding] = deque()
        self._dispatching = False
        self._told: set[str] = set()
        self._next_worker = 0
        self.after(LOOK_S, self._look)

    def submit(self, batch: Batch, tokens: npt.NDArray[np.int64], costs: npt.NDArray[np.int64]) -> None:
        """A batch comes now; `costs`: what the plan thinks each request takes."""
        self.tokens[batch.id], self._costs[batch.id] = tokens, costs
        self.book.open(batch)
        self._wake()

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until `until()`."""
        while not until():
            self.now, _, act = heapq.heappop(self._events)
            act()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def answered(self, results: Results) -> None:
        """A worker's message arrives."""
        self.messages += 1
        outcome = self.book.results(results, self.messages, self.now)
        for progress in outcome.touched:
            if progress.complete and progress.id not in self.ended_at:
                self.ended_at[progress.id] = self.now
                self.book.forget(progress.id)
        self._wake()

    @property
    def out(self) -> int:
        """Requests that are with workers, or on the way."""
        return self.book.window_used(self.book.lane(MODEL))

    def offer(self) -> None:
        """Chunks that wait go to workers that take one, these in turn; each looks into its own queue first."""
        given = True
        while given:
            given = False
            for worker in self._in_turn():
                queue = worker.own or self._waiting
                if queue and worker.takes:
                    chunk = queue.popleft()
                    if chunk.id not in self.book.given_up:
                        worker.take(chunk)
                    given = True
                    break

    def _in_turn(self) -> Iterator[Worker]:
        for _ in self.workers:
            self._next_worker = (self._next_worker + 1) % len(self.workers)
            yield self.workers[self._next_worker]

    def _wake(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self.after(0.0, self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        lane = self.book.lanes.get(MODEL)
        if lane is None:
            return
        room = capacity(self._scheduler, self._facts, MODEL, SEQS, CHUNKS, lane.times)
        wait_s = self._scheduler.timeout_ms / 1000
        drafted = packing.draft(self.book, lane, room, self.now, self.now, wait_s, self._weights)
        if isinstance(drafted, Wait) and drafted.idle:
            stolen = sticky.steal(self.book, lane, room, room.nodes, self._looked_at)
            if stolen is not None:
                self.stolen += 1
                self.book.lost(Lost(stolen, leased=False), self.now)
                self._drop_given_up()
                self._dispatching = True
                self.after(DISPATCH_S, self._dispatch)
                return
            factor = self._scheduler.straggler_factor
            copy = stragglers.find(self.book, lane, room.nodes, factor, room.floor, self.now, self.now)
            drafted = copy or drafted
        if isinstance(drafted, Wait):
            if drafted.until < self.now + LOOK_S:
                self.after(max(0.0, drafted.until - self.now), self._wake)
            return
        seen = sticky.view(self.book, lane, drafted, room, self._scheduler.sticky_prefixes)
        if seen is not None:
            drafted = sticky.route(drafted, seen, self._shared(seen.progress.id))
        picks = [p._replace(cost=int(self._costs[p.batch][p.positions].sum())) for p in drafted.picks]
        slices = [sent_slice(p.batch, p.positions, p.attempt, cost=p.cost) for p in picks]
        record = Dispatch(f"c{next(self._numbers)}", MODEL, self.now, slices, drafted.node, drafted.copy_of)
        again = [(p.retry, p.positions) for p in picks if p.retry is not None]
        chunk = self.book.sent(record, self.now, again)
        if drafted.copy_of:
            self.copied += sum(len(p.positions) for p in picks)
        else:
            packing.charge(self.book, lane, picks, chunk)
        self.after(NETWORK_S, lambda: self._arrive(chunk))
        self._dispatching = True
        self.after(DISPATCH_S, self._dispatch)

    def _shared(self, batch: str) -> sticky.Shared:
        if batch in self.prompts:
            return self.prompts[batch].shared
        return lambda start, end: np.zeros(end - start, dtype=np.int64)

    def _arrive(self, chunk: Outstanding) -> None:
        (self._by_name[chunk.target].own if chunk.target else self._waiting).append(chunk)
        self.offer()

    def _look(self) -> None:
        held = {chunk_id: w.name for w in self.workers for chunk_id in w.runs}
        losses.see_leases(self.book, {c: held.get(c) for c in self.book.out}, self.now)
        self._looked_at = self.now
        self._drop_given_up()
        self._wake()
        self.after(LOOK_S, self._look)

    def _drop_given_up(self) -> None:
        for chunk_id in [c for c in self.book.given_up if c not in self._told]:
            self._told.add(chunk_id)
            for worker in self.workers:
                worker.drop(chunk_id)


def _facts(name: str) -> WorkerFacts:
    return WorkerFacts(
        node=name,
        model=MODEL,
        host="",
        pid=0,
        device="",
        engine="",
        state="ready",
        max_num_seqs=SEQS,
        chunks_in_flight=CHUNKS,
    )
