"""A coordinator's side for tests of workers: builds and sends chunks, collects and checks their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from kombu import Connection, Consumer

from common import ids
from common.broker import codecs, connect, queue
from common.live import LiveState
from common.messages import (
    QUEUE_DEAD,
    TASK_INFER,
    VERSION,
    Chunk,
    Kind,
    Results,
    Row,
    Slice,
    decode_results,
    encode,
    infer_queue,
    join_rows,
    kinds,
    lengths,
    node_queue,
    positions,
)
from common.publisher import Publisher
from common.serializer import CONTENT_TYPE
from common.settings import Settings
from tests.support.ports import PATIENCE_S, wait_until
from tests.support.processes import Process

RESULTS = "results.0"


def chat(text: str, **fields: Any) -> bytes:
    """The body of a chat request."""
    return msgspec.json.encode({"messages": [{"role": "user", "content": text}], **fields})


def make_chunk(
    bodies: Sequence[bytes], model: str, *, batch: str | None = None, url: int = 0, start: int = 0, **fields: Any
) -> Chunk:
    """A chunk of one slice; `fields` replace fields of `Chunk`."""
    rows = [Row(start + i, start + i, b'"r%d"' % (start + i), url, body) for i, body in enumerate(bodies)]
    one = Slice(batch or ids.new_batch_id(), start, start + len(rows), 1, join_rows([encode(row) for row in rows]))
    values: dict[str, Any] = {
        "v": VERSION,
        "id": ids.new_chunk_id(),
        "model": model,
        "reply_to": RESULTS,
        "epoch": 1,
        "sent_at": time.time(),
        "not_after": 0.0,
        "timeout_s": 60.0,
        "cache": "off",
        "slices": [one],
    }
    return Chunk(**(values | fields))


@dataclass
class Answers:
    """What came of one chunk so far."""

    #: (position, kind, line), in the order they came, over all its batches.
    rows: list[tuple[int, Kind, dict[str, Any]]] = field(default_factory=list)
    messages: list[Results] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """True once its last message has come."""
        return any(m.done for m in self.messages)

    @property
    def last(self) -> Results:
        """Its last message."""
        return next(m for m in self.messages if m.done)

    def kinds(self) -> dict[int, Kind]:
        """Position → kind; every position must have come once."""
        found = {pos: kind for pos, kind, _ in self.rows}
        assert len(found) == len(self.rows), "a row was answered twice"
        return found

    def lines(self) -> dict[int, dict[str, Any]]:
        """Position → result line."""
        return {pos: line for pos, _, line in self.rows}


class Dispatch:
    """Sends chunks and collects what comes back, on connections of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.chunks, self.results = codecs(settings)
        self.publisher = Publisher(settings)
        self.answers: dict[str, Answers] = {}
        self._connection: Connection | None = None
        self._consumer: Consumer | None = None

    def seal(self, chunk: Chunk, name: str | None = None) -> bytes:
        """The chunk as it travels."""
        return self.chunks.seal(name or infer_queue(chunk.model), encode(chunk))

    def send(self, chunk: Chunk, blob: bytes | None = None, node: str = "") -> Chunk:
        """Publish a chunk (or other bytes in its place), for one worker alone where `node` names it."""
        count = sum(s.end - s.start for s in chunk.slices)
        shown = f"batch={chunk.slices[0].batch} chunk={chunk.id} requests={count}"
        name = node_queue(chunk.model, node) if node else infer_queue(chunk.model)
        sealed = blob or self.seal(chunk, name)
        self.publisher.begin_task(name, TASK_INFER, chunk.id, sealed, shown, transient=bool(node))
        self.publisher.settle()
        return chunk

    def collect(self, enough: Callable[[], bool], timeout: float = 30, what: str = "results") -> None:
        """Take results until `enough()`; `AssertionError` when time is up first (`PATIENCE_S` at least)."""
        timeout = max(timeout, PATIENCE_S)
        deadline = time.monotonic() + timeout
        while not enough():
            assert time.monotonic() < deadline, f"no {what} within {timeout:g} s; have {self.summary()}"
            self.take(1.0)

    def wait(self, chunk: Chunk, timeout: float = 30) -> Answers:
        """The chunk's answers once its last message has come."""
        self.collect(lambda: self.of(chunk).done, timeout, f"last message of {chunk.id}")
        return self.of(chunk)

    def wait_taken(self, *chunks: Chunk, timeout: float = 30) -> None:
        """Wait until workers run these chunks (delivered is not enough: a worker may not have begun)."""
        live = LiveState(self.settings)
        names = [chunk.id for chunk in chunks]
        try:
            wait_until(lambda: None not in live.leases(names), timeout, "the chunks are taken up")
        finally:
            live.close()

    def of(self, chunk: Chunk) -> Answers:
        """What came of a chunk so far."""
        return self.answers.setdefault(chunk.id, Answers())

    def take(self, timeout: float) -> None:
        """Take what is there, or the next thing that comes."""
        try:
            if self._connection is None:
                self._connection = connect(self.settings)
                self._consumer = Consumer(
                    self._connection.channel(),
                    queues=[queue(self.settings, RESULTS)],
                    on_message=self._on_message,
                    accept=[CONTENT_TYPE],
                )
                self._consumer.consume()
            self._connection.drain_events(timeout=timeout)
        except TimeoutError:
            return
        except Exception:  # the broker is down: come back later
            self._disconnect()
            time.sleep(0.1)

    def summary(self) -> dict[str, tuple[int, bool]]:
        """Chunk → rows so far, and whether it is done."""
        return {name: (len(a.rows), a.done) for name, a in self.answers.items()}

    def close(self) -> None:
        """Close the connections."""
        self.publisher.close()
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.collect(socket_timeout=1)

    def _on_message(self, message: Any) -> None:
        results = decode_results(self.results.open(RESULTS, bytes(message.body)))
        answers = self.answers.setdefault(results.chunk, Answers())
        answers.messages.append(results)
        for part in results.parts:
            at = 0
            for pos, kind, length in zip(positions(part), kinds(part), lengths(part), strict=True):
                line = part.lines[at : at + int(length)]
                at += int(length)
                assert line.endswith(b"\n")
                assert line.count(b"\n") == 1
                answers.rows.append((int(pos), Kind(int(kind)), msgspec.json.decode(line)))
        message.ack()


@dataclass
class Dead:
    """A dead-lettered message."""

    body: bytes
    reason: str
    queue: str


@contextlib.contextmanager
def dead_letters(settings: Settings) -> Iterator[Callable[[int], list[Dead]]]:
    """A function that waits for so many dead letters and returns all that came."""
    found: list[Dead] = []

    def on_message(message: Any) -> None:
        headers = message.headers
        found.append(Dead(bytes(message.body), headers.get("x-reason", ""), headers.get("x-queue", "")))
        message.ack()

    with connect(settings) as connection:
        dead = queue(settings, QUEUE_DEAD)
        with Consumer(connection.channel(), queues=[dead], on_message=on_message, accept=[CONTENT_TYPE]):

            def wait(count: int) -> list[Dead]:
                deadline = time.monotonic() + PATIENCE_S
                while len(found) < count:
                    assert time.monotonic() < deadline, f"{len(found)} dead letters of {count}"
                    with contextlib.suppress(TimeoutError):
                        connection.drain_events(timeout=1)
                return found

            yield wait


#: The fixture `start_worker`: options as positional arguments, environment as keywords.
StartWorker = Callable[..., Process]
