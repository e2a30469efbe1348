"""One chunk from its rows to its last message, without a broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common import ids
from common.messages import (
    TOO_LATE,
    Chunk,
    Kind,
    Part,
    Results,
    Row,
    decode_results,
    decode_rows,
    encode,
    kinds,
    lengths,
    positions,
)
from common.registry import ModelVersion
from common.settings import Settings
from tests.support.chunks import chat, make_chunk
from tests.support.ports import wait_until
from workers import breadcrumb
from workers import chunk as chunk_module
from workers import results as results_module
from workers.abort import Abort
from workers.breadcrumb import Breadcrumb
from workers.chunk import ChunkRun, ChunkWork
from workers.engine import echo
from workers.engine.base import Answer, Engine, EngineDead
from workers.engine_thread import EngineThread
from workers.lane import Lane, inside_limit

MODEL = "m@1"
StartEngine = Callable[..., tuple[EngineThread, Lane]]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """An echo engine in its thread; keywords are its knobs."""
    threads: list[EngineThread] = []

    def start(engine: Engine | None = None, deaths: list[str] | None = None, **knobs: str) -> tuple[EngineThread, Lane]:
        env = {f"BATCHMILL_ECHO_{k}": v for k, v in knobs.items()}
        entry = ModelVersion(source="none", engine={"max_num_seqs": 4})
        told = deaths if deaths is not None else []
        thread = EngineThread(lambda: engine or echo.make(MODEL, entry, Settings(), env), told.append)
        thread.start()
        threads.append(thread)
        return thread, Lane(thread, lambda: None)

    yield start
    for thread in threads:
        assert thread.stop(5)


def rows_of(chunk: Chunk) -> list[list[Row]]:
    return [decode_rows(part.rows) for part in chunk.slices]


class Sent(list[Results]):
    """Results as they were sent, each checked against the wire's rules."""

    def __call__(self, results: Results) -> None:
        self.append(decode_results(encode(results)))

    def rows(self) -> dict[tuple[str, int], tuple[Kind, dict[str, Any]]]:
        found: dict[tuple[str, int], tuple[Kind, dict[str, Any]]] = {}
        for message in self:
            for part in message.parts:
                at = 0
                for pos, kind, length in zip(positions(part), kinds(part), lengths(part), strict=True):
                    key = part.batch, int(pos)
                    assert key not in found
                    found[key] = Kind(int(kind)), msgspec.json.decode(part.lines[at : at + int(length)])
                    at += int(length)
        return found


def run(chunk: Chunk, engine: tuple[EngineThread, Lane]) -> tuple[Abort | None, Sent]:
    sent = Sent()
    work = ChunkWork(chunk, rows_of(chunk), *engine)
    return ChunkRun(chunk, work, "node", sent).run(), sent


@pytest.mark.parametrize("knobs", [{}, {"LATENCY_MS": "1"}])
def test_slices_of_several_batches(start_engine: StartEngine, knobs: dict[str, str]) -> None:
    """In bulk and singly."""
    one, two = (make_chunk([chat(f"{c}{i}") for i in range(20)], MODEL, start=7) for c in "ab")
    again = msgspec.structs.replace(two.slices[0], attempt=3)
    chunk = msgspec.structs.replace(one, slices=[one.slices[0], again])
    reason, sent = run(chunk, start_engine(**knobs))
    assert reason is None
    assert [m.done for m in sent] == [False] * (len(sent) - 1) + [True]
    assert [m.seq for m in sent] == list(range(len(sent)))
    rows = sent.rows()
    assert set(rows) == {(s.batch, pos) for s in chunk.slices for pos in range(7, 27)}
    kind, line = rows[again.batch, 9]
    assert kind is Kind.OUTPUT
    assert line["id"] == ids.result_id(again.batch, 9)
    assert line["custom_id"] == "r9"
    assert line["batchmill"] == {"model": MODEL, "attempts": 3}
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "echo: b2"
    usage = [p.usage for m in sent for p in m.parts if p.batch == again.batch]
    assert sum(u.completion_tokens for u in usage) == 20 * 2


