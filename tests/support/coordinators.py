"""Tests of the coordinator: batches straight into a store, and a worker that is one thread without an engine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from kombu import Consumer

from common.broker import codecs, connect, queue
from common.ids import new_batch_id
from common.lines import answer_line, encode_marks, error_line
from common.live import LiveState, WorkerFacts
from common.messages import (
    TOO_LATE,
    VERSION,
    Chunk,
    Crash,
    Failure,
    Inside,
    Kind,
    Part,
    Results,
    Row,
    Usage,
    decode_chunk,
    decode_rows,
    encode,
    infer_queue,
    node_queue,
)
from common.plan import Window
from common.plan_reader import PLAN_DTYPE
from common.publisher import Publisher
from common.settings import Settings
from common.store import Store
from producers.batch import Batch, Input, Status, folder
from producers.coordinator.broker_calls import BrokerTrouble, broker_calls
from producers.coordinator.core import Core
from producers.coordinator.service import Service
from producers.invalid_file import INVALID_DTYPE
from tests.support.ports import PATIENCE_S, wait_until

MODEL = "echo-test@1"


def make_batch(
    store: Store,
    requests: int,
    *,
    model: str = MODEL,
    invalid: Sequence[int] = (),
    window: int = 65_536,
    shuffle: bool = True,
    body: bytes = b'{"messages":[]}',
    timeout_s: float = 600.0,
    shard: int = 0,
    activate: bool = True,
    name: str | None = None,
    shared: npt.ArrayLike = 0,
    **fields: Any,
) -> Batch:
    """Write a batch as intake would: `custom_id`s are `"r<index>"`, the indexes in `invalid` are refused ones.

    `shared`: what each row has in common with the one before it, by position. `fields`: further ones of `Batch`.
    """
    batch_id = new_batch_id()
    base = folder(batch_id)
    refused = set(invalid)
    windows: list[Window] = []
    plan = np.zeros(requests - len(refused), PLAN_DTYPE)
    rng = np.random.default_rng(requests)
    pos = offset = 0
    with store.open_write(f"{base}/rows") as rows:
        for start in range(0, requests, window):
            end = min(requests, start + window)
            indexes = np.array([i for i in range(start, end) if i not in refused], dtype=np.int64)
            if shuffle:
                rng.shuffle(indexes)
            first = pos
            for index in indexes.tolist():
                row = msgspec.msgpack.encode(Row(pos, index, b'"r%d"' % index, 0, body))
                rows.write(row)
                plan[pos] = (offset, len(row), index, 100, 0)
                offset += len(row)
                pos += 1
            windows.append(Window(first, pos, start, end))
    plan["shared"] = shared
    with store.open_write(f"{base}/plan") as file:
        file.write(plan.tobytes())
    if refused:
        marks = encode_marks(model, attempts=0)
        lines = [
            (i, error_line(batch_id, i, b'"r%d"' % i, "invalid_request", "not valid", marks)) for i in sorted(refused)
        ]
        records = np.zeros(len(lines), INVALID_DTYPE)
        at = 0
        with store.open_write(f"{base}/invalid") as file:
            for n, (index, line) in enumerate(lines):
                records[n] = (at, len(line), index)
                at += len(line)
                file.write(line)
        with store.open_write(f"{base}/invalid.idx") as file:
            file.write(records.tobytes())
    batch = Batch(
        id=batch_id,
        model=model,
        created_at=time.time(),
        shard=shard,
        input=Input("test.jsonl", offset, blake3(b"test").hexdigest()),
        requests=requests,
        planned=pos,
        invalid=len(refused),
        cost=100 * pos,
        windows=windows,
        timeout_s=timeout_s,
        name=name,
        **fields,
    )
    store.put_atomic(f"{base}/batch.json", msgspec.json.encode(batch))
    if activate:
        store.create_exclusive(f"active/{shard}/{batch_id}", b"")
    return batch


def line_of(batch_id: str, row: Row, attempt: int = 1, model: str = MODEL) -> bytes:
    """The line the fake worker answers with."""
    body = b'{"echo":%d,"usage":{"prompt_tokens":7,"completion_tokens":3}}' % row.index
    return answer_line(batch_id, row.index, row.custom_id, 200, body, encode_marks(model, attempt))


def failed_line(batch_id: str, row: Row, status: int = 503, model: str = MODEL) -> bytes:
    """An error answer's line."""
    return answer_line(batch_id, row.index, row.custom_id, status, b'{"error":"no"}', encode_marks(model))


def part_of(batch_id: str, rows: Sequence[tuple[int, Kind, bytes]], usage: Usage | None = None) -> Part:
    """A part out of (position, kind, line)."""
    good = sum(1 for _, kind, _ in rows if kind == Kind.OUTPUT)
    return Part(
        batch_id,
        np.array([pos for pos, _, _ in rows], dtype="<u4").tobytes(),
        bytes(kind for _, kind, _ in rows),
        np.array([len(line) for _, _, line in rows], dtype="<u4").tobytes(),
        b"".join(line for _, _, line in rows),
        usage if usage is not None else Usage(7 * good, 3 * good),
    )


