"""Coordinators and submits that end at any moment, and a store that fills up."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.fault.fleet import Fleet, injected
from tests.fault.table import case
from tests.support.processes import Process


def leads(process: Process) -> None:
    process.wait_line(r"\bleads\b", 60)


@case("16", "kill -9 the coordinator 20 times at random moments")
def test_coordinator_killed_again_and_again(fleet: Fleet) -> None:
    chance = random.Random(16)
    fleet.start()
    # Three batches, so that some kills fall into an assembly.
    for count in (2500, 2000, 1500):
        fleet.submit(count)
    fleet.wait_progress(0.1)
    with fleet.fault():
        for _ in range(20):
            fleet.coordinators[-1].kill()
            leads(fleet.start_coordinator())
            time.sleep(chance.uniform(0, 1.5))
    fleet.finish()


@case("17", "kill -9 the active coordinator, then SIGSTOP the next one and SIGCONT it", quick="rabbitmq")
def test_active_coordinator_replaced(fleet: Fleet) -> None:
    first = fleet.start_coordinator()
    leads(first)
    fleet.start(coordinators=1)
    second = fleet.coordinators[-1]
    second.wait_line("standby", 30)
    fleet.submit(4000)
    fleet.wait_progress(0.15)
    with fleet.fault():
        first.kill()
        leads(second)
        third = fleet.start_coordinator()
        third.wait_line("standby", 30)
        second.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        leads(third)
        assert time.monotonic() - stopped < 45
        second.signal(signal.SIGCONT)
        assert second.wait(30) == 75
        assert "ousted" in second.text
    fleet.finish()


@case("18", "kill -9 submit at each of its steps", quick="redis")
def test_submit_killed(fleet: Fleet) -> None:
    """Nothing is visible of a batch before it is whole; one that was whole goes on."""
    fleet.start()
    fleet.submit()
    fleet.wait_progress(0.1)
    visible = {fleet.batches[0].id}
    with fleet.fault():
        for step in range(100):
            path, ids = fleet.write_input(40)
            argv = [sys.executable, "-m", "producers", "submit", str(path), "--detach"]
            env = fleet.env | injected("kill_at_step", fleet.folder) | {"BATCHMILL_TEST_INJECT_STEP": str(step)}
            done = subprocess.run(argv, env=env, cwd=fleet.folder, capture_output=True, timeout=120, check=False)
            # The next submit clears away or completes what this one left.
            listed = {batch["id"] for batch in fleet.producers("list", "--all")["data"]}
            new = listed - visible
            assert len(new) <= 1
            for batch_id in new:
                fleet.expect(batch_id, ids)
            visible = listed
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
    assert step >= 6, "the steps of a submit were not met"
    assert len(fleet.batches) >= 3, "no killed submit had enqueued its batch"
    # A batch whose submit was killed before its marker is found by the next submit.
    fleet.submit(40)
    fleet.finish()


class Disk:
    """The disk under a fleet's store and log, which can be full."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._balloon = fleet.store_folder / "balloon"

    def fill(self) -> None:
        """No room for another byte."""
        with open(self._balloon, "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
                file.flush()

    def free(self) -> None:
        """Room again."""
        self._balloon.unlink()


class Limit(Disk):
    """Where nothing may be mounted: the kernel's limit on the size of the coordinator's files."""

    def fill(self) -> None:
        self._set(0)

    def free(self) -> None:
        self._set(resource.RLIM_INFINITY)

    def _set(self, most: int) -> None:
        resource.prlimit(self.fleet.coordinators[-1].pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(fleet: Fleet) -> Iterator[Disk]:
    """A file system of 96 MiB at the store's folder, or what comes nearest."""
    fleet.store_folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(fleet.store_folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield Limit(fleet)
        return
    try:
        yield Disk(fleet)
    finally:
        # Lazily: a role that did not end yet holds files there.
        subprocess.run(["umount", "--lazy", str(fleet.store_folder)], check=True)


@case("19", "disk full under store and log, then freed", quick="rabbitmq")
def test_disk_full(fleet: Fleet) -> None:
    with small_disk(fleet) as disk:
        fleet.start()
        fleet.submit(4000)
        fleet.wait_progress(0.15)
        with fleet.fault():
            disk.fill()
            fleet.coordinators[0].wait_line("disk_full", 60)
            time.sleep(6)
            assert fleet.coordinators[0].alive
            disk.free()
        fleet.finish()
