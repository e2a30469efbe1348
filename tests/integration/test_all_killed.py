"""Everything is killed at once; the next lives find what was in engines and in the queue, and lose nothing."""

from __future__ import annotations

import time

import pytest

from common import registry
from common import settings as settings_module
from common.messages import infer_queue
from common.store import open_store
from producers import intake
from producers.intake import Options
from tests.conftest import ECHO_MODEL
from tests.integration.conftest import READY
from tests.integration.test_coordinator_faults import start
from tests.support.brokers import Broker
from tests.support.coordinators import check_outputs, status_of, wait_status
from tests.support.ports import wait_until
from tests.support.processes import Processes


@pytest.mark.parametrize("broker", ["redis"], indirect=True)  # RabbitMQ hands a dead worker's chunks on by itself.
def test_what_a_dead_fleet_held_is_sent_again_long_before_the_broker_would(
    broker: Broker, fleet_env: dict[str, str], processes: Processes
) -> None:
    """No lease is left to be seen lapsing when the next coordinator starts, and its workers keep the queue busy."""
    env = fleet_env | {
        "BATCHMILL_SCHEDULER_LEASE_S": "1.5",
        "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "64",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "600",
        "BATCHMILL_ECHO_LATENCY_MS": "100",
    }
    settings = settings_module.load(env=env)
    store = open_store(env["BATCHMILL_STORE_URL"])
    data = b"".join(b'{"custom_id":"r%d","body":{"prompt":"p %d"}}\n' % (n, n) for n in range(8000))
    batch = intake.submit_bytes(data, store, settings, registry.load(env=env), Options())
    worker = processes.worker(env, ECHO_MODEL, "--no-supervisor", "--name", "one")
    worker.wait_line(READY)
    coordinator = start(processes, env)
    wait_until(lambda: status_of(store, batch).request_counts.completed > 300, 60, "some answers")
    worker.kill()
    coordinator.kill()
    held = broker.depth(infer_queue(ECHO_MODEL)).unacked
    assert held
    time.sleep(2)  # Longer than a lease.
    coordinator = start(processes, env)
    processes.worker(env, ECHO_MODEL, "--no-supervisor", "--name", "two").wait_line(READY)
    coordinator.wait_line("chunk_lost", 30)
    wait_status(store, batch, "completed", timeout=120)
    check_outputs(store, batch)
