"""How workers end, by any hand: nothing finished is lost or repeated, and nothing is left running."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from common import settings
from common.messages import Kind, infer_queue
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.fault.brokers import drop_clients
from tests.integration.conftest import READY
from tests.support.brokers import Broker, RedisBroker
from tests.support.chunks import RESULTS, Dispatch, StartWorker, chat, make_chunk
from tests.support.ports import wait_until
from tests.support.processes import Processes
from workers.engine import echo_journal
from workers.node import EXIT_ENGINE

QUEUE = infer_queue(ECHO_MODEL)
OUTPUT = {0: Kind.OUTPUT}


def test_a_killed_workers_chunk_is_answered_by_the_next(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    # Nobody coordinates here, so the broker's copy is all there is: it is taken once the dead worker's lease is gone.
    env = {"BATCHMILL_SCHEDULER_LEASE_S": 0.5, "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": 4}
    first = start_worker(BATCHMILL_ECHO_FAULTS="SLOW=hang", **env)
    chunk = dispatch.send(make_chunk([chat("SLOW"), chat("fast")], ECHO_MODEL))
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 1, 15, "fast row")
    broker.wait_depth(QUEUE, unacked=1)
    first.kill()
    processes.wait_gone()
    wait_until(lambda: not broker.state.keys("bm:lease:*"), 10, "the lease lapses")
    start_worker(**env)
    answers = dispatch.wait(chunk, 40)
    assert {pos: kind for pos, kind, _ in answers.rows} == {0: Kind.OUTPUT, 1: Kind.OUTPUT}
    broker.wait_depth(QUEUE, ready=0, unacked=0)


def test_a_drain_keeps_acks_and_heartbeats_going(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes, tmp_path: Path
) -> None:
    """A drain of several heartbeats (4 s each): what ends early is acked at once, and nothing is delivered again."""
    ends = {name: tmp_path / f"let-go-{name}" for name in ("SHORT", "LONG")}
    worker = start_worker(
        BATCHMILL_ECHO_FAULTS=",".join(f"{name}=until:{file}" for name, file in ends.items()),
        BATCHMILL_BROKER_HEARTBEAT_S=4,
        BATCHMILL_INFERENCE_DRAIN_S=120,
    )
    short = [dispatch.send(make_chunk([chat("SHORT")], ECHO_MODEL)) for _ in range(2)]
    long = dispatch.send(make_chunk([chat("LONG")], ECHO_MODEL))
    dispatch.wait_taken(*short, long)
    worker.signal(signal.SIGTERM)
    worker.wait_line("draining")
    ends["SHORT"].touch()
    for chunk in short:
        assert dispatch.wait(chunk).kinds() == OUTPUT
    # Acked now, not at the end of the drain.
    broker.wait_depth(QUEUE, ready=0, unacked=1)
    if broker.kind == "rabbitmq":
        # It hangs up on who has been silent for up to three heartbeats.
        time.sleep(20)
    ends["LONG"].touch()
    assert dispatch.wait(long).kinds() == OUTPUT
    assert worker.wait() == 0
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    assert all(len(dispatch.of(chunk).messages) == 1 for chunk in [*short, long])
    processes.wait_gone()


def test_the_end_of_the_drain_gives_chunks_back(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    worker = start_worker(BATCHMILL_ECHO_FAULTS="HANG=hang", BATCHMILL_INFERENCE_DRAIN_S=3)
    chunk = dispatch.send(make_chunk([chat("HANG"), chat("a"), chat("b")], ECHO_MODEL))
    dispatch.wait_taken(chunk)
    assert worker.stop(20) == 0
    # Celery's own words included: an end that was asked for is no fault.
    assert not [line for line in worker.lines if "error" in line.lower() or "Traceback" in line]
    broker.wait_depth(QUEUE, ready=1, unacked=0)
    processes.wait_gone()
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 2, 10, "what was done before")
    assert not dispatch.of(chunk).done
    assert dispatch.of(chunk).kinds() == {1: Kind.OUTPUT, 2: Kind.OUTPUT}
    start_worker()
    assert dispatch.wait(chunk).lines()[0]["response"]["status_code"] == 200
    broker.wait_depth(QUEUE, ready=0, unacked=0)


def test_a_second_signal_skips_the_drain(redis_broker: RedisBroker, processes: Processes) -> None:
    env = make_fleet_env(processes.folder, redis_broker.url, redis_broker.state_url)
    env |= {"BATCHMILL_ECHO_FAULTS": "HANG=hang", "BATCHMILL_INFERENCE_DRAIN_S": "600"}
    worker = processes.worker(env, ECHO_MODEL)
    worker.wait_line(READY)
    dispatch = Dispatch(settings.load(env=env))
    dispatch.wait_taken(dispatch.send(make_chunk([chat("HANG")], ECHO_MODEL)))
    worker.signal(signal.SIGTERM)
    worker.wait_line("draining")
    worker.signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    redis_broker.wait_depth(QUEUE, ready=1, unacked=0)
    processes.wait_gone()
    dispatch.close()


def test_a_dead_engine_ends_the_process_and_says_nothing_false(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes, tmp_path: Path
) -> None:
    journal = str(tmp_path / "journal")
    worker = start_worker(BATCHMILL_ECHO_FAULTS="HANG=hang,DIE=die,E500=500", BATCHMILL_ECHO_JOURNAL=journal)
    chunk = dispatch.send(make_chunk([chat("HANG"), chat("fine")], ECHO_MODEL))
    wait_until(lambda: any(e.kind == "=" for e in echo_journal.read(journal)), 30, "the engine has answered one")
    broker.wait_depth(QUEUE, ready=0, unacked=1)
    killer = dispatch.send(make_chunk([chat("DIE")], ECHO_MODEL))
    assert worker.wait(30) == EXIT_ENGINE
    assert "the engine died" in worker.text
    broker.wait_depth(QUEUE, ready=0 if broker.kind == "redis" else 2)
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 1, 10, "what was answered before")
    assert dispatch.of(chunk).kinds() == {1: Kind.OUTPUT}
    assert not dispatch.of(chunk).done
    assert dispatch.of(killer).rows == []
    processes.wait_gone()


def test_the_supervisor_starts_a_failed_worker_again(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    supervisor = start_worker(supervised=True, BATCHMILL_ECHO_FAULTS="DIE=die")
    dispatch.send(make_chunk([chat("DIE")], ECHO_MODEL))
    supervisor.wait_line(rf"worker failed; starting it again.*status={EXIT_ENGINE}", 30)
    before = len(supervisor.lines)
    supervisor.wait_line(READY, 30, after=before)
    broker.purge(QUEUE)
    assert supervisor.stop() == 0
    processes.wait_gone()


def test_workers_die_with_their_supervisor(start_worker: StartWorker, processes: Processes) -> None:
    supervisor = start_worker(supervised=True)
    [worker] = supervisor.children()
    assert psutil.Process(worker.pid).is_running()
    # One that hangs cannot look for its supervisor by itself: the kernel ends it.
    psutil.Process(worker.pid).suspend()
    supervisor.kill()
    processes.wait_gone(10)


def test_work_goes_on_through_a_broker_restart(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes, tmp_path: Path
) -> None:
    """The chunk is delivered again and joins the copy that runs; its results wait for the broker."""
    let_go = tmp_path / "let-go"
    worker = start_worker(BATCHMILL_ECHO_FAULTS=f"HELD=until:{let_go}", BATCHMILL_INFERENCE_DRAIN_S=20)
    chunks = [dispatch.send(make_chunk([chat("HELD"), chat("x")], ECHO_MODEL)) for _ in range(2)]
    dispatch.collect(lambda: all(len(dispatch.of(c).rows) == 1 for c in chunks), 10, "the fast rows")
    for name in (QUEUE, RESULTS):
        broker.wait_saved(name)
    broker.kill()
    let_go.touch()
    broker.start()
    for chunk in chunks:
        # A message may come twice: the broker died between taking it and saying so, or before our ack.
        rows = dispatch.wait(chunk, 60).rows
        assert {(pos, kind) for pos, kind, _ in rows} == {(0, Kind.OUTPUT), (1, Kind.OUTPUT)}
    broker.wait_depth(QUEUE, ready=0, unacked=0, timeout=60)
    assert worker.stop() == 0
    processes.wait_gone()


def test_a_worker_ends_while_the_broker_is_gone(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes, tmp_path: Path
) -> None:
    """What it cannot publish is not lost: the chunk was never acked."""
    let_go = tmp_path / "let-go"
    worker = start_worker(BATCHMILL_ECHO_FAULTS=f"HELD=until:{let_go}", BATCHMILL_INFERENCE_DRAIN_S=4)
    chunk = dispatch.send(make_chunk([chat("HELD")], ECHO_MODEL))
    dispatch.wait_taken(chunk)
    broker.wait_saved(QUEUE)
    # Its heartbeat is due before it can notice.
    worker.signal(signal.SIGSTOP)
    broker.kill()
    let_go.touch()
    time.sleep(2.5)
    worker.signal(signal.SIGCONT)
    assert worker.stop() in (0, 1)
    processes.wait_gone()
    broker.start()
    start_worker(BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S=2)
    assert dispatch.wait(chunk, 60).kinds() == OUTPUT


def test_a_stuck_engine_is_given_up(redis_broker: RedisBroker, processes: Processes) -> None:
    env = make_fleet_env(processes.folder, redis_broker.url, redis_broker.state_url)
    script = (
        "import time\nfrom workers import node\nfrom workers.engine import echo\nnode.STUCK_S = 3\n"
        "async def infer(self, url, body): time.sleep(600)\necho.EchoEngine._infer = infer\n"
        "import sys; sys.argv = ['workers', 'start', '--no-supervisor']\nfrom workers.cli import main; main()"
    )
    worker = processes.python("worker", "-c", script, env=env | {"BATCHMILL_ECHO_LATENCY_MS": "1"})
    worker.wait_line(READY)
    dispatch = Dispatch(settings.load(env=env))
    dispatch.send(make_chunk([chat("x")], ECHO_MODEL))
    assert worker.wait(30) == EXIT_ENGINE
    assert "has not turned for 3 s" in worker.text
    dispatch.close()


def test_two_workers_of_one_name_are_refused(
    start_worker: StartWorker, processes: Processes, fleet_env: dict[str, str]
) -> None:
    start_worker()
    second = processes.worker(fleet_env, ECHO_MODEL)
    assert second.wait(30) == 2
    assert "runs here already" in second.text
    other = processes.worker(fleet_env, ECHO_MODEL, "--name", "other")
    other.wait_line(READY)


def test_a_redelivered_chunk_joins_the_copy_that_runs(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes, tmp_path: Path
) -> None:
    let_go = tmp_path / "let-go"
    worker = start_worker(BATCHMILL_ECHO_FAULTS=f"HELD=until:{let_go}")
    chunk = dispatch.send(make_chunk([chat("HELD")], ECHO_MODEL))
    dispatch.wait_taken(chunk)

    def joined() -> bool:
        if "a copy of a running chunk joins it" in worker.text:
            return True
        # RabbitMQ lists a connection a while after it was made.
        drop_clients(broker)
        return False

    wait_until(joined, 60, "the chunk is delivered again", 2)
    let_go.touch()
    assert dispatch.wait(chunk).kinds() == OUTPUT
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    assert worker.stop() == 0
    assert len(dispatch.of(chunk).messages) == 1
    processes.wait_gone()
