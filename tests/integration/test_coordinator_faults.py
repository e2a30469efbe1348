"""The coordinator on real brokers while something breaks: workers, queues, brokers, live state, itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from common import settings as settings_module
from common.live import LiveState
from common.messages import Kind, Row, decode_rows, infer_queue
from common.settings import Settings
from common.store import Store, open_store
from producers.batch import Batch, Command, Heartbeat
from producers.coordinator.core import Ousted
from tests.support.brokers import Broker
from tests.support.coordinators import (
    MODEL,
    FakeWorker,
    Running,
    answer_all,
    check_outputs,
    coordinating,
    lines,
    make_batch,
    status_of,
    wait_status,
)
from tests.support.ports import PATIENCE_S, wait_until
from tests.support.processes import Process, Processes

RUN = """
import sys
from common import logs, settings
from producers.coordinator import run
loaded = settings.load()
logs.configure(loaded.telemetry, "coordinator")
run(loaded)
"""


@pytest.fixture
def env(fleet_env: dict[str, str]) -> dict[str, str]:
    """A fleet whose time limits a test can wait for."""
    return fleet_env | {
        "BATCHMILL_SCHEDULER_LEASE_S": "1.5",
        "BATCHMILL_SCHEDULER_UNCLAIMED_S": "1.5",
        "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "50",
        "BATCHMILL_SCHEDULER_QUEUE_SIZE": "1000",
        "BATCHMILL_SCHEDULER_TAKEOVER_S": "2",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "4",
        "BATCHMILL_BROKER_HEARTBEAT_S": "4",
        "BATCHMILL_INFERENCE_BATCH_SIZE": "64",
    }


@pytest.fixture
def settings(env: dict[str, str]) -> Settings:
    return settings_module.load(env=env)


@pytest.fixture
def store(settings: Settings) -> Store:
    assert settings.store.url is not None
    return open_store(settings.store.url)


def start(processes: Processes, env: dict[str, str], name: str = "coordinator") -> Process:
    return processes.python(name, "-c", RUN, env=env)


def answered(worker: FakeWorker, count: int) -> None:
    wait_until(lambda: len(worker.answered) >= count, 30, f"{count} rows are answered", 0.005)


def check_no_errors(store: Store, batch: Batch) -> None:
    check_outputs(store, batch)
    assert status_of(store, batch).request_counts.failed == 0


def test_a_worker_that_dies_costs_nothing_but_time(settings: Settings, store: Store) -> None:
    batch = make_batch(store, 500)
    with coordinating(settings, store) as running:
        doomed = FakeWorker(settings, node="doomed", hold_after=50)
        assert doomed.holding.wait(PATIENCE_S)
        doomed.crash()
        with FakeWorker(settings, node="other"):
            wait_status(store, batch, "completed")
        wait_until(lambda: running.core.book.out == {}, 10, "nothing is out")
    check_no_errors(store, batch)


def test_a_request_that_ends_every_engine_is_found_and_costs_one_result(settings: Settings, store: Store) -> None:
    batch = make_batch(store, 12)
    stop = False

    def answer(batch_id: str, row: Row, attempt: int) -> tuple[Kind, bytes] | None:
        if row.index == POISON:
            raise Poisoned
        return answer_all(batch_id, row, attempt)

    with coordinating(settings, store) as running:
        crashes = 0
        deadline = time.monotonic() + 90
        while not stop and time.monotonic() < deadline:
            with poisonable(settings, answer) as worker:
                wait_until(
                    lambda worker=worker: (
                        worker.poisoned.is_set()  # type: ignore[misc]
                        or status_of(store, batch).status == "completed"
                    ),
                    30,
                    "a crash or the end",
                    0.01,
                )
                stop = not worker.poisoned.is_set()
                crashes += worker.poisoned.is_set()
        wait_until(lambda: running.core.book.batches == {}, 10, "the batch is put away")
    check_outputs(store, batch, [POISON])
    error = next(lines(store, batch, "errors.jsonl"))["error"]
    assert error["code"] == "engine_crash"
    assert crashes == 5


def test_what_was_given_up_is_told_again_after_a_restart_and_a_wipe(
    settings: Settings, store: Store, broker: Broker
) -> None:
    make_batch(store, 12)
    live = LiveState(settings)
    with coordinating(settings, store) as running:
        doomed = FakeWorker(settings)
        doomed.gate.clear()
        assert doomed.holding.wait(PATIENCE_S)
        chunk = doomed.taken[0].id
        doomed.crash()
        wait_until(lambda: chunk in running.core.book.given_up, 20, "the chunk is lost")
        wait_until(lambda: live.given_up(chunk), 10, "workers are told")
        broker.wipe_state()
        wait_until(lambda: live.given_up(chunk), 10, "workers are told again")
    broker.wipe_state()
    with coordinating(settings, store):
        wait_until(lambda: live.given_up(chunk), 10, "workers are told by the next coordinator")
    live.close()


#: The index of a row that ends every engine.
POISON = 5


class Poisoned(Exception):
    """The engine dies of this row."""


class PoisonableWorker(FakeWorker):
    """A worker that dies, as a whole, of a poisonous row."""

    def __init__(self, settings: Settings, answer: object) -> None:
        self.poisoned = threading.Event()
        super().__init__(settings, answer=answer, prefetch=1)  # type: ignore[arg-type]

    def _work(self, blob: object, name: str) -> bool:
        try:
            return super()._work(blob, name)
        except Poisoned:
            chunk = self.taken[-1]
            rows = [(p.batch, row) for p in chunk.slices for row in decode_rows(p.rows)]
            # What its supervisor would say; the rows of a chunk that is run alone go in one at a time.
            self.report(chunk, [(b, row.pos) for b, row in rows if row.index == POISON or chunk.isolated != 1])
            self._crash.set()
            self._stop.set()
            self.poisoned.set()
            return False


@contextlib.contextmanager
def poisonable(settings: Settings, answer: object) -> Iterator[PoisonableWorker]:
    worker = PoisonableWorker(settings, answer)
    try:
        yield worker
    finally:
        worker.close()


def test_chunks_that_vanish_from_the_queue_are_sent_again(settings: Settings, store: Store, broker: Broker) -> None:
    batch = make_batch(store, 400)
    with coordinating(settings, store) as running:
        wait_until(lambda: len(running.core.book.out) >= 2, 20, "chunks are out", 0.01)
        wait_until(lambda: broker.depth(infer_queue(MODEL)).ready >= 2, 20, "they wait in the queue")
        broker.purge(infer_queue(MODEL))
        with FakeWorker(settings):
            wait_status(store, batch, "completed")
    check_no_errors(store, batch)


def test_a_wiped_broker_loses_nothing(settings: Settings, store: Store, broker: Broker) -> None:
    batch = make_batch(store, 2000)
    with coordinating(settings, store), FakeWorker(settings, hold_after=200) as worker:
        assert worker.holding.wait(PATIENCE_S)
        broker.wipe()
        worker.gate.set()
        wait_status(store, batch, "completed", timeout=90)
    check_no_errors(store, batch)


def test_a_killed_broker_loses_nothing_and_convicts_nobody(settings: Settings, store: Store, broker: Broker) -> None:
    warm = make_batch(store, 10)
    batch = make_batch(store, 2000, activate=False)
    with coordinating(settings, store) as running, FakeWorker(settings, hold_after=210) as worker:
        wait_status(store, warm, "completed")
        broker.wait_saved(infer_queue(MODEL))
        store.create_exclusive(f"active/0/{batch.id}", b"")
        assert worker.holding.wait(PATIENCE_S)
        broker.kill()
        worker.gate.set()
        wait_until(
            lambda: status_of(store, batch).reason in ("broker_unreachable", "state_unreachable"),
            30,
            "the status says what is missing",
        )
        assert running.error is None
        time.sleep(2.5)  # Longer than a lease and its grace.
        broker.start()
        wait_status(store, batch, "completed", timeout=120)
        later = make_batch(store, 100)
        wait_status(store, later, "completed")
    check_no_errors(store, batch)
    assert status_of(store, batch).reason is None
    assert {c.slices[0].attempt for c in worker.taken} == {1}


def test_a_hanging_broker_is_waited_for(settings: Settings, store: Store, broker: Broker) -> None:
    batch = make_batch(store, 1000)
    with coordinating(settings, store), FakeWorker(settings, hold_after=100) as worker:
        assert worker.holding.wait(PATIENCE_S)
        broker.pause()
        worker.gate.set()
        time.sleep(3)
        broker.resume()
        wait_status(store, batch, "completed", timeout=120)
    check_no_errors(store, batch)


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)  # With Redis, live state and queues go together.
def test_wiped_live_state_convicts_nobody(settings: Settings, store: Store, broker: Broker) -> None:
    batch = make_batch(store, 500)
    with coordinating(settings, store) as running, FakeWorker(settings) as worker:
        worker.gate.clear()
        assert worker.holding.wait(PATIENCE_S)
        for _ in range(4):
            broker.wipe_state()
            time.sleep(0.7)
        worker.gate.set()
        wait_status(store, batch, "completed")
        assert running.error is None
    check_no_errors(store, batch)
    # Chunks may have been sent again, but nobody was convicted: none was split.
    assert all(c.slices[0].attempt == 1 for c in worker.taken)


def test_a_coordinator_that_is_killed_goes_on_from_its_log(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes
) -> None:
    # More than three windows, so that it is not over before the last kill.
    batches = [make_batch(store, 4000), make_batch(store, 2000, invalid=[3, 77])]
    with FakeWorker(settings) as worker:
        for _ in range(3):
            process = start(processes, env)
            process.wait_line("leads")
            worker.hold_after(len(worker.answered) + 300)
            assert worker.holding.wait(PATIENCE_S)
            process.kill()
            worker.let_go()
        assert any(status_of(store, b).status == "in_progress" for b in batches)
        process = start(processes, env)
        for batch in batches:
            wait_status(store, batch, "completed", timeout=90)
        assert process.stop() == 0
    check_no_errors(store, batches[0])
    check_outputs(store, batches[1], [3, 77])
    # What was logged is not asked again: only what was under way at a kill may be.
    assert len(worker.answered) <= 6000 + 3 * 1000


def test_a_cancel_survives_a_kill(settings: Settings, store: Store, env: dict[str, str], processes: Processes) -> None:
    batch = make_batch(store, 3000)
    with FakeWorker(settings, hold_after=200) as worker:
        process = start(processes, env)
        assert worker.holding.wait(PATIENCE_S)
        store.create_exclusive(
            f"control/{batch.id}/01.json", msgspec.json.encode(Command(command="cancel", at=time.time()))
        )
        wait_status(store, batch, "cancelling")
        wait_until(lambda: store.list(f"control/{batch.id}") == [], 10, "the command is folded in")
        process.kill()
        worker.gate.set()
        process = start(processes, env)
        wait_status(store, batch, "cancelled")
        assert process.stop() == 0
    counts = status_of(store, batch).request_counts
    assert counts.completed + counts.failed == 3000
    assert counts.completed >= 200


def test_a_coordinator_killed_while_it_assembles_makes_the_same_files(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes
) -> None:
    batch = make_batch(store, 20_000)
    with FakeWorker(settings):
        process = start(processes, env)
        wait_status(store, batch, "finalizing", "completed", timeout=90)
        process.kill()
        ended = status_of(store, batch).status == "completed"
        process = start(processes, env)
        wait_status(store, batch, "completed")
        wait_until(lambda: store.list("active/0") == [], 10, "the marker is gone")
        assert process.stop() == 0
    check_no_errors(store, batch)
    assert ended in (True, False)


def test_a_leader_that_hangs_is_replaced_and_stops_when_it_wakes(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes
) -> None:
    batch = make_batch(store, 5000)
    with FakeWorker(settings) as worker:
        worker.gate.clear()
        first = start(processes, env, "first")
        assert worker.holding.wait(PATIENCE_S)
        second = start(processes, env, "second")
        second.wait_line("standby", 20)
        first.signal(signal.SIGSTOP)
        second.wait_line("leads", 30)
        worker.gate.set()
        answered(worker, 1000)
        first.signal(signal.SIGCONT)
        assert first.wait(30) != 0
        assert "ousted" in first.text
        wait_status(store, batch, "completed", timeout=90)
        beat = msgspec.json.decode(store.read("coordinator/0.json"), type=Heartbeat)
        assert beat.pid == second.pid
        assert second.stop() == 0
    check_no_errors(store, batch)


def test_two_coordinators_one_leader_and_a_clean_handover(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes
) -> None:
    first, second = start(processes, env, "first"), start(processes, env, "second")
    wait_until(lambda: "leads" in first.text or "leads" in second.text, 20, "one leads")
    leader, other = (first, second) if "leads" in first.text else (second, first)
    other.wait_line("standby", 20)
    assert leader.stop() == 0
    other.wait_line("leads", 10)
    assert other.stop() == 0


def test_an_ousted_coordinator_raises(settings: Settings, store: Store) -> None:
    running = Running(settings, store)
    epoch = running.core.epoch
    store.create_exclusive(f"epochs/0/{epoch + 1}", b"{}")
    wait_until(lambda: running.error is not None, 20, "it notices")
    with pytest.raises(Ousted):
        running.stop()
    assert os.getpid() > 0
