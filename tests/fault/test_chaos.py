"""Everything at once: random faults, one after the other, while batches come and go.

`BATCHMILL_TEST_CHAOS_S`: seconds of it on each broker; `BATCHMILL_TEST_CHAOS_SEED`: repeats the sequence of an earlier
run (its timing is the machine's).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil

from producers.batch import FINAL
from tests.fault import brokers
from tests.fault.fleet import READY, Asked, Fleet
from tests.fault.table import case
from tests.support.ports import wait_until
from tests.support.processes import Process

SECONDS = float(os.environ.get("BATCHMILL_TEST_CHAOS_S") or 30)
SEED = int(os.environ.get("BATCHMILL_TEST_CHAOS_SEED") or 0)
#: Batches under way at a time.
AT_ONCE = 3


class Chaos:
    """A fleet of three workers and two coordinators, all of which may end at any moment and come back."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.chance = random.Random(seed)
        self.workers: list[Process] = []
        self.coordinators: list[Process] = []
        self.stopped: list[psutil.Process | Process] = []
        self.log: list[str] = []

    def start(self) -> None:
        self.coordinators = [self.fleet.start_coordinator() for _ in range(2)]
        self.workers = [self.fleet.start_worker() for _ in range(3)]
        for worker in self.workers:
            worker.wait_line(READY, 90)
        warm = self.fleet.submit(20)
        wait_until(lambda: self.fleet.status(warm).status in FINAL, 60, "all queues are in use")
        self.fleet.broker.wait_saved()

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        acts: list[tuple[Callable[[], None], int]] = [
            (self.kill_worker, 4),
            (self.kill_supervisor, 1),
            (self.end_worker, 2),
            (self.stop_worker, 2),
            (self.kill_coordinator, 3),
            (self.stop_coordinator, 1),
            (self.restart_broker, 1),
            (self.close_connections, 2),
            (self.wipe_state, 1),
        ]
        while time.monotonic() < deadline:
            self.feed()
            act = self.chance.choices([a for a, _ in acts], [w for _, w in acts])[0]
            self.log.append(act.__name__)
            print(f"{time.monotonic():.1f} {act.__name__}", flush=True)
            act()
            time.sleep(self.chance.uniform(0.2, 3))
            self.revive()
        self.wake()
        self.revive()

    def feed(self) -> None:
        """Keep some batches under way."""
        open_ones = [asked for asked in self.fleet.batches if self.fleet.status(asked).status not in FINAL]
        for _ in range(AT_ONCE - len(open_ones)):
            self.submit()

    def submit(self) -> Asked:
        return self.fleet.submit(self.chance.choice([50, 400, 1500]))

    def revive(self) -> None:
        """Whatever runs a fleet starts again what has ended, under its old name."""
        for index, worker in enumerate(self.workers):
            if not worker.alive:
                self.fleet.workers.remove(worker)
                name = f"w{index}"
                self.workers[index] = self.fleet.start_worker(name=name)
        for index, coordinator in enumerate(self.coordinators):
            if not coordinator.alive:
                self.fleet.coordinators.remove(coordinator)
                self.coordinators[index] = self.fleet.start_coordinator()

    def wake(self) -> None:
        for process in self.stopped:
            if isinstance(process, Process):
                process.signal(signal.SIGCONT)
            elif process.is_running():
                process.resume()
        self.stopped.clear()

    # -- acts ------------------------------------------------------------------------------------------------------

    def worker(self) -> psutil.Process | None:
        """A worker process, if that supervisor has one now."""
        below = self.chance.choice(self.workers).children()
        return below[0] if below else None

    def kill_worker(self) -> None:
        if (worker := self.worker()) is not None:
            worker.kill()

    def kill_supervisor(self) -> None:
        self.chance.choice(self.workers).kill()

    def end_worker(self) -> None:
        self.chance.choice(self.workers).stop(60)

    def stop_worker(self) -> None:
        if (worker := self.worker()) is not None:
            worker.suspend()
            self.stopped.append(worker)
            time.sleep(self.chance.uniform(0, 6))
            self.wake()

    def kill_coordinator(self) -> None:
        self.chance.choice(self.coordinators).kill()

    def stop_coordinator(self) -> None:
        coordinator = self.chance.choice(self.coordinators)
        coordinator.signal(signal.SIGSTOP)
        self.stopped.append(coordinator)
        time.sleep(self.chance.uniform(0, 6))
        self.wake()

    def restart_broker(self) -> None:
        self.fleet.broker.kill()
        time.sleep(self.chance.uniform(0, 3))
        self.fleet.broker.start()

    def close_connections(self) -> None:
        brokers.drop_clients(self.fleet.broker)

    def wipe_state(self) -> None:
        self.fleet.broker.wipe_state()


@case("26", f"everything at once: {SECONDS:g} s of random faults", quick="redis rabbitmq", timeout=SECONDS + 500)
def test_chaos(fleet: Fleet) -> None:
    seed = SEED or random.SystemRandom().randrange(1, 1 << 32)
    print(f"SEED={seed}", flush=True)
    chaos = Chaos(fleet, seed)
    chaos.start()
    with fleet.fault():
        chaos.run(SECONDS)
    fleet.finish(timeout=300)
