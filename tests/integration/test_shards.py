"""Two shards: each has its coordinators, its ledger and its results queue; workers serve both."""

from __future__ import annotations

import pytest

from common import settings as settings_module
from common.store import open_store
from tests.support.coordinators import FakeWorker, check_outputs, make_batch, wait_status
from tests.support.ports import wait_until
from tests.support.processes import Processes


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_shards_work_side_by_side_and_fail_apart(fleet_env: dict[str, str], processes: Processes) -> None:
    env = fleet_env | {
        "BATCHMILL_SCHEDULER_SHARDS": "2",
        "BATCHMILL_SCHEDULER_LEASE_S": "2",
        "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "50",
        "BATCHMILL_SCHEDULER_QUEUE_SIZE": "500",
        "BATCHMILL_SCHEDULER_TAKEOVER_S": "2",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "4",
    }
    settings = settings_module.load(env=env)
    assert settings.store.url is not None
    store = open_store(settings.store.url)
    batches = [make_batch(store, 1000, shard=n % 2) for n in range(4)]
    with FakeWorker(settings) as worker:
        first, second = (processes.coordinator(env, "--shard", str(n)) for n in range(2))
        second.wait_line(r"leads.*shard=1", 30)
        standby = processes.coordinator(env, "--shard", "1")
        standby.wait_line(r"standby.*shard=1", 30)
        # Both shards have work in engines when one loses its leader.
        wait_until(lambda: {c.reply_to for c in worker.taken} == {"results.0", "results.1"}, 30, "both send")
        second.kill()
        standby.wait_line(r"leads.*shard=1", 15)
        for batch in batches:
            assert wait_status(store, batch, "completed", timeout=90).request_counts.failed == 0
            check_outputs(store, batch)
        assert {c.epoch for c in worker.taken if c.reply_to == "results.0"} == {1}
        assert "standby" not in first.text
        assert first.stop() == standby.stop() == 0