@pytest.mark.parametrize("knobs", [{}, {"LATENCY_MS": "1"}])
def test_lines_are_made_and_sent_on_another_thread_than_the_engines(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, str]
) -> None:
    """What compresses, signs and publishes is what is sent to."""
    seen: dict[str, set[str]] = {"made": set(), "sent": set()}

    def made(*given: Any) -> list[Part]:
        seen["made"].add(threading.current_thread().name)
        return results_module.parts(*given)

    def send(_: Results) -> None:
        seen["sent"].add(threading.current_thread().name)

    monkeypatch.setattr(chunk_module, "parts", made)
    monkeypatch.setattr(chunk_module, "FLUSH_RESULTS", 5)
    chunk = make_chunk([chat("x")] * 40, MODEL)
    ChunkRun(chunk, ChunkWork(chunk, rows_of(chunk), *start_engine(**knobs)), "node", send).run()
    here = {threading.current_thread().name}
    assert seen == {"made": here, "sent": here}


def test_nothing_to_do_is_done(start_engine: StartEngine) -> None:
    engine = start_engine(LATENCY_MS="1")
    empty = make_chunk([], MODEL)
    reason, sent = run(empty, engine)
    assert (reason, [m.done for m in sent], sent.rows()) == (None, [True], {})


def test_results_leave_when_enough_have_come(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "FLUSH_RESULTS", 10)
    chunk = make_chunk([chat("x")] * 40, MODEL)
    _, sent = run(chunk, start_engine(LATENCY_MS="40"))
    assert len(sent) >= 3
    assert all(sum(len(p.kind) for p in m.parts) >= 10 for m in sent[:-1])


def test_results_leave_when_their_time_has_come(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "FLUSH_S", 0.05)
    chunk = make_chunk([chat("x"), chat("SLOW")], MODEL)
    _, sent = run(chunk, start_engine(FAULTS="SLOW=slow:0.5"))
    assert [[len(p.kind) for p in m.parts] for m in sent if m.parts] == [[1], [1]]


def test_messages_stay_small(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "MESSAGE_BYTES", 2000)
    _, sent = run(make_chunk([chat("x" * 300)] * 40, MODEL), start_engine())
    assert len(sent) > 5
    assert len(sent.rows()) == 40


class Stuck(echo.EchoEngine):
    """Answers `fast`, and tells when it holds everything else."""

    def __init__(self, wanted: int) -> None:
        entry = ModelVersion(source="none", engine={"max_num_seqs": 4})
        super().__init__(MODEL, entry, Settings(), {"BATCHMILL_ECHO_FAULTS": "HANG=hang"})
        self.wanted = wanted
        self.full = threading.Event()

    async def infer(self, url: str, body: bytes) -> Answer:
        """See `EchoEngine`."""
        if b"HANG" in body:
            self.wanted -= 1
            if self.wanted == 0:
                self.full.set()
        return await super().infer(url, body)


def in_thread(
    chunk: Chunk, engine: tuple[EngineThread, Lane], number: int = -1
) -> tuple[ChunkWork, Sent, Callable[[], Abort | None]]:
    sent, ended = Sent(), []
    work = ChunkWork(chunk, rows_of(chunk), *engine, number)
    thread = threading.Thread(target=lambda: ended.append(ChunkRun(chunk, work, "node", sent).run()))
    thread.start()

    def join() -> Abort | None:
        thread.join(60)
        assert not thread.is_alive()
        reason: Abort | None = ended[0]
        return reason

    return work, sent, join


@pytest.mark.parametrize(
    ("reason", "done", "code"),
    [
        (Abort.DRAIN, False, None),
        (Abort.USER, True, "terminated"),
        (Abort.EXPIRED, True, TOO_LATE),
        (Abort.ENGINE, False, None),
    ],
)
def test_giving_up_sends_what_is_done(start_engine: StartEngine, reason: Abort, done: bool, code: str | None) -> None:
    stuck = Stuck(2)
    engine = start_engine(stuck)
    work, sent, join = in_thread(make_chunk([chat("fast"), chat("HANG"), chat("HANG")], MODEL), engine)
    assert stuck.full.wait(60)
    work.abort(reason)
    work.abort(Abort.USER)  # the first reason stands
    assert join() is reason
    assert {pos: kind for (_, pos), (kind, _) in sent.rows().items()} == {0: Kind.OUTPUT}
    assert any(m.done for m in sent) is done
    assert [m.failure.code for m in sent if m.failure] == ([code] if code else [])
    if reason is not Abort.ENGINE:
        _, lane = engine
        wait_until(lambda: lane.outstanding == 0, 5, "aborted requests leave the engine")


