"""A coordinator that is killed at any step of anything it makes last goes on by itself: nothing lost, nothing twice."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from pathlib import Path

import pytest

from common import registry as registry_module
from common import settings as settings_module
from common.store import LocalStore
from producers import intake
from producers.batch import FINAL, read_batch, read_status
from producers.intake import Options
from producers.intake.spool import recover
from tests.conftest import ECHO_MODEL
from tests.support import oracle
from tests.support.brokers import Broker
from tests.support.kill_points import POINTS
from tests.support.ports import wait_until
from tests.support.processes import Process, Processes

#: Kills of one run; the seed is in the test's output, for the one run that fails.
KILLS = 20
#: Calls that a short life makes but once or twice.
RARE = {"header": (1,), "create": (1, 2)}
#: Seconds after taking the lead in which a life that has not come to its point ends all the same.
LIFE_S = 6.0


def points(rng: random.Random) -> list[str]:
    """Where lives end: before and after every call there is, in the middle of an append, and some of them again."""
    names = [name + after for name in POINTS for after in ("", "+")]
    sure = ["rename", "remove+", "ack", "log-sync+", "append", "sync", "rename+", "append+"]
    again = [f"{name}:{rng.choice((1, 2, 3))}" for name in rng.sample(sure, len(sure))]
    specs = [f"{name}:{rng.choice(RARE.get(name.removesuffix('+'), (1, 2, 3, 5, 8)))}" for name in names]
    specs += [f"append:{rng.choice((1, 2, 5))}:half" for _ in range(2)]
    rng.shuffle(specs)
    return specs + again


class Submitter:
    """Submits batches and remembers what was in them."""

    def __init__(self, env: dict[str, str]) -> None:
        self._settings = settings_module.load(env=env)
        assert self._settings.store.url is not None
        self.store = LocalStore(Path(self._settings.store.url))
        self._registry = registry_module.load(Path(env["BATCHMILL_MODELS"]))
        #: Batch → its custom_ids.
        self.expected: dict[str, list[str]] = {}

    def submit(self, requests: int) -> None:
        """One batch."""
        made = len(self.expected)
        ids = [f"b{made}-{n}" for n in range(requests)]
        lines = [json.dumps({"custom_id": i, "body": {"max_tokens": 4, "prompt": f"say {i}"}}) for i in ids]
        data = "\n".join(lines).encode()
        batch = intake.submit_bytes(data, self.store, self._settings, self._registry, Options(model=ECHO_MODEL))
        self.expected[batch.id] = ids

    def open(self) -> list[str]:
        """The batches that have not ended."""
        return [b for b in self.expected if read_status(self.store, read_batch(self.store, b)).status not in FINAL]


def live(processes: Processes, env: dict[str, str], spec: str) -> bool:
    """One life of a coordinator; True when it came to its point."""
    process = processes.python("coordinator", "-m", "tests.support.kill_points", spec, "coordinate", env=env)
    # Some points come before it leads.
    wait_until(lambda: not process.alive or "leads" in process.text, 60, "it leads, or has ended", 0.02)
    try:
        process.popen.wait(LIFE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return False
    assert process.wait() == -9, process.text
    return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_coordinator_killed_at_any_point_goes_on(
    fleet_env: dict[str, str], processes: Processes, broker: Broker
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    env = fleet_env | {
        "BATCHMILL_SCHEDULER_LEASE_S": "3",
        "BATCHMILL_SCHEDULER_UNCLAIMED_S": "3",
        "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "50",
        "BATCHMILL_SCHEDULER_QUEUE_SIZE": "600",
        "BATCHMILL_SCHEDULER_TAKEOVER_S": "3",
        # What a killed coordinator held comes back after this.
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "5",
        "BATCHMILL_ECHO_LATENCY_MS": "40",
    }
    batches = Submitter(env)
    batches.submit(3000)
    worker = processes.worker(env, ECHO_MODEL)
    hits = 0
    # On a slow machine more lives end before their point.
    for spec in itertools.chain.from_iterable(points(rng) for _ in range(3)):
        for size in (5, 5, 5, 5, 5, 5, 150):
            batches.submit(size)
        hit = live(processes, env, spec)
        print(spec, "hit" if hit else "not reached")
        hits += hit
        if hits == KILLS:
            break
    assert hits == KILLS
    last = processes.coordinator(env)
    wait_until(lambda: not batches.open(), 120, "every batch has ended", 0.2)
    check(batches, broker, last, worker)


def check(batches: Submitter, broker: Broker, coordinator: Process, worker: Process) -> None:
    """Every batch passes the oracle, and nothing is left over."""
    store = batches.store
    for batch_id, ids in batches.expected.items():
        folder = store.root / "batches" / batch_id
        oracle.check(folder, batch_id, ids, failed=[])
        assert read_status(store, read_batch(store, batch_id)).request_counts.completed == len(ids)
    wait_until(lambda: not store.list("active/0"), 20, "no marker is left")
    wait_until(lambda: broker.depth("results.0").unacked == 0, 20, "every result is acknowledged")
    assert coordinator.stop() == 0
    assert worker.stop() == 0
    recover(store)
    left = [p for p in store.root.rglob(".*") if p.is_file()]
    assert left == []
    assert store.list("incoming") == []
    wal = store.root.parent / "wal" / "wal" / "0"
    assert [p for p in wal.iterdir() if p.name.startswith((".tmp", ".assembly"))] == []
