"""Coordinators and submits that end at any moment, and a store that fills up."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.fleet import Fleet, injected
from tests.fault.table import case
from tests.support.ports import wait_until
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
        assert time.monotonic() - stopped < 15
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
            done = subprocess.run(argv, env=env, cwd=fleet.folder, capture_output=True, timeout=60, check=False)
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


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """A file system of this size at the folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"a small disk needs mount(8) to be allowed (root, CAP_SYS_ADMIN): {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@case("19", "disk full under store and log, then freed", quick="rabbitmq")
def test_disk_full(fleet: Fleet) -> None:
    with small_disk(fleet.store_folder, 96):
        fleet.start()
        fleet.submit(4000)
        fleet.wait_progress(0.15)
        balloon = fleet.store_folder / "balloon"
        with fleet.fault():
            with open(balloon, "wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 65536)
                    file.flush()
            fleet.coordinators[0].wait_line("disk_full", 60)
            wait_until(lambda: fleet.coordinators[0].alive, 1, "it lives")
            time.sleep(6)
            assert fleet.coordinators[0].alive
            balloon.unlink()
        fleet.finish()
        fleet.processes.wait_gone()