def test_after_its_time_a_chunk_is_given_back_unread(start_engine: StartEngine) -> None:
    chunk = make_chunk([chat("fast"), chat("HANG")], MODEL, not_after=time.time() - 1)
    _, sent, join = in_thread(chunk, start_engine(Stuck(1)))
    assert join() is Abort.EXPIRED
    assert [(m.done, m.failure and m.failure.code) for m in sent] == [(True, TOO_LATE)]
    assert sent.rows() == {}


def test_cancelled_batches_are_forgotten(start_engine: StartEngine) -> None:
    stuck = Stuck(3)
    one, two = make_chunk([chat("HANG")] * 2, MODEL), make_chunk([chat("HANG"), chat("x")], MODEL)
    both = msgspec.structs.replace(one, slices=[*one.slices, *two.slices])
    work, sent, join = in_thread(both, start_engine(stuck))
    assert stuck.full.wait(60)
    work.forget({one.slices[0].batch, "unknown"})
    work.forget({two.slices[0].batch})
    assert join() is None
    assert sent[-1].done
    assert {batch for batch, _ in sent.rows()} <= {two.slices[0].batch}


def test_one_that_spoils_the_bulk_costs_one(start_engine: StartEngine) -> None:
    class Spoiled(echo.BulkEchoEngine):
        async def infer_bulk(self, requests: Any) -> list[Answer]:
            raise ValueError("one of them")

    entry = ModelVersion(source="none")
    engine = Spoiled(MODEL, entry, Settings(), {"BATCHMILL_ECHO_FAULTS": "BAD=404"})
    _, sent = run(make_chunk([chat("a"), chat("BAD"), chat("b")], MODEL), start_engine(engine))
    assert [sent.rows()[key][0] for key in sorted(sent.rows())] == [Kind.OUTPUT, Kind.ERROR, Kind.OUTPUT]


def test_a_death_is_told_once_and_nothing_false_is_sent(start_engine: StartEngine) -> None:
    deaths: list[str] = []
    engine = start_engine(deaths=deaths, FAULTS="HANG=hang,DIE=die")
    work, sent, join = in_thread(make_chunk([chat("HANG")] * 3 + [chat("DIE")], MODEL), engine)
    wait_until(lambda: bool(deaths), 5, "the engine's death")
    work.abort(Abort.ENGINE)
    assert join() is Abort.ENGINE
    assert sent == []
    assert len(deaths) == 1
    assert engine[0].dead


def test_the_lane_lets_a_bounded_number_in(start_engine: StartEngine) -> None:
    stuck = Stuck(inside_limit(4))
    thread, lane = start_engine(stuck)
    chunks = [make_chunk([chat("HANG")] * 10, MODEL) for _ in range(3)]
    runs = [in_thread(chunk, (thread, lane)) for chunk in chunks]
    assert stuck.full.wait(60)
    wait_until(lambda: lane.outstanding == 30, 5, "all requests in or before the engine")
    assert lane.inside == inside_limit(4) < 30
    assert stuck.stats().running == 4
    for work, _, join in runs:
        work.abort(Abort.DRAIN)
        assert join() is Abort.DRAIN


@pytest.mark.parametrize("at_once", [1, 2])
def test_isolated_requests_run_few_at_a_time_with_nothing_else_inside(start_engine: StartEngine, at_once: int) -> None:
    class Watched(echo.EchoEngine):
        """Notes how many are inside as each comes in."""

        def __init__(self) -> None:
            super().__init__(MODEL, ModelVersion(source="none", engine={"max_num_seqs": 4}), Settings(), {})
            self.seen: list[tuple[str, int]] = []
            self.go = asyncio.Event()
            self.inside = 0

        async def infer(self, url: str, body: bytes) -> Answer:
            self.inside += 1
            self.seen.append((msgspec.json.decode(body)["messages"][0]["content"], self.inside))
            try:
                await (self.go.wait() if b"before" in body else asyncio.sleep(0.002))
                return await super().infer(url, body)
            finally:
                self.inside -= 1

    engine = Watched()
    thread, lane = start_engine(engine)
    runs = []
    for text, count in (("before", 3), ("suspect", 4), ("later", 5)):
        chunk = make_chunk([chat(text)] * count, MODEL, isolated=at_once if text == "suspect" else 0)
        runs.append(in_thread(chunk, (thread, lane)))
        here = sum(len(work.rows()) for work, _, _ in runs)
        wait_until(lambda here=here: lane.inside + len(lane._waiting) == here, 5, "they are here")  # type: ignore[misc]
    assert lane.inside == 3
    assert lane.isolating
    assert lane.outstanding >= lane.limit, "nobody should fetch more"
    thread.call(engine.go.set)
    for _, sent, join in runs:
        assert join() is None
        assert {kind for kind, _ in sent.rows().values()} == {Kind.OUTPUT}
    assert max(inside for text, inside in engine.seen if text == "suspect") == at_once
    assert [text for text, _ in engine.seen] == ["before"] * 3 + ["suspect"] * 4 + ["later"] * 5
    assert max(inside for text, inside in engine.seen if text == "later") > 1
    assert not lane.isolating


