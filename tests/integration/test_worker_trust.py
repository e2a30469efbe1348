"""What a worker does with messages it should not trust, and what it never tells."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from celery import Celery

from common import ids
from common.broker import make_app
from common.codec import PURPOSE_CHUNK, Codec
from common.live import LiveState
from common.messages import TASK_INFER, TOO_LATE, Chunk, Kind, Slice, encode, infer_queue
from common.settings import Settings
from tests.conftest import ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.chunks import Dispatch, StartWorker, chat, dead_letters, make_chunk
from tests.support.ports import wait_until
from tests.support.processes import Processes

QUEUE = infer_queue(ECHO_MODEL)


@pytest.fixture
def control(fleet_settings: Settings) -> Iterator[Celery]:
    """An application to ask and watch workers with, as Flower does."""
    app = make_app(fleet_settings)
    yield app
    app.close()


def test_bad_messages_go_to_the_dead_letters_with_their_reason(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings
) -> None:
    worker = start_worker()
    good = make_chunk([chat("x")], ECHO_MODEL)

    def fresh(**fields: Any) -> Chunk:
        return msgspec.structs.replace(make_chunk([chat("x")], ECHO_MODEL), **fields)

    blob = dispatch.seal(good)
    forged = Codec(PURPOSE_CHUNK, {"k1": b"0" * 32}, "k1").seal(QUEUE, encode(good))
    rows = good.slices[0]
    sent: list[tuple[str, Chunk, bytes]] = [
        ("signature does not fit", fresh(), forged),
        ("signature does not fit", fresh(), blob[:-5] + bytes([blob[-5] ^ 1]) + blob[-4:]),
        ("signature does not fit", fresh(), dispatch.seal(good, "infer.other.1")),
        ("signature does not fit", fresh(), dispatch.results.seal(QUEUE, encode(good))),
        ("not a Batchmill message", fresh(), b"rubbish"),
        ("chunk version 2", old := fresh(v=2), dispatch.seal(old)),
        ("not a chunk", fresh(), dispatch.chunks.seal(QUEUE, b"\x93\x01\x02\x03")),
        ("task id is not the chunk's", fresh(), blob),
        ("another model version", other := fresh(model="other@1"), dispatch.seal(other, QUEUE)),
        ("no results queue", away := fresh(reply_to="intake"), dispatch.seal(away)),
        ("batch id", odd := fresh(slices=[Slice("../x", 0, 1, 1, rows.rows)]), dispatch.seal(odd)),
        ("outside its slice", out := fresh(slices=[Slice(rows.batch, 5, 6, 1, rows.rows)]), dispatch.seal(out)),
        ("rows do not decode", bad := fresh(slices=[Slice(rows.batch, 0, 1, 1, b"\xff")]), dispatch.seal(bad)),
    ]
    with dead_letters(fleet_settings) as wait:
        for _, chunk, raw in sent:
            shown = "requests=1"
            dispatch.publisher.begin_task(QUEUE, TASK_INFER, chunk.id, raw, shown)
            dispatch.publisher.settle()
        found = wait(len(sent))
    reasons = sorted(dead.reason for dead in found)
    for reason, _, raw in sent:
        match = next((d for d in found if reason in d.reason and d.body == raw), None)
        assert match is not None, (reason, reasons)
        assert match.queue == QUEUE
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    assert dispatch.wait(dispatch.send(good)).kinds() == {0: Kind.OUTPUT}
    assert worker.alive


def test_foreign_messages_are_neither_obeyed_nor_deleted(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings
) -> None:
    """Celery would run callbacks out of a JSON body, and ack (delete) what it cannot decode, or die of it."""
    worker = start_worker()
    callback = {"task": "evil.task", "args": [], "kwargs": {}, "options": {"queue": "evil"}, "immutable": True}
    embed = {"callbacks": [callback], "chain": [callback], "errbacks": [callback], "chord": None}
    chunk = make_chunk([chat("x")], ECHO_MODEL)
    headers = {"task": TASK_INFER, "id": chunk.id, "lang": "py", "argsrepr": "", "kwargsrepr": ""}
    text = "a secret prompt"
    foreign: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
        ([["x"], {}, embed], headers, {"serializer_name": "json"}),
        ([1], headers, {"serializer_name": "json"}),
        (5, headers, {"serializer_name": "json"}),
        ({"task": TASK_INFER, "id": chunk.id, "args": [text], "kwargs": {}}, {}, {"serializer_name": "json"}),
        (b"\x80\x04secret.", headers, {"content_type": "application/x-python-serialize", "content_encoding": "binary"}),
        (b"{not json", headers, {"content_type": "application/json", "content_encoding": "utf-8"}),
        (text.encode(), {"task": "unknown.task", "id": chunk.id}, {}),
        (text.encode(), {"task": ["a"], "id": chunk.id}, {}),
        (text.encode(), {"task": TASK_INFER, "id": 7}, {}),
        (text.encode(), {"task": TASK_INFER, "id": "../../x"}, {}),
        (text.encode(), {}, {}),
        (text.encode(), headers | {"compression": "application/x-gzip"}, {}),
    ]
    with dead_letters(fleet_settings) as wait:
        for body, head, how in foreign:
            dispatch.publisher.publish(QUEUE, body, headers=head, **_serializer(how))
        found = wait(len(foreign))
    assert all(dead.reason and dead.queue == QUEUE for dead in found)
    assert sum(text.encode() in dead.body for dead in found) >= 5
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    # Smuggled in the headers of a genuine chunk, they are not obeyed either.
    genuine = make_chunk([chat("x")], ECHO_MODEL)
    evil = {"callbacks": [callback], "chain": [callback], "errbacks": [callback], "timelimit": [0.001, 0.001]}
    evil |= {"eta": "2100-01-01T00:00:00+00:00", "expires": "2000-01-01T00:00:00+00:00", "reply_to": "evil"}
    evil |= {"task": TASK_INFER, "id": genuine.id, "argsrepr": text, "kwargsrepr": text, "shadow": text}
    dispatch.publisher.publish(QUEUE, dispatch.seal(genuine), headers=evil, correlation_id=genuine.id)
    assert dispatch.wait(genuine).kinds() == {0: Kind.OUTPUT}
    assert "evil" not in broker.queues()
    assert broker.depth("evil") == (0, 0)
    assert worker.alive
    assert text not in worker.text


def _serializer(how: dict[str, str]) -> dict[str, Any]:
    # Raw bytes with a content type of their own pass through kombu unserialised.
    return how if "content_type" not in how else {**how, "serializer_name": None}


def test_prompts_are_in_no_log_no_event_and_no_answer_to_a_monitor(
    dispatch: Dispatch, start_worker: StartWorker, control: Celery, tmp_path: Path
) -> None:
    secret = "xyzzy-the-secret"
    worker = start_worker(
        BATCHMILL_ECHO_FAULTS=f"RAIS=raise,E500=500,HELD=until:{tmp_path}/let-go",
        BATCHMILL_TELEMETRY_LOG_LEVEL="debug",
    )
    seen: list[dict[str, Any]] = []
    watching = threading.Event()
    finished = threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        seen.append(event)
        watching.set()
        if event["type"] == "task-succeeded":
            finished.set()

    def watch() -> None:
        with control.connection_for_read() as connection:
            receiver = control.events.Receiver(connection, handlers={"*": on_event})
            while not finished.is_set():
                try:
                    receiver.capture(limit=None, timeout=1, wakeup=True)
                except TimeoutError:
                    continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert watching.wait(60), "no heartbeat event"
    bodies = [chat(f"{secret} {name}") for name in ("RAIS", "E500", "HELD", "fine")]
    chunk = dispatch.send(make_chunk([*bodies, b'{"messages": "%s"}' % secret.encode()], ECHO_MODEL))
    # All but the one that is held.
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 4, 15, "quick rows")
    inspect = control.control.inspect(timeout=30, limit=1)
    answers = {
        "active": inspect.active(safe=False),
        "reserved": inspect.reserved(safe=False),
        "scheduled": inspect.scheduled(safe=False),
        "query": inspect.query_task(chunk.id),
        "stats": inspect.stats(),
        "registered": inspect.registered(),
        "conf": inspect.conf(),
    }
    [active] = answers["active"].values()
    assert active[0]["args"] == f"batch={chunk.slices[0].batch} chunk={chunk.id} requests=5"
    [stats] = answers["stats"].values()
    pool = stats["pool"]
    assert (pool["model"], pool["engine"], pool["device"]) == ([ECHO_MODEL], ["echo"], ["cpu"])
    assert (pool["max-num-seqs"], pool["running-requests"]) == (64, 1)
    (tmp_path / "let-go").touch()
    dispatch.wait(chunk)
    assert finished.wait(60), "no task-succeeded event"
    watcher.join(60)
    received = [e for e in seen if e["type"] == "task-received"]
    assert received
    assert received[0]["args"] == f"batch={chunk.slices[0].batch} chunk={chunk.id} requests=5"
    assert worker.stop() == 0
    for where, text in (("events", json.dumps(seen)), ("answers", repr(answers)), ("log", worker.text)):
        assert secret not in text, where


def test_a_revoked_chunk_is_answered_as_far_as_it_went_and_acked(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, control: Celery, tmp_path: Path
) -> None:
    worker = start_worker(BATCHMILL_ECHO_FAULTS=f"HANG=hang,HELD=until:{tmp_path}/let-go")
    chunk = dispatch.send(make_chunk([chat("HANG"), chat("x")], ECHO_MODEL))
    other = dispatch.send(make_chunk([chat("HELD")], ECHO_MODEL))
    dispatch.wait_taken(other)
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 1, 10, "the quick row")
    control.control.revoke(chunk.id, terminate=True)
    answers = dispatch.wait(chunk)
    assert answers.kinds() == {1: Kind.OUTPUT}
    assert answers.last.failure is not None
    assert answers.last.failure.code == "terminated"
    broker.wait_depth(QUEUE, ready=0, unacked=1)
    (tmp_path / "let-go").touch()
    assert dispatch.wait(other, 40).kinds() == {0: Kind.OUTPUT}
    # The slots are free again.
    for i in range(4):
        assert dispatch.wait(dispatch.send(make_chunk([chat(f"{i}")], ECHO_MODEL))).kinds() == {0: Kind.OUTPUT}
    assert worker.stop() == 0


def test_rows_of_cancelled_batches_are_dropped(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings, tmp_path: Path
) -> None:
    start_worker(BATCHMILL_ECHO_FAULTS=f"HANG=hang,HELD=until:{tmp_path}/let-go")
    live = LiveState(fleet_settings)
    batch = ids.new_batch_id()
    whole = dispatch.send(make_chunk([chat("HANG"), chat("HANG")], ECHO_MODEL, batch=batch))
    part = make_chunk([chat("HELD")], ECHO_MODEL)
    part = msgspec.structs.replace(
        part, slices=[*part.slices, *make_chunk([chat("HANG")], ECHO_MODEL, batch=batch, start=9).slices]
    )
    dispatch.send(part)
    broker.wait_depth(QUEUE, ready=0, unacked=2)
    live.mark_cancelled(batch)
    assert dispatch.wait(whole).rows == []
    (tmp_path / "let-go").touch()
    answers = dispatch.wait(part)
    assert answers.kinds() == {0: Kind.OUTPUT}
    assert {p.batch for m in answers.messages for p in m.parts} == {part.slices[0].batch}
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    live.close()


def test_a_chunk_past_its_time_is_given_back(broker: Broker, dispatch: Dispatch, start_worker: StartWorker) -> None:
    import time

    worker = start_worker(BATCHMILL_ECHO_FAULTS="HANG=hang")
    late = dispatch.send(make_chunk([chat("x")], ECHO_MODEL, not_after=time.time() - 1))
    running = dispatch.send(make_chunk([chat("HANG")], ECHO_MODEL, not_after=time.time() + 3))
    worker.wait_line(rf"{late.id}.*succeeded.*too late", 10)
    worker.wait_line(rf"{running.id}.*succeeded.*too late", 15)
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    # Said, not just dropped: should this worker's clock be wrong, the coordinator sends the rows again.
    for chunk in (late, running):
        last = dispatch.wait(chunk).last
        assert last.failure is not None
        assert last.failure.code == TOO_LATE


def test_held_messages_are_not_delivered_again_by_redis(
    redis_broker: Broker, processes: Processes, request: pytest.FixtureRequest
) -> None:
    """Work that takes several visibility timeouts starts once: kombu sweeps every 10 s."""
    from common import settings
    from tests.conftest import make_fleet_env
    from tests.integration.conftest import READY

    env = make_fleet_env(processes.folder, redis_broker.url, redis_broker.state_url)
    env |= {"BATCHMILL_ECHO_FAULTS": "SLOW=slow:17", "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "6"}
    workers = [processes.worker(env, ECHO_MODEL, "--no-supervisor", "--name", f"w{i}") for i in range(2)]
    for worker in workers:
        worker.wait_line(READY)
    dispatch = Dispatch(settings.load(env=env))
    chunk = dispatch.send(make_chunk([chat("SLOW")], ECHO_MODEL))
    answers = dispatch.wait(chunk, 60)
    assert answers.kinds() == {0: Kind.OUTPUT}
    redis_broker.wait_depth(QUEUE, ready=0, unacked=0)
    wait_until(lambda: any("succeeded in" in w.text for w in workers), 30, "the end is in a log")
    text = workers[0].text + workers[1].text
    assert "joins it" not in text
    assert "answered already" not in text
    assert text.count("succeeded in") == 1
    assert len(answers.messages) == 1
    dispatch.close()
