"""Workers and engines that end, hang or misbehave in mid-batch."""

from __future__ import annotations

import signal
import time

import psutil

from tests.fault.fleet import READY, REQUESTS, Fleet, injected
from tests.fault.table import case
from tests.support.ports import wait_until


def wait_stopped(process: psutil.Process) -> None:
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 10, "it is stopped")


@case("0", "none")
def test_no_fault(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit()
    fleet.finish()


@case("1", "kill -9 a worker in mid-chunk", quick="redis rabbitmq")
def test_worker_killed(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit()
    fleet.wait_progress()
    with fleet.fault():
        fleet.child(fleet.workers[0]).kill()
    fleet.finish()


@case("2", "kill -9 a worker between its results' confirm and its ack", quick="rabbitmq")
def test_worker_killed_before_its_ack(fleet: Fleet) -> None:
    fleet.env |= injected("kill_before_ack", fleet.folder)
    fleet.start()
    fleet.submit()
    with fleet.fault():
        wait_until((fleet.folder / "before_ack").exists, 60, "a worker ended before its ack")
    fleet.finish()


@case("3", "SIGTERM a worker in mid-chunk: drain, then requeue at the deadline", quick="redis")
def test_worker_drained(fleet: Fleet) -> None:
    slow = dict.fromkeys(range(0, 1200, 100), "SLOW")
    # The drain lasts longer than two heartbeats, and some requests last longer than the drain.
    fleet.start(BATCHMILL_ECHO_FAULTS="SLOW=slow:14", BATCHMILL_INFERENCE_DRAIN_S="8", BATCHMILL_BROKER_HEARTBEAT_S="3")
    fleet.submit(marks=slow)
    fleet.wait_progress()
    drained = fleet.workers[0]
    with fleet.fault():
        drained.signal(signal.SIGTERM)
        fleet.start_worker()
        assert drained.wait(60) == 0
    drained.wait_line("giving chunks back", 1)
    assert "onnection" not in drained.text.partition("draining")[2], "it lost its connection in the drain"
    fleet.finish()


@case("4", "SIGSTOP a worker for 3 × the lease, then SIGCONT", quick="rabbitmq")
def test_worker_stopped_for_a_while(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit(4000)
    fleet.wait_progress(0.15)
    child = fleet.child(fleet.workers[0])
    with fleet.fault():
        child.suspend()
        time.sleep(3 * float(fleet.env["BATCHMILL_SCHEDULER_LEASE_S"]))
        child.resume()
    fleet.finish()


@case("5", "SIGSTOP an idle worker, publish, kill -9 it")
def test_worker_killed_with_a_message_on_its_way(fleet: Fleet) -> None:
    fleet.start(workers=1)
    child = fleet.child(fleet.workers[0])
    child.suspend()
    wait_stopped(child)
    fleet.submit()
    wait_until(lambda: fleet.status(fleet.batches[0]).in_flight > 0, 30, "chunks are sent")
    # The broker has given it the first chunk when fewer wait than were sent; nothing else tells so on every broker.
    time.sleep(1.5)
    with fleet.fault():
        child.kill()
    fleet.finish()


@case("6", "the engine dies (its core killed)", quick="redis")
def test_engine_died(fleet: Fleet) -> None:
    fleet.start(BATCHMILL_ECHO_FAULTS="DIE=die*1")
    fleet.submit(marks={700: "DIE"})
    with fleet.fault():
        wait_until(lambda: "exit 70" in "".join(w.text for w in fleet.workers), 60, "a worker ended")
    fleet.finish()


@case("7", "the engine is told to end: answers cut short (finish_reason abort)")
def test_engine_aborts(fleet: Fleet) -> None:
    fleet.start(BATCHMILL_ECHO_FAULTS="ABRT=abort*400")
    with fleet.fault():
        fleet.submit(marks=dict.fromkeys(range(500, 700), "ABRT"))
        fleet.wait_progress()
    fleet.finish()


@case("8", "two requests that kill the engine each time", quick="redis")
def test_requests_that_kill(fleet: Fleet) -> None:
    """Twice a crash in company, once in a group, twice alone: five a request, less where both are met in one go."""
    fleet.start(BATCHMILL_ECHO_FAULTS="POISON=kill")
    with fleet.fault():
        fleet.submit(marks={300: "POISON", 1500: "POISON"}, failed={300: "engine_crash", 1500: "engine_crash"})
        fleet.wait_ended(fleet.batches[0], 200)
    fleet.finish()
    crashes = sum(worker.text.count("worker failed; starting it again") for worker in fleet.workers)
    assert 7 <= crashes <= 10


@case("9", "a request that hangs the engine", quick="rabbitmq")
def test_request_hangs(fleet: Fleet) -> None:
    fleet.start(BATCHMILL_ECHO_FAULTS="HANG=hang", BATCHMILL_SCHEDULER_RETRY_TIMES="1")
    with fleet.fault():
        fleet.submit(
            REQUESTS, "--timeout", "3", marks={50: "HANG", 1300: "HANG"}, failed={50: "timeout", 1300: "timeout"}
        )
    fleet.finish()


@case("10", "MemoryError and SystemExit in a task", quick="redis")
def test_tasks_break(fleet: Fleet) -> None:
    fleet.env |= injected("raise_in_task", fleet.folder)
    fleet.start()
    with fleet.fault():
        fleet.submit()
        wait_until((fleet.folder / "raised3").exists, 60, "four tasks have broken")
    fleet.finish()


@case("21a", "clock of one worker 10 minutes ahead")
def test_clock_ahead(fleet: Fleet) -> None:
    fleet.start(workers=1)
    fleet.start_worker(**injected("clock_ahead", fleet.folder)).wait_line(READY, 60)
    with fleet.fault():
        fleet.submit()
    fleet.finish()


@case("21b", "clock of one worker 10 minutes behind")
def test_clock_behind(fleet: Fleet) -> None:
    fleet.start(workers=1)
    fleet.start_worker(**injected("clock_behind", fleet.folder)).wait_line(READY, 60)
    with fleet.fault():
        fleet.submit()
    fleet.finish()


@case("22", "kill -9 the parent: no engine process is left", quick="redis")
def test_parent_killed(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit()
    fleet.wait_progress()
    parent = fleet.workers[0]
    below = parent.children()
    assert below
    with fleet.fault():
        parent.kill()
        _, alive = psutil.wait_procs(below, timeout=60)
        assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    # Under its old name: it takes over what the other has left behind.
    fleet.start_worker(name="w0")
    fleet.finish()
