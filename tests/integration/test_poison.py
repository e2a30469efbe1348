"""A request that kills every worker it meets, with real workers: it costs one result, its own."""

from __future__ import annotations

from pathlib import Path

from common import registry
from common import settings as settings_module
from common.live import LiveState
from common.messages import Kind, infer_queue
from common.settings import Settings
from common.store import open_store
from producers import intake
from producers.intake import Options
from tests.conftest import ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.chunks import Dispatch, StartWorker, chat, make_chunk
from tests.support.coordinators import check_outputs, coordinating, lines, wait_status
from tests.support.processes import Processes


def test_requests_that_kill_workers_cost_one_result_each(fleet_env: dict[str, str], processes: Processes) -> None:
    """Two crashes charge all that meet in the engine, then they end a group or two, then each two engines alone."""
    poison = {3, 20}
    env = fleet_env | {
        # Longer than the test: nothing here waits for a lease or for the broker.
        "BATCHMILL_SCHEDULER_LEASE_S": "300",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "600",
        "BATCHMILL_ECHO_FAULTS": "POISON=kill",
        "BATCHMILL_ECHO_LATENCY_MS": "100",
    }
    settings = settings_module.load(env=env)
    store = open_store(env["BATCHMILL_STORE_URL"])
    data = b"".join(
        b'{"custom_id":"r%d","body":{"prompt":"%b %d"}}\n' % (n, b"POISON" if n in poison else b"fine", n)
        for n in range(40)
    )
    with coordinating(settings, store) as running:
        batch = intake.submit_bytes(data, store, settings, registry.load(env=env), Options())
        supervisor = processes.worker(env, ECHO_MODEL)
        wait_status(store, batch, "completed", timeout=120)
        assert running.error is None
    assert supervisor.stop() == 0
    check_outputs(store, batch, sorted(poison))
    assert {line["error"]["code"] for line in lines(store, batch, "errors.jsonl")} == {"engine_crash"}
    assert 3 + 2 * len(poison) <= supervisor.text.count("worker failed; starting it again") <= 2 + 3 * len(poison)
    processes.wait_gone()
    assert list(Path(env["BATCHMILL_HOME"], "run").iterdir()) == []


def test_the_next_supervisor_reports_what_ended_with_the_last(
    broker: Broker, fleet_env: dict[str, str], dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    env = {"BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": 2, "BATCHMILL_SCHEDULER_LEASE_S": 1}
    first = start_worker(supervised=True, BATCHMILL_ECHO_FAULTS="HANG=hang", **env)
    chunk = dispatch.send(make_chunk([chat("a"), chat("HANG")], ECHO_MODEL))
    dispatch.collect(lambda: len(dispatch.of(chunk).rows) == 1, 15, "what does not hang")
    first.kill()
    processes.wait_gone(10)
    second = start_worker(supervised=True, wait=False, **env)
    dispatch.collect(lambda: len(dispatch.of(chunk).messages) == 2, 30, "the report")
    crash = dispatch.of(chunk).messages[1].crash
    assert crash is not None
    (inside,) = crash.inside
    assert (inside.batch, inside.pos) == (chunk.slices[0].batch, (1).to_bytes(4, "little"))
    # The old copy is nobody's to run any more.
    broker.wait_depth(infer_queue(ECHO_MODEL), ready=0, unacked=0, timeout=60)
    assert second.stop() == 0
    assert len(dispatch.of(chunk).messages) == 2
    assert list(Path(fleet_env["BATCHMILL_HOME"], "run").iterdir()) == []


def test_a_worker_drops_what_the_coordinator_gave_up(
    broker: Broker, fleet_settings: Settings, dispatch: Dispatch, start_worker: StartWorker
) -> None:
    given_up, other = make_chunk([chat("a")], ECHO_MODEL), make_chunk([chat("b")], ECHO_MODEL)
    live = LiveState(fleet_settings)
    live.give_up([given_up.id])
    assert not live.given_up(other.id)
    live.close()
    dispatch.send(given_up)
    dispatch.send(other)
    start_worker()
    assert dispatch.wait(other).kinds() == {0: Kind.OUTPUT}
    broker.wait_depth(infer_queue(ECHO_MODEL), ready=0, unacked=0)
    assert dispatch.of(given_up).messages == []