def test_what_is_for_this_worker_alone_goes_before_the_others_in_the_order_it_came(start_engine: StartEngine) -> None:
    class Noting(echo.EchoEngine):
        """Notes what comes in."""

        def __init__(self) -> None:
            super().__init__(MODEL, ModelVersion(source="none", engine={"max_num_seqs": 1}), Settings(), {})
            self.seen: list[str] = []
            self.go = asyncio.Event()

        async def infer(self, url: str, body: bytes) -> Answer:
            self.seen.append(msgspec.json.decode(body)["messages"][0]["content"])
            await self.go.wait()
            return await super().infer(url, body)

    engine = Noting()
    thread, lane = start_engine(engine)
    joins, here = [], 0
    for text, ahead in (("shared", False), ("first", True), ("second", True), ("later", False)):
        chunk = make_chunk([chat(text)] * (lane.limit + 3), MODEL, ahead=ahead)
        joins.append(in_thread(chunk, (thread, lane))[2])
        here += lane.limit + 3
        wait_until(lambda here=here: lane.outstanding == here, 5, "they are here")  # type: ignore[misc]
    thread.call(engine.go.set)
    assert [join() for join in joins] == [None] * 4
    many = lane.limit
    assert engine.seen == [
        *["shared"] * many,
        *["first"] * (many + 3),
        *["second"] * (many + 3),
        *["shared"] * 3,
        *["later"] * (many + 3),
    ]


def test_the_breadcrumb_follows_the_engine_and_keeps_what_it_died_of(start_engine: StartEngine, tmp_path: Path) -> None:
    deaths: list[str] = []
    thread, _ = start_engine(deaths=deaths, FAULTS="HANG=hang,DIE=die", LATENCY_MS="1")
    crumb = Breadcrumb(tmp_path / "c", node="n", model=MODEL, life="1", slots=20)
    lane = Lane(thread, lambda: None, crumb)

    def inside() -> dict[str, list[int]]:
        found = breadcrumb.read(tmp_path / "c")
        assert found is not None
        return {batch: sorted(rows) for held in found.chunks for batch, rows in held.inside.items()}

    def begin(*texts: str) -> tuple[str, ChunkWork, Callable[[], Abort | None]]:
        chunk = make_chunk([chat(text) for text in texts], MODEL)
        work, _, join = in_thread(chunk, (thread, lane), crumb.hold(chunk))
        return chunk.slices[0].batch, work, join

    batch, first, join_first = begin("a", "HANG", "b", "HANG")
    wait_until(lambda: inside() == {batch: [1, 3]}, 5, "those that hang are named alone")
    other, second, join_second = begin("HANG")
    wait_until(lambda: inside() == {batch: [1, 3], other: [0]}, 5, "and those of another chunk")
    second.abort(Abort.DRAIN)
    wait_until(lambda: inside() == {batch: [1, 3]}, 5, "what is aborted is inside no more")
    deadly, third, join_third = begin("DIE")
    wait_until(lambda: bool(deaths), 5, "the engine dies")
    for work, join in ((first, join_first), (second, join_second), (third, join_third)):
        work.abort(Abort.ENGINE)
        join()
    assert inside() == {batch: [1, 3], deadly: [0]}


@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_what_waits_when_the_engine_dies_is_not_what_it_died_of(
    start_engine: StartEngine, tmp_path: Path, at_once: int
) -> None:
    deaths: list[str] = []
    thread, _ = start_engine(deaths=deaths, FAULTS="HANG=hang,DIE=die", LATENCY_MS="1")
    crumb = Breadcrumb(tmp_path / "c", node="n", model=MODEL, life="1", slots=20)
    lane = Lane(thread, lambda: None, crumb)
    inside = at_once or lane.limit
    texts = ["DIE", *["HANG"] * (inside - 1), *["waits"] * 20]
    chunk = make_chunk([chat(text) for text in texts], MODEL, isolated=at_once)
    work, _, join = in_thread(chunk, (thread, lane), crumb.hold(chunk))
    wait_until(lambda: bool(deaths), 60, "the engine dies")
    work.abort(Abort.ENGINE)
    join()
    found = breadcrumb.read(tmp_path / "c")
    assert found is not None
    assert [sorted(rows) for held in found.chunks for rows in held.inside.values()] == [list(range(inside))]


