"""A request that kills every worker it meets, with real workers: it costs one result, its own."""

from __future__ import annotations

import time

import pytest

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
from tests.support.coordinators import coordinating, lines, status_of, wait_status
from tests.support.ports import wait_until
from tests.support.processes import Processes


@pytest.mark.slow  # Every crash is a worker's start; the same with a fake worker is in test_coordinator_faults.
def test_a_request_that_kills_workers_costs_one_result(fleet_env: dict[str, str], processes: Processes) -> None:
    env = fleet_env | {
        "BATCHMILL_SCHEDULER_LEASE_S": "1",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "2",
        "BATCHMILL_ECHO_FAULTS": "POISON=kill",
        "BATCHMILL_ECHO_LATENCY_MS": "200",
    }
    settings = settings_module.load(env=env)
    store = open_store(env["BATCHMILL_STORE_URL"])
    data = b"".join(
        b'{"custom_id":"r%d","body":{"prompt":"%b %d"}}\n' % (n, b"POISON" if n == 2 else b"fine", n) for n in range(5)
    )
    with coordinating(settings, store) as running:
        batch = intake.submit_bytes(data, store, settings, registry.load(env=env), Options())
        workers = 0
        deadline = time.monotonic() + 150
        while status_of(store, batch).status != "completed" and time.monotonic() < deadline:
            worker = processes.worker(env, ECHO_MODEL, "--no-supervisor")
            workers += 1
            ended = lambda: not worker.alive or status_of(store, batch).status == "completed"  # noqa: B023, E731
            wait_until(ended, 60, "the worker dies, or the batch ends")
        wait_status(store, batch, "completed", timeout=1)
        assert running.error is None
    assert [line["custom_id"] for line in lines(store, batch, "output.jsonl")] == ["r0", "r1", "r3", "r4"]
    (error,) = lines(store, batch, "errors.jsonl")
    assert error["custom_id"] == "r2"
    assert error["error"]["code"] == "engine_crash"
    # Five rows: three halvings and three losses of the guilty row alone, each of which may take up to three workers,
    # since a broker hands a lost chunk on at once and the coordinator gives it up only when it has seen that.
    assert 3 < workers <= 3 * (3 + 3) + 6


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
