"""A machine that fails at what others answer, and requests at which all fail."""

from __future__ import annotations

import signal

import pytest

from common import registry
from common import settings as settings_module
from common.live import LiveState
from common.store import open_store
from producers import intake
from producers.intake import Options
from tests.integration.conftest import READY
from tests.support.brokers import Broker
from tests.support.coordinators import check_outputs, coordinating, status_of, wait_status
from tests.support.ports import wait_until
from tests.support.processes import Process, Processes
from workers.node import EXIT_SICK

SCRIPT = """
import signal
import sys
from workers import health
# Whoever is sick stays so until the test has seen it.
health.CONFIRM_S = 120.0
signal.signal(signal.SIGUSR1, lambda *_: setattr(health, "CONFIRM_S", 0.0))
sys.argv = ["workers", "start", "--no-supervisor", "--name", sys.argv[1]]
from workers.cli import main
main()
"""


def start(processes: Processes, env: dict[str, str], name: str, faults: str, latency_ms: int = 30) -> Process:
    given = env | {"BATCHMILL_ECHO_FAULTS": faults, "BATCHMILL_ECHO_LATENCY_MS": str(latency_ms)}
    worker = processes.python(name, "-c", SCRIPT, name, env=given)
    worker.wait_line(READY)
    return worker


@pytest.fixture
def env(fleet_env: dict[str, str]) -> dict[str, str]:
    return fleet_env | {"BATCHMILL_SCHEDULER_LEASE_S": "2", "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "64"}


def test_a_sick_worker_eats_no_batch(broker: Broker, env: dict[str, str], processes: Processes) -> None:
    settings = settings_module.load(env=env)
    store = open_store(env["BATCHMILL_STORE_URL"])
    data = b"".join(b'{"custom_id":"r%d","body":{"prompt":"word %d"}}\n' % (n, n) for n in range(3000))
    # Slower than the sick one, which so meets enough requests before all are answered.
    sick, well = start(processes, env, "sick", "word=500"), start(processes, env, "well", "", 150)
    live = LiveState(settings)
    with coordinating(settings, store) as running:
        batch = intake.submit_bytes(data, store, settings, registry.load(env=env), Options())
        sick.wait_line("taking no more", 60)
        wait_until(lambda: {w.state for w in live.workers()} == {"sick", "ready"}, 10, "it says so")
        sick.signal(signal.SIGUSR1)
        wait_status(store, batch, "completed", timeout=90)
        assert running.error is None
        assert sick.wait(60) == EXIT_SICK
        assert well.stop() == 0
    live.close()
    check_outputs(store, batch)
    processes.wait_gone()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_requests_at_which_all_fail_stop_no_worker(broker: Broker, env: dict[str, str], processes: Processes) -> None:
    env |= {"BATCHMILL_SCHEDULER_RETRY_TIMES": "1"}
    settings = settings_module.load(env=env)
    store = open_store(env["BATCHMILL_STORE_URL"])
    models = registry.load(env=env)
    good = b"".join(b'{"custom_id":"r%d","body":{"prompt":"good %d"}}\n' % (n, n) for n in range(500))
    workers = [start(processes, env, name, "bad=500") for name in ("one", "two")]
    with coordinating(settings, store):
        first = intake.submit_bytes(good, store, settings, models, Options())
        wait_status(store, first, "completed", timeout=60)
        bad = intake.submit_bytes(good.replace(b"good", b"bad"), store, settings, models, Options())
        wait_status(store, bad, "completed", timeout=120)
        assert status_of(store, bad).request_counts.failed == 500
        # Whoever stopped for a moment goes on.
        again = intake.submit_bytes(good, store, settings, models, Options())
        wait_status(store, again, "completed", timeout=60)
        live = LiveState(settings)
        wait_until(lambda: [w.state for w in live.workers()] == ["ready", "ready"], 30, "both take chunks")
        live.close()
    assert [worker.stop() for worker in workers] == [0, 0]