def test_what_the_engine_could_not_do_is_a_line_for_people(start_engine: StartEngine) -> None:
    faults = "E500=500,ABRT=abort,HANG=hang,PLAIN=502"
    texts = ["E500", "ABRT", "HANG"]
    chunk = make_chunk([chat(t) for t in texts], MODEL, timeout_s=0.05)
    _, sent = run(chunk, start_engine(FAULTS=faults))
    lines = [sent.rows()[key][1] for key in sorted(sent.rows())]
    assert lines[0]["response"]["status_code"] == 500
    assert lines[0]["error"] is None
    assert lines[1]["response"] is None
    assert lines[1]["error"]["code"] == "abort"
    assert lines[2]["error"] == {"code": "timeout", "message": "the engine did not answer within 0.05 s"}
    assert {kind for kind, _ in sent.rows().values()} == {Kind.RETRY}


class TestResultLines:
    """Bodies that are not one line of JSON never reach a file."""

    @pytest.mark.parametrize(
        ("status", "body", "expected"),
        [
            (400, b'{"a":\n1}', {"a": 1}),
            (
                500,
                b"Internal Server\nError",
                {"error": {"message": "Internal Server\nError", "type": "InternalServerError"}},
            ),
            (500, b"\xff", {"error": {"message": "\ufffd", "type": "InternalServerError"}}),
            (200, b'{"choices":[\n{"finish_reason":"stop"}]}', {"choices": [{"finish_reason": "stop"}]}),
        ],
    )
    def test_lines(self, start_engine: StartEngine, status: int, body: bytes, expected: Any) -> None:
        class Raw(echo.EchoEngine):
            async def infer(self, url: str, _body: bytes) -> Answer:
                return Answer(status, body)

        engine = Raw(MODEL, ModelVersion(source="none"), Settings(), {})
        _, sent = run(make_chunk([chat("x")], MODEL), start_engine(engine))
        [(_, line)] = sent.rows().values()
        assert line["response"]["body"] == expected


def test_an_answer_no_broker_would_take_is_an_error(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "MAX_ANSWER_BYTES", 1000)
    _, sent = run(make_chunk([chat("x" * 2000), chat("x")], MODEL), start_engine())
    found = [sent.rows()[key] for key in sorted(sent.rows())]
    assert [kind for kind, _ in found] == [Kind.ERROR, Kind.OUTPUT]
    assert found[0][1]["error"]["code"] == "answer_too_large"


def test_an_engine_that_cannot_start_says_why() -> None:
    class Broken(echo.EchoEngine):
        async def start(self) -> None:
            raise EngineDead("no weights")

    thread = EngineThread(lambda: Broken(MODEL, ModelVersion(source="none"), Settings(), {}), lambda _: None)
    with pytest.raises(EngineDead, match="no weights"):
        thread.start()
    assert not thread.ready
    assert thread.stop(5)


def test_waiting_for_an_engine_can_be_given_up() -> None:
    class GaveUp(Exception):
        pass

    def give_up() -> None:
        raise GaveUp

    env = {"BATCHMILL_ECHO_START_S": "60"}
    thread = EngineThread(lambda: echo.make(MODEL, ModelVersion(source="none"), Settings(), env), lambda _: None)
    with pytest.raises(GaveUp):
        thread.start(give_up)
    assert thread.stop(5)


def test_a_broken_loop_is_a_death() -> None:
    deaths: list[str] = []
    told = threading.Event()

    def on_death(reason: str) -> None:
        deaths.append(reason)
        told.set()

    thread = EngineThread(lambda: echo.make(MODEL, ModelVersion(source="none"), Settings(), {}), on_death)
    thread.start()

    async def leave() -> None:
        raise SystemExit(1)

    tasks: list[asyncio.Task[None]] = []
    thread.call(lambda: tasks.append(thread.loop.create_task(leave())))
    assert told.wait(60)
    assert deaths == ["its loop ended: SystemExit"]
    assert isinstance(tasks[0].exception(), SystemExit)  # or asyncio logs, when it is collected, that nobody asked
    thread.stop(5)
