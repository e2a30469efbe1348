"""The coordinator on real brokers, with a worker that has no engine: what it does when nothing breaks but requests."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pytest
from kombu.message import Message

from common.broker import codecs
from common.ids import new_chunk_id
from common.local_group import LocalGroup
from common.messages import QUEUE_DEAD, VERSION, CacheFacts, Kind, Results, Row, encode, infer_queue
from common.publisher import Publisher
from common.settings import Settings
from common.store import LocalStore, Store, open_store
from producers.batch import Command, Heartbeat, folder
from producers.coordinator import control, live_view, segments
from producers.coordinator.aggregator import Aggregator
from producers.coordinator.finalizer import LARGE
from producers.coordinator.ledger import Ledger
from producers.coordinator.records import Evidence, Type, decode
from producers.coordinator.segments import Record
from tests.support.brokers import Broker, RabbitBroker
from tests.support.coordinators import (
    ChunkFails,
    FakeWorker,
    answer_all,
    check_outputs,
    coordinating,
    failed_line,
    line_of,
    lines,
    make_batch,
    part_of,
    status_of,
    wait_status,
)
from tests.support.ports import PATIENCE_S, wait_until


@pytest.fixture
def calm(fleet_settings: Settings) -> Settings:
    """Small chunks and a small window; time limits that no test here waits for, nor a busy machine runs into."""
    scheduler = msgspec.structs.replace(
        fleet_settings.scheduler, lease_s=30.0, unclaimed_s=30.0, chunk_requests=50, queue_size=1000
    )
    inference = msgspec.structs.replace(fleet_settings.inference, batch_size=64)
    return msgspec.structs.replace(fleet_settings, scheduler=scheduler, inference=inference)


def test_answers_batches_of_all_sizes_in_order(calm: Settings, store: Store) -> None:
    invalid = [0, 7, 8, 499, 500, 999]
    batches = [
        make_batch(store, 1000, window=300),
        make_batch(store, 1000, invalid=invalid, window=300),
        *[make_batch(store, n) for n in (1, 2, 3, 51)],
        make_batch(store, 3, invalid=[0, 1, 2]),
    ]
    with coordinating(calm, store), FakeWorker(calm) as worker:
        for batch in batches:
            status = wait_status(store, batch, "completed")
            assert status.reason is None
            assert status.request_counts.total == batch.requests
            assert status.request_counts.completed == batch.planned
            assert status.usage.prompt_tokens == 7 * batch.planned
    for batch in batches:
        failed = invalid if batch.invalid == 6 else range(3) if batch.invalid == 3 else []
        check_outputs(store, batch, failed)
        summary = msgspec.json.decode(store.read(f"{folder(batch.id)}/summary.json"))
        assert summary["completed"] == batch.planned
        assert summary["usage"]["completion_tokens"] == 3 * batch.planned
        assert summary["output"]["lines"] == batch.planned
    assert store.list("active/0") == []
    # Nothing was asked twice, and small batches shared chunks.
    assert len(worker.answered) == len(set(worker.answered)) == sum(b.planned for b in batches)
    assert max(len(chunk.slices) for chunk in worker.taken) > 1
    assert max(sum(s.end - s.start for s in c.slices) for c in worker.taken) <= 50


def test_a_batch_that_comes_later_is_noticed_at_once(calm: Settings, store: Store) -> None:
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        wait_until(lambda: bool(running.core.workers), 10, "the worker is seen", 0.01)
        began = time.monotonic()
        batch = make_batch(store, 10)
        wait_until(lambda: bool(worker.taken), 60, "the first chunk", 0.005)
        # Not only by the look of once a minute.
        assert time.monotonic() - began < control.RECOVER_S / 2
        wait_status(store, batch, "completed")


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_status_and_summary_tell_how_full_the_result_cache_is(calm: Settings, store: Store, broker: Broker) -> None:
    seen = CacheFacts(entries=12, bytes=3400, capacity_bytes=1 << 30, evicted=5)
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.facts.cache = seen
        worker._live.announce(worker.facts)
        wait_until(lambda: any(w.cache == seen for w in running.core.workers or ()), 20, "the cache is known")
        for batch, expected in ((make_batch(store, 10, cache="on"), seen), (make_batch(store, 10), None)):
            assert wait_status(store, batch, "completed").cache == expected
            summary = msgspec.json.decode(store.read(f"{folder(batch.id)}/summary.json"))
            assert summary["cache"] == (None if expected is None else msgspec.to_builtins(seen))


def test_a_batch_whose_submit_was_killed_before_its_marker_is_found(calm: Settings, store: Store) -> None:
    assert isinstance(store, LocalStore)
    batch = make_batch(store, 10, activate=False)
    os.close(store.create_locked(f"incoming/{batch.id}.lock"))
    with coordinating(calm, store), FakeWorker(calm):
        wait_status(store, batch, "completed")
    check_outputs(store, batch)
    assert store.list("incoming") == []


def test_the_window_bounds_what_waits_in_the_broker(calm: Settings, store: Store, broker: Broker) -> None:
    scheduler = msgspec.structs.replace(calm.scheduler, queue_size=200, unclaimed_s=60)
    settings = msgspec.structs.replace(calm, scheduler=scheduler)
    batch = make_batch(store, 2000)
    with coordinating(settings, store) as running, FakeWorker(settings) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        wait_until(lambda: len(running.core.book.out) == 4, 10, "the window is full", 0.01)
        assert status_of(store, batch).status in ("queued", "in_progress")
        wait_until(lambda: status_of(store, batch).in_flight == 200, 5, "the status tells what is in flight")
        worker.gate.set()
        wait_status(store, batch, "completed")
    check_outputs(store, batch)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_small_batch_waits_for_no_more_than_the_window(calm: Settings, store: Store, broker: Broker) -> None:
    large = make_batch(store, 5000)
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        progress = running.core.book.batches[large.id]
        wait_until(lambda: progress.outstanding >= 200, 10, "chunks of the large one are out", 0.01)
        small = make_batch(store, 60)
        wait_until(lambda: small.id in running.core.book.batches, 10, "the small one is taken up", 0.01)
        worker.gate.set()
        wait_status(store, small, "completed")
        wait_status(store, large, "completed", timeout=90)
    before = max(n for n, (batch_id, _) in enumerate(worker.answered) if batch_id == small.id)
    # A window of the large one that was out already, and at most one chunk of it beside those of the small one.
    assert before <= (calm.scheduler.queue_size or 0) + 60 + 2 * 50


def test_errors_are_final_retries_are_repeated_and_the_last_line_stands(calm: Settings, store: Store) -> None:
    settings = msgspec.structs.replace(calm, scheduler=msgspec.structs.replace(calm.scheduler, retry_times=1))

    def answer(batch_id: str, row: Row, attempt: int) -> tuple[Kind, bytes] | None:
        if row.index % 100 == 1:
            return Kind.ERROR, failed_line(batch_id, row, 400)
        if row.index % 100 == 2:
            return Kind.RETRY, failed_line(batch_id, row, 500 + attempt)
        if row.index % 100 == 3 and attempt == 1:
            return Kind.RETRY, failed_line(batch_id, row, 500)
        return answer_all(batch_id, row, attempt)

    batch = make_batch(store, 500)
    with coordinating(settings, store), FakeWorker(settings, answer=answer):
        status = wait_status(store, batch, "completed")
    failed = sorted([*range(1, 500, 100), *range(2, 500, 100)])
    assert (status.request_counts.completed, status.request_counts.failed) == (490, 10)
    assert status.resent == 10
    check_outputs(store, batch, failed)
    codes = {line["custom_id"]: line["response"]["status_code"] for line in lines(store, batch, "errors.jsonl")}
    assert codes == {f"r{i}": 400 if i % 100 == 1 else 502 for i in failed}


def test_a_chunk_that_fails_is_tried_again_and_given_up(calm: Settings, store: Store) -> None:
    settings = msgspec.structs.replace(calm, scheduler=msgspec.structs.replace(calm.scheduler, retry_times=1))

    def answer(batch_id: str, row: Row, attempt: int) -> tuple[Kind, bytes] | None:
        if attempt == 1 or row.index == 5:
            raise ChunkFails("no engine")
        return answer_all(batch_id, row, attempt)

    first, second = make_batch(store, 5), make_batch(store, 6)
    with coordinating(settings, store), FakeWorker(settings, answer=answer):
        wait_status(store, first, "completed")
        wait_status(store, second, "completed")
    check_outputs(store, first)
    errors = list(lines(store, second, "errors.jsonl"))
    assert "r5" in {line["custom_id"] for line in errors}
    assert {line["error"]["code"] for line in errors} == {"engine_error"}
    assert {line["error"]["message"] for line in errors} == {"no engine"}


def test_results_that_come_twice_count_once(calm: Settings, store: Store) -> None:
    batch = make_batch(store, 300)
    with coordinating(calm, store) as running, FakeWorker(calm, copies=2):
        status = wait_status(store, batch, "completed")
        later = make_batch(store, 10)
        wait_status(store, later, "completed")
        wait_until(lambda: running.core.book.batches == {}, 10, "both are let go")
    assert status.request_counts.completed == 300
    assert status.usage.prompt_tokens == 7 * 300
    check_outputs(store, batch)


def test_no_result_is_acknowledged_before_its_record_is_on_the_disk(
    calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a process wrote outlives its kill -9, not a power cut: only the order of the calls can show this.
    disk = threading.Lock()
    looks: list[float] = []
    acked: list[Message] = []
    sync, look, ack = Ledger.sync, Aggregator._acknowledge, Message.ack

    def slow_sync(ledger: Ledger) -> int:
        with disk:
            return sync(ledger)

    def counted_look(aggregator: Aggregator) -> None:
        look(aggregator)
        looks.append(time.monotonic())

    def told_ack(message: Message, *args: Any, **named: Any) -> None:
        if message.delivery_info["routing_key"] == "results.0":
            acked.append(message)
        ack(message, *args, **named)

    monkeypatch.setattr(Ledger, "sync", slow_sync)
    monkeypatch.setattr(Aggregator, "_acknowledge", counted_look)
    monkeypatch.setattr(Message, "ack", told_ack)
    batch = make_batch(store, 50)
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        with disk:
            worker.gate.set()
            progress = running.core.book.batches[batch.id]
            wait_until(lambda: progress.complete, 30, "all results are taken in", 0.01)
            seen = len(looks)
            wait_until(lambda: len(looks) > seen + 5, 30, "the aggregator has looked again", 0.01)
            assert acked == []
        wait_status(store, batch, "completed")
        wait_until(lambda: len(acked) == 1, 30, "it is acknowledged")
    check_outputs(store, batch)


def test_bad_messages_are_dead_lettered_and_hold_up_nothing(calm: Settings, store: Store, broker: Broker) -> None:
    chunks, results = codecs(calm)
    name = "results.0"
    good = Results(VERSION, new_chunk_id(), "m@1", "n", 0, True, [])
    part = part_of("batch_x", [(0, Kind.OUTPUT, b"{}\n")])
    part.lines = b"{}x"
    other = encode(msgspec.structs.replace(good, v=2))
    bad = {
        "not a Batchmill message": b"rubbish",
        "signature does not fit": results.seal("results.1", encode(good)),
        "results version 2, this coordinator speaks 1": results.seal(name, other),
        "a result line does not end where it should": results.seal(
            name, encode(msgspec.structs.replace(good, parts=[part]))
        ),
        "signature does not fit ": chunks.seal(name, encode(good)),
    }
    publisher = Publisher(calm)
    with coordinating(calm, store) as running:
        for blob in bad.values():
            publisher.publish(name, blob)
        publisher.publish(name, {"a": 1}, serializer_name="json")
        batch = make_batch(store, 100)
        with FakeWorker(calm):
            wait_status(store, batch, "completed")
        broker.wait_depth(name, ready=0, unacked=0)
        folder = running.core.ledger.folder
        wait_until(lambda: len(_evidence(folder)) == 6, 30, "there is evidence of each")
        broker.wait_depth(QUEUE_DEAD, ready=0, unacked=0)
        evidence = _evidence(folder)
    publisher.close()
    assert [found.reason for found in evidence] == [*[reason.strip() for reason in bad], "not a Batchmill message"]
    assert {found.queue for found in evidence} == {name}


def _evidence(wal: object) -> list[Evidence]:
    found = [decode(item.type, item.payload) for item in _records(wal) if item.type is Type.EVIDENCE]
    return [content for content in found if isinstance(content, Evidence)]


def _records(wal: object) -> list[Record]:
    found = []
    for path in sorted(Path(str(wal)).iterdir()):
        if segments.parse_name(path.name):
            fd = os.open(path, os.O_RDONLY)
            found += [i for i in segments.scan(fd, path.stat().st_size) if isinstance(i, Record)]
            os.close(fd)
    return found


def test_a_batch_whose_workers_all_load_says_so(calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "PERIOD_S", 0.1)
    with coordinating(calm, store), FakeWorker(calm) as worker:
        worker.gate.clear()
        worker.facts.state = "loading"
        batch = make_batch(store, 100)
        wait_until(lambda: status_of(store, batch).reason == "loading_model", 10, "the status says what it waits for")
        with FakeWorker(calm, node="other") as other:
            other.gate.clear()
            wait_until(lambda: status_of(store, batch).reason is None, 10, "one that is ready can answer")
            other.gate.set()
            worker.gate.set()
            wait_status(store, batch, "completed")


def test_a_command_that_comes_too_late_is_put_away(
    calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "RECOVER_S", 0.3)
    batch = make_batch(store, 10)
    with coordinating(calm, store), FakeWorker(calm):
        wait_status(store, batch, "completed")
        wait_until(lambda: store.list("active/0") == [], 10, "the batch has ended")
        command = Command(command="cancel", at=time.time())
        store.create_exclusive(f"control/{batch.id}/01.json", msgspec.json.encode(command))
        wait_until(lambda: store.list("control") == [], 10, "the command is gone")
    assert status_of(store, batch).status == "completed"


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_redis_that_fills_up_gets_nothing_more(
    calm: Settings, store: Store, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = int(broker.state.info("memory")["used_memory"])
    monkeypatch.setattr(live_view, "PERIOD_S", 0.1)
    with coordinating(calm, store) as running:
        broker.state.config_set("maxmemory", int(used * 1.3))
        try:
            wait_until(lambda: "broker_memory" in running.core.troubles, 10, "it is noticed")
            batch = make_batch(store, 100)
            wait_until(lambda: status_of(store, batch).reason == "broker_memory", 10, "the status says so")
            assert broker.depth(infer_queue(batch.model)).ready == 0
            # Nor is it taken for one that is away, when it refuses all that would need memory.
            broker.state.config_set("maxmemory", 1)
            broker.state.client_kill_filter(_type="normal", skipme=True)
            time.sleep(2)
            wait_until(lambda: "broker_unreachable" not in running.core.troubles, 60, "it is known to answer")
            wait_until(lambda: status_of(store, batch).reason == "broker_memory", 60, "the status says so still")
        finally:
            broker.state.config_set("maxmemory", 0)
        with FakeWorker(calm):
            assert wait_status(store, batch, "completed").reason is None


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_redis_without_a_bound_of_its_own_is_bounded_by_its_machine(
    calm: Settings, store: Store, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = broker.state.info("memory")
    assert facts["maxmemory"] == 0
    monkeypatch.setattr(live_view, "MEMORY_SHARE", facts["used_memory"] / facts["total_system_memory"] / 2)
    with coordinating(calm, store) as running:
        wait_until(lambda: "broker_memory" in running.core.troubles, 10, "it is noticed")


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_rabbitmq_that_blocks_publishers_is_waited_for_and_named(
    calm: Settings, store: Store, broker: RabbitBroker
) -> None:
    first = make_batch(store, 10)
    with coordinating(calm, store), FakeWorker(calm):
        wait_status(store, first, "completed")
        broker.server.memory_alarm(True)
        try:
            batch = make_batch(store, 2000)
            wait_until(lambda: status_of(store, batch).reason == "broker_memory", 20, "the status says so")
        finally:
            broker.server.memory_alarm(False)
        assert wait_status(store, batch, "completed").reason is None
    check_outputs(store, batch)


def test_a_store_that_cannot_be_read_for_a_while_fails_no_batch(
    calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(store, 100)
    real = LocalStore.read_range

    def broken(self: LocalStore, path: str, start: int, length: int) -> bytes:
        if path.startswith(folder(batch.id)):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, path, start, length)

    monkeypatch.setattr(LocalStore, "read_range", broken)
    other = make_batch(store, 100)
    with coordinating(calm, store), FakeWorker(calm):
        wait_until(lambda: status_of(store, batch).reason == "store_unreachable", 10, "the status says so")
        assert wait_status(store, other, "completed").reason is None
        monkeypatch.setattr(LocalStore, "read_range", real)
        assert wait_status(store, batch, "completed").reason is None
    check_outputs(store, batch)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_batch_in_an_object_store(calm: Settings, tmp_path: Path) -> None:
    where = msgspec.structs.replace(calm.store, url=f"memory://{tmp_path.name}")
    settings = msgspec.structs.replace(calm, store=where)
    store = open_store(f"memory://{tmp_path.name}")
    assert not isinstance(store, LocalStore)
    batch = make_batch(store, 500, invalid=[3], window=100)
    with coordinating(settings, store), FakeWorker(settings):
        wait_status(store, batch, "completed")
        wait_until(lambda: store.list("active/0") == [], 10, "the marker is gone")
    check_outputs(store, batch, [3])
    assert not store.exists("coordinator/0.json")


def test_many_small_batches(calm: Settings, store: Store) -> None:
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        wait_until(lambda: bool(running.core.workers), 10, "the worker is seen", 0.01)
        batches = [make_batch(store, 7) for _ in range(60)]
        for batch in batches:
            wait_status(store, batch, "completed")
        wait_until(lambda: store.list("active/0") == [], 10, "all have ended")
        wait_until(lambda: running.core.book.batches == {}, 10, "all are let go")
        wait_until(lambda: running.core.ledger.segment_count <= 1, 10, "their records are let go")
    for batch in batches:
        check_outputs(store, batch)
    assert len(worker.answered) == 420
    assert len(worker.taken) < 60


def test_commands_that_mean_nothing_are_put_away(calm: Settings, store: Store) -> None:
    batch = make_batch(store, 10)
    with coordinating(calm, store):
        store.create_exclusive(f"control/{batch.id}/01.json", b"{")
        store.create_exclusive(f"control/{batch.id}/02.json", msgspec.json.encode(Command(command="sing", at=0.0)))
        wait_until(lambda: store.list(f"control/{batch.id}") == [], 10, "the commands are gone")
        with FakeWorker(calm):
            wait_status(store, batch, "completed")


def test_one_batchs_damage_fails_it_alone(calm: Settings, store: Store) -> None:
    rows, plan, missing, json = (make_batch(store, 500, activate=False) for _ in range(4))
    raw = bytearray(store.read(f"{folder(rows.id)}/rows"))
    raw[len(raw) // 2 :] = b"\xc1" * (len(raw) - len(raw) // 2)
    store.put_atomic(f"{folder(rows.id)}/rows", bytes(raw))
    store.put_atomic(f"{folder(plan.id)}/plan", store.read(f"{folder(plan.id)}/plan")[:1000])
    store.delete(f"{folder(missing.id)}/rows")
    store.put_atomic(f"{folder(json.id)}/batch.json", b"{")
    store.create_exclusive("active/0/not-a-batch", b"")
    for batch in (rows, plan, missing, json):
        store.create_exclusive(f"active/0/{batch.id}", b"")
    good = make_batch(store, 500)
    with coordinating(calm, store), FakeWorker(calm):
        wait_status(store, good, "completed")
        found = [wait_status(store, batch, "failed") for batch in (rows, plan, missing, json)]
    check_outputs(store, good)
    reasons = [status.reason or "" for status in found]
    for reason, name in zip(reasons, ("rows", "plan", "rows", "batch.json"), strict=True):
        assert f"/{name}:" in reason
        assert "submit the file again" in reason
        assert "\n" not in reason
    # What was answered before the damage is kept.
    kept = [line["custom_id"] for line in lines(store, rows, "output.jsonl")]
    assert 0 < len(kept) < 500
    assert store.list("active/0") == ["not-a-batch"]


def test_the_heartbeat_tells_who_leads_and_is_withdrawn(calm: Settings, store: Store) -> None:
    with coordinating(calm, store) as running:
        epoch = running.core.epoch
        beat = msgspec.json.decode(store.read("coordinator/0.json"), type=Heartbeat)
        assert (beat.epoch, time.time() - beat.at < 10) == (epoch, True)
    assert not store.exists("coordinator/0.json")


def test_a_full_ledger_disk_stops_and_goes_on(
    calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    full = [False]
    monkeypatch.setattr("producers.coordinator.ledger.Ledger.has_space", lambda self: not full[0])
    batch = make_batch(store, 3000)
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        full[0] = True
        running.core.ledger._unchecked = 0  # It looks at the disk before the next record.
        worker.gate.set()
        wait_until(lambda: status_of(store, batch).reason == "disk_full", 20, "the status says so", 0.02)
        settled = running.core.book.batches[batch.id].rows.settled.count
        wait_until(lambda: broker.depth("results.0").unacked > 0, 10, "results are kept in the broker")
        assert running.core.book.batches[batch.id].rows.settled.count - settled < 3000
        full[0] = False
        wait_status(store, batch, "completed")
    assert status_of(store, batch).reason is None
    check_outputs(store, batch)


def test_outputs_that_cannot_be_written_wait_and_hold_up_no_other_batch(
    calm: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"output.jsonl"}
    real = LocalGroup.open_write

    @contextlib.contextmanager
    def open_write(self: LocalGroup, path: str) -> Iterator[BinaryIO]:
        with real(self, path) as file:
            yield file
            if any(path.endswith(name) for name in full):
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalGroup, "open_write", open_write)
    batch, other, large = make_batch(store, 100), make_batch(store, 100), make_batch(store, LARGE)
    with coordinating(calm, store), FakeWorker(calm):
        for one in (batch, other, large):
            wait_until(lambda one=one: status_of(store, one).reason == "disk_full", 20, "it says so")  # type: ignore[misc]
            assert status_of(store, one).status == "finalizing"
        full.clear()
        full.add(f"{batch.id}/errors.jsonl")
        later = make_batch(store, 10)
        for one in (other, large, later):
            assert wait_status(store, one, "completed").reason is None
            check_outputs(store, one)
        assert status_of(store, batch).reason == "disk_full"
        full.clear()
        assert wait_status(store, batch, "completed").reason is None
        check_outputs(store, batch)
        assert not list(Path(store.url).rglob(".tmp-*"))


def test_a_batch_whose_files_make_trouble_holds_up_no_other(calm: Settings, store: Store) -> None:
    batches = [make_batch(store, 100) for _ in range(3)]
    unreadable, unwritable, damaged = (Path(store.url) / folder(b.id) for b in batches)

    def spoil(path: Path) -> None:
        # Root may read and write everything, so what stands there is of the wrong kind.
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "full").touch()

    spoil(unreadable / "batch.json")
    (damaged / "status.json").write_bytes(b"{")
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        wait_until(lambda: batches[1].id in running.core.book.batches, 10, "it is taken up")
        spoil(unwritable / "status.json")
        worker.gate.set()
        other = make_batch(store, 100)
        assert wait_status(store, other, "completed").reason is None
        assert wait_status(store, batches[2], "completed").reason is None
        wait_until((unwritable / "output.jsonl").exists, 20, "all but its status is written")
        shutil.rmtree(unwritable / "status.json")
        shutil.rmtree(unreadable / "batch.json")
        (unreadable / "batch.json").write_bytes(msgspec.json.encode(batches[0]))
        for one in batches:
            wait_status(store, one, "completed")
            check_outputs(store, one)


def test_rows_whose_record_is_damaged_before_assembly_are_answered_again(calm: Settings, store: Store) -> None:
    batch = make_batch(store, 200)
    with coordinating(calm, store) as running, FakeWorker(calm) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        ledger = running.core.ledger
        real = ledger.append
        done: list[int] = []

        def append(kind: Type, payload: bytes, batches: object = ()) -> int:
            place = real(kind, payload, batches)  # type: ignore[arg-type]
            if kind is Type.RESULTS and not done:
                done.append(place)
                path = ledger.path_of(place >> 40)
                with open(path, "r+b") as file:
                    file.seek((place & ((1 << 40) - 1)) + 100)
                    file.write(b"\0\0")
            return place

        ledger.append = append  # type: ignore[method-assign]
        worker.gate.set()
        wait_status(store, batch, "completed")
    check_outputs(store, batch)
    asked = np.array([pos for _, pos in worker.answered])
    assert 0 < len(asked) - 200 <= 50
    assert line_of(batch.id, Row(0, 0, b'"r0"', 0, b"")).startswith(b'{"id":"batch_req_')