#: Every fake worker is a process of its own.
_PIDS = itertools.count(1)

#: What a worker does with a row: (kind, line), or None for no answer at all.
Answer = Callable[[str, Row, int], tuple[Kind, bytes] | None]


def answer_all(batch_id: str, row: Row, attempt: int) -> tuple[Kind, bytes] | None:
    """A success for every row."""
    return Kind.OUTPUT, line_of(batch_id, row, attempt)


class FakeWorker:
    """Takes chunks of one model version and answers them, over and over until `close`.

    `gate` may be cleared to hold chunks (leased, not answered), or is so by itself once `hold_after` rows are answered:
    whoever looked for that moment from outside could come too late. `crash` drops what is held without a word, its
    leases and its connection with it. `ahead_s`: by how much its clock is wrong.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        model: str = MODEL,
        node: str = "fake1",
        answer: Answer = answer_all,
        prefetch: int = 3,
        per_message: int = 256,
        copies: int = 1,
        max_num_seqs: int = 64,
        announce: bool = True,
        ahead_s: float = 0.0,
        hold_after: int | None = None,
    ) -> None:
        self._settings = settings
        self._chunks, self._results = codecs(settings)
        self._live = LiveState(settings)
        self._publisher = Publisher(settings)
        self._queue, self._own = infer_queue(model), node_queue(model, node)
        self._answer = answer
        self._prefetch = prefetch
        self._per_message = per_message
        self._copies = copies
        self._announce = announce
        self._ahead_s = ahead_s
        self._hold_after = hold_after
        self.facts = WorkerFacts(
            node=node,
            model=model,
            host="test",
            pid=next(_PIDS),
            device="none",
            engine="fake",
            state="ready",
            max_num_seqs=max_num_seqs,
            chunks_in_flight=prefetch,
        )
        #: Chunks taken up, in order.
        self.taken: list[Chunk] = []
        #: (batch, pos) of every row that was answered, in order.
        self.answered: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        #: Set when a chunk is held at the gate.
        self.holding = threading.Event()
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._crash = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"{node}-work", daemon=True),
            threading.Thread(target=self._renew, name=f"{node}-lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def hold_after(self, rows: int) -> None:
        """Hold chunks once so many rows are answered, all of them counted."""
        self._hold_after = rows

    def let_go(self) -> None:
        """Answer what is held, and go on."""
        self.holding.clear()
        self.gate.set()

    def crash(self) -> None:
        """End at once: nothing is acknowledged, leases lapse by themselves."""
        self._crash.set()
        self.close()

    def report(self, chunk: Chunk, inside: Sequence[tuple[str, int]]) -> None:
        """What a supervisor says of a worker that ended with this chunk, and with these rows inside its engine."""
        named = [
            Inside(batch, np.array([pos for b, pos in inside if b == batch], dtype="<u4").tobytes())
            for batch in dict.fromkeys(b for b, _ in inside)
        ]
        crash = Crash(f"fake.{self.facts.pid}", "signal 9", named)
        results = Results(VERSION, chunk.id, chunk.model, self.facts.node, 0, False, [], crash=crash)
        self._publish(chunk.reply_to, self._results.seal(chunk.reply_to, encode(results)))
        self._live.give_up([chunk.id])

    def close(self) -> None:
        """End after the chunk at hand."""
        self._stop.set()
        self.gate.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._publisher.close()
        self._live.close()

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renew(self) -> None:
        lease_s = self._settings.scheduler.lease_s
        while not self._crash.is_set():
            try:
                if self._announce:
                    self._live.announce(self.facts)
                with self._lock:
                    held = set(self._held)
                self._live.renew_leases(held, self.facts.node, lease_s)
            except Exception:
                time.sleep(0.05)
            if self._stop.wait(min(lease_s / 5, 0.5)):
                break
        if not self._crash.is_set():
            try:
                self._live.withdraw(self.facts.node)
            except Exception:
                return

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with broker_calls():
                    self._consume()
            except BrokerTrouble:
                self._stop.wait(0.1)

    def _consume(self) -> None:
        connection = connect(self._settings)
        arrived: list[Any] = []
        try:
            consumer = Consumer(
                connection.channel(),
                [queue(self._settings, self._queue), queue(self._settings, self._own, transient=True)],
                on_message=arrived.append,
                prefetch_count=self._prefetch,
            )
            consumer.consume()
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.1)
                while arrived and not self._crash.is_set():
                    message = arrived.pop(0)
                    if not self._work(message.body, message.delivery_info["routing_key"]):
                        return
                    message.ack()
        finally:
            if self._crash.is_set():
                _cut(connection)
            connection.release()

    def _work(self, blob: Any, name: str) -> bool:
        chunk = decode_chunk(self._chunks.open(name, bytes(blob)))
        with contextlib.suppress(Exception):
            if self._live.given_up(chunk.id):
                return True
        with self._lock:
            self._held.add(chunk.id)
        try:
            self._live.renew_leases([chunk.id], self.facts.node, self._settings.scheduler.lease_s)
        except Exception:
            time.sleep(0)
        self.taken.append(chunk)
        if self._hold_after is not None and len(self.answered) >= self._hold_after:
            self._hold_after = None
            self.gate.clear()
        if not self.gate.is_set():
            self.holding.set()
            self.gate.wait()
        if self._crash.is_set():
            return False
        self._reply(chunk)
        with self._lock:
            self._held.discard(chunk.id)
        try:
            self._live.drop_leases([chunk.id])
        except Exception:
            time.sleep(0)
        return True

    def _reply(self, chunk: Chunk) -> None:
        answers: list[tuple[str, int, Kind, bytes]] = []
        failure: Failure | None = None
        late = 0 < chunk.not_after < time.time() + self._ahead_s
        if late:
            failure = Failure(TOO_LATE, "late by my clock")
        for piece in () if late else chunk.slices:
            for row in decode_rows(piece.rows):
                try:
                    found = self._answer(piece.batch, row, piece.attempt)
                except ChunkFails as exc:
                    failure = Failure("engine_error", str(exc))
                    break
                if found is not None:
                    answers.append((piece.batch, row.pos, *found))
        groups = [answers[i : i + self._per_message] for i in range(0, len(answers), self._per_message)] or [[]]
        for seq, group in enumerate(groups):
            batches = list(dict.fromkeys(b for b, _, _, _ in group))
            parts = [part_of(b, [(p, k, line) for bb, p, k, line in group if bb == b]) for b in batches]
            last = seq == len(groups) - 1
            results = Results(
                VERSION, chunk.id, chunk.model, self.facts.node, seq, last, parts, failure if last else None
            )
            blob = self._results.seal(chunk.reply_to, encode(results))
            for _ in range(self._copies):
                self._publish(chunk.reply_to, blob)
        self.answered.extend((b, p) for b, p, _, _ in answers)

    def _publish(self, name: str, blob: bytes) -> None:
        while not self._crash.is_set():
            try:
                self._publisher.publish(name, blob)
            except Exception:
                # Confirm before ack: over and over until the broker has it.
                time.sleep(0.1)
                continue
            return


class ChunkFails(Exception):
    """Raised by an answer function: the chunk ends here with a failure."""


def _cut(connection: Any) -> None:
    """Drop a connection as a killed process would: its messages are not given back politely."""
    channel = connection.default_channel
    qos = getattr(channel, "qos", None)
    if qos is not None and hasattr(qos, "_delivered"):
        qos._delivered.clear()


class Running:
    """A coordinator in a thread of this process."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._stop = threading.Event()
        self.service = Service(settings, store, 0, self._stop)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def core(self) -> Core:
        """Its core, once it leads."""
        wait_until(lambda: self.service.core is not None or self.error is not None, 20, "the coordinator leads", 0.01)
        assert self.service.core is not None
        return self.service.core

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        """Stop it cleanly; raises what it failed with."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def coordinating(settings: Settings, store: Store) -> Iterator[Running]:
    """A coordinator for the length of the block."""
    running = Running(settings, store)
    try:
        yield running
    finally:
        running.stop()


# -- looking at a store ------------------------------------------------------------------------------------------------


def status_of(store: Store, batch: Batch) -> Status:
    """The batch's status file; `queued` while there is none."""
    try:
        return msgspec.json.decode(store.read(f"{folder(batch.id)}/status.json"), type=Status)
    except FileNotFoundError:
        return Status(id=batch.id)


def wait_status(store: Store, batch: Batch, *words: str, timeout: float = 60) -> Status:
    """Wait until the batch's status is one of `words`."""
    wait_until(
        lambda: status_of(store, batch).status in words,
        timeout,
        lambda: f"{batch.id} is {' or '.join(words)}; it is {status_of(store, batch)}",
        0.02,
    )
    return status_of(store, batch)


def lines(store: Store, batch: Batch, name: str) -> Iterator[dict[str, Any]]:
    """The decoded lines of an output file."""
    with store.open_read(f"{folder(batch.id)}/{name}") as file:
        for line in file:
            yield msgspec.json.decode(line)


def check_outputs(store: Store, batch: Batch, failed: Sequence[int] = ()) -> None:
    """Every index exactly once, in order, in the file where it belongs."""
    bad = sorted(failed)
    good = sorted(set(range(batch.requests)) - set(bad))
    assert [line["custom_id"] for line in lines(store, batch, "output.jsonl")] == [f"r{i}" for i in good]
    assert [line["custom_id"] for line in lines(store, batch, "errors.jsonl")] == [f"r{i}" for i in bad]
