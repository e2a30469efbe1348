"""Batches that end before all of it is answered, and batches that wait: cancel, deadline, pause, hours."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest

from common.messages import Kind, infer_queue, results_queue
from common.settings import Settings
from common.store import Store
from producers.batch import Batch, Command, Status, folder
from tests.support.brokers import Broker
from tests.support.coordinators import (
    MODEL,
    FakeWorker,
    Running,
    check_outputs,
    coordinating,
    lines,
    make_batch,
    status_of,
    wait_status,
)
from tests.support.ports import PATIENCE_S, wait_until

#: For what has nothing to do with the broker.
on_one_broker = pytest.mark.parametrize("broker", ["redis"], indirect=True)
_NUMBERS = itertools.count()


@pytest.fixture
def fast(fleet_settings: Settings) -> Settings:
    """Settings whose time limits a test can wait for."""
    scheduler = msgspec.structs.replace(
        fleet_settings.scheduler, lease_s=1.5, unclaimed_s=1.0, chunk_requests=50, queue_size=1000
    )
    inference = msgspec.structs.replace(fleet_settings.inference, batch_size=64)
    return msgspec.structs.replace(fleet_settings, scheduler=scheduler, inference=inference)


@pytest.fixture
def patient(fast: Settings) -> Settings:
    """For tests that count: no busy machine runs into these time limits, so nothing is asked twice."""
    return msgspec.structs.replace(
        fast, scheduler=msgspec.structs.replace(fast.scheduler, lease_s=30.0, unclaimed_s=30.0)
    )


def expire(running: Running, batch: Batch) -> None:
    """Let the deadline be now: set before, it would come too early on one machine and too late on another."""
    with running.core.lock:
        progress = running.core.book.batches[batch.id]
        progress.batch = msgspec.structs.replace(progress.batch, expires_at=time.time())


def ask(store: Store, batch: Batch, word: str, **fields: str) -> None:
    command = Command(command=word, at=time.time(), **fields)
    store.create_exclusive(f"control/{batch.id}/{next(_NUMBERS):04}.json", msgspec.json.encode(command))


def check_cut(store: Store, batch: Batch, status: Status, code: str) -> None:
    """Every request once, in order, those that are missing with `code`; the counts and the summary say the same."""
    output = [int(line["custom_id"][1:]) for line in lines(store, batch, "output.jsonl")]
    errors = [int(line["custom_id"][1:]) for line in lines(store, batch, "errors.jsonl")]
    assert (output, errors) == (sorted(output), sorted(errors))
    assert sorted(output + errors) == list(range(batch.requests))
    assert {line["error"]["code"] for line in lines(store, batch, "errors.jsonl")} == {code}
    counts = status.request_counts
    assert (counts.completed, counts.failed, counts.total) == (len(output), len(errors), batch.requests)
    summary = msgspec.json.decode(store.read(f"{folder(batch.id)}/summary.json"))
    assert (summary["status"], summary["completed"], summary["failed"]) == (status.status, len(output), len(errors))


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_cut_keeps_what_is_answered_and_says_so_for_the_rest(fast: Settings, store: Store, how: str) -> None:
    with coordinating(fast, store) as running, FakeWorker(fast, hold_after=400) as worker:
        wait_until(lambda: bool(running.core.workers), 30, "the worker is seen", 0.01)
        batch = make_batch(store, 2000, expires_at=time.time() + 3600 if how == "expired" else None)
        other = make_batch(store, 100)
        assert worker.holding.wait(PATIENCE_S)
        if how == "cancelled":
            ask(store, batch, "cancel")
        else:
            expire(running, batch)
        wait_status(store, batch, "cancelling", "finalizing")
        wait_until(lambda: batch.id in running.core.cancelled, 30, "workers are told", 0.01)
        worker.gate.set()
        status = wait_status(store, batch, how)
        wait_status(store, other, "completed")
    assert 300 <= status.request_counts.completed < 2000
    check_cut(store, batch, status, f"batch_{how}")
    assert store.list("control") == []
    check_outputs(store, other)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_cut_before_any_worker_ends_at_once(fast: Settings, store: Store, how: str) -> None:
    batch = make_batch(store, 100, expires_at=time.time() + 2 if how == "expired" else None)
    with coordinating(fast, store):
        if how == "cancelled":
            wait_until(lambda: status_of(store, batch).reason == "no_workers", 20, "the status says why it waits")
            ask(store, batch, "cancel")
        status = wait_status(store, batch, how)
    check_cut(store, batch, status, f"batch_{how}")


@on_one_broker
def test_a_deadline_before_the_first_dispatch(fast: Settings, store: Store) -> None:
    batch = make_batch(store, 100, expires_at=time.time() + 1, not_before=time.time() + 3600)
    with coordinating(fast, store), FakeWorker(fast) as worker:
        status = wait_status(store, batch, "expired")
        assert worker.taken == []
    assert status.started_at is None
    check_cut(store, batch, status, "batch_expired")


def test_answers_in_time_count_although_no_coordinator_ran_at_the_deadline(
    fast: Settings, store: Store, broker: Broker
) -> None:
    batch = make_batch(store, 2000)
    with FakeWorker(fast) as worker:
        worker.gate.clear()
        with coordinating(fast, store):
            assert worker.holding.wait(PATIENCE_S)
            wait_until(lambda: status_of(store, batch).in_flight > 0, 10, "chunks are out")
        worker.gate.set()
        wait_until(lambda: broker.depth(results_queue(0)).ready > 0, 30, "answers wait for a coordinator")
        broker.wait_depth(infer_queue(MODEL), ready=0, unacked=0)
    answered = len(worker.answered)
    # As if it had had this deadline from the start.
    late = msgspec.structs.replace(batch, expires_at=time.time())
    store.put_atomic(f"{folder(batch.id)}/batch.json", msgspec.json.encode(late))
    with coordinating(fast, store):
        status = wait_status(store, batch, "expired")
    assert status.request_counts.completed == answered
    check_cut(store, batch, status, "batch_expired")
    broker.wait_depth(results_queue(0), ready=0, unacked=0)


@on_one_broker
def test_a_cut_that_comes_when_all_is_answered_cuts_nothing(fast: Settings, store: Store) -> None:
    batch = make_batch(store, 50)
    with coordinating(fast, store) as running, FakeWorker(fast) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        ask(store, batch, "cancel")
        wait_until(lambda: running.core.book.batches[batch.id].cut is not None, 10, "it is cancelled", 0.01)
        worker.gate.set()
        wait_status(store, batch, "completed")
    check_outputs(store, batch)


@on_one_broker
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_cut_without_live_state(fast: Settings, store: Store, broker: Broker, how: str) -> None:
    """Workers cannot be told: what they answer before the batch is closed counts, what comes later does not."""
    state = msgspec.structs.replace(fast, state=msgspec.structs.replace(fast.state, url="redis://127.0.0.1:1/0"))
    with coordinating(state, store) as running, FakeWorker(state) as worker:
        worker.gate.clear()
        wait_until(lambda: "state_unreachable" in running.core.troubles, 30, "the coordinator runs", 0.01)
        batch = make_batch(store, 400, expires_at=time.time() + 3600 if how == "expired" else None)
        assert worker.holding.wait(PATIENCE_S)
        if how == "cancelled":
            ask(store, batch, "cancel")
        else:
            expire(running, batch)
        status = wait_status(store, batch, how)
        worker.gate.set()
        wait_until(lambda: len(worker.answered) > 0, 20, "late answers come")
    assert status.request_counts.completed == 0
    check_cut(store, batch, status, f"batch_{how}")


def test_a_worker_whose_clock_is_wrong_loses_nothing(patient: Settings, store: Store) -> None:
    batch = make_batch(store, 500, expires_at=time.time() + 300)
    with coordinating(patient, store), FakeWorker(patient, ahead_s=600) as worker:
        status = wait_status(store, batch, "completed")
    assert status.request_counts.completed == 500
    assert len(worker.answered) == 500
    # It gave back what carried a deadline, and then none did any more.
    dated = [chunk.not_after > 0 for chunk in worker.taken]
    assert dated == sorted(dated, reverse=True)
    assert 0 < sum(dated) <= 10
    assert {line["batchmill"].get("attempts", 1) for line in lines(store, batch, "output.jsonl")} == {1}
    check_outputs(store, batch)


def test_a_pause_outlives_its_coordinator(patient: Settings, store: Store) -> None:
    batch = make_batch(store, 2000)
    with FakeWorker(patient, hold_after=100) as worker:
        with coordinating(patient, store) as running:
            assert worker.holding.wait(PATIENCE_S)
            ask(store, batch, "pause")
            wait_until(lambda: status_of(store, batch).reason == "paused", 10, "it is paused", 0.01)
            worker.gate.set()
            wait_until(lambda: not running.core.book.out, 20, "what runs is answered", 0.01)
            answered = len(worker.answered)
            assert answered < 2000
        with coordinating(patient, store):
            # Time enough to send something: a batch that comes later is answered.
            wait_status(store, make_batch(store, 60), "completed")
            assert len(worker.answered) == answered + 60
            assert status_of(store, batch).reason == "paused"
            ask(store, batch, "reprioritize", priority="high")
            ask(store, batch, "resume")
            status = wait_status(store, batch, "completed")
    assert status.priority == "high"
    check_outputs(store, batch)


@on_one_broker
def test_a_batch_waits_for_its_hour(fast: Settings, store: Store) -> None:
    with coordinating(fast, store) as running, FakeWorker(fast) as worker:
        wait_until(lambda: bool(running.core.workers), 30, "the worker is seen", 0.01)
        batch = make_batch(store, 100, not_before=time.time() + 8)
        wait_until(lambda: status_of(store, batch).reason == "scheduled", 10, "the status says what it waits for", 0.01)
        assert status_of(store, batch).opens_at == batch.not_before
        wait_until(lambda: bool(worker.taken), 20, "its hour has come", 0.01)
        assert worker.taken[0].sent_at >= (batch.not_before or 0)
        assert wait_status(store, batch, "completed").reason is None
    check_outputs(store, batch)


@on_one_broker
def test_a_batch_whose_hours_cannot_be_read_here_fails_with_the_reason(fast: Settings, store: Store) -> None:
    batch = make_batch(store, 10, run_between="22:00-06:00 Mars/Olympus")
    with coordinating(fast, store):
        status = wait_status(store, batch, "failed")
    assert "'Mars/Olympus' is not a time zone" in (status.reason or "")


@on_one_broker
def test_failed_attempts_of_a_cut_batch_are_not_answers(fast: Settings, store: Store) -> None:
    batch = make_batch(store, 50)
    with (
        coordinating(fast, store) as running,
        FakeWorker(fast, answer=lambda *_: (Kind.RETRY, b'{"error":"again"}\n')) as worker,
    ):
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        ask(store, batch, "cancel")
        wait_until(lambda: batch.id in running.core.cancelled, 10, "it is cancelled", 0.01)
        worker.gate.set()
        status = wait_status(store, batch, "cancelled")
    check_cut(store, batch, status, "batch_cancelled")
