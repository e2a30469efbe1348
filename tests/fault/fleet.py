"""A fleet for one case of the fault suite: one broker, coordinators, workers under their supervisors, batches.

The order of a case: `start`, `submit`, `wait_progress`, then the fault inside `with fleet.fault():`, then `finish`,
which waits for the end, ends the fleet, gathers the aftermath, and fails unless the oracle finds nothing wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common import settings as settings_module
from common.settings import Settings
from common.store import LocalStore
from producers.batch import FINAL, Status, read_batch, read_status
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.fault import brokers, requests
from tests.fault.aftermath import Aftermath, Outcome, faults
from tests.fault.measure import Measured, measure
from tests.support.brokers import Broker, Depth
from tests.support.ports import wait_until
from tests.support.processes import ROOT, Process, Processes
from workers.engine import echo_journal

INJECT = Path(__file__).parent / "inject"
#: Requests of a case's batch: two workers of 64 slots take about nine seconds for them.
REQUESTS = 2000
LATENCY_MS = 450
#: Time limits, a fifth of the defaults or less: a case should wait seconds, not minutes.
LIMITS = {
    "BATCHMILL_SCHEDULER_LEASE_S": "3",
    "BATCHMILL_SCHEDULER_UNCLAIMED_S": "4",
    "BATCHMILL_SCHEDULER_TAKEOVER_S": "3",
    "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "6",
    "BATCHMILL_BROKER_HEARTBEAT_S": "4",
    "BATCHMILL_INFERENCE_DRAIN_S": "3",
}
READY = r"ready\.$"


@dataclass
class Asked:
    """A batch that was submitted."""

    id: str
    custom_ids: list[str]
    #: custom_id → code of the error it must end with.
    failed: dict[str, str | int]
    #: Statuses it may end with, and the code that any of its requests may fail with.
    final: tuple[str, ...] = ("completed",)
    may_fail: str | None = None

    def cut(self, *final: str) -> None:
        """It is cancelled or expires; `final`: how it may end."""
        self.final = final
        self.may_fail = "batch_cancelled" if "cancelled" in final else "batch_expired"


class Fleet:
    """See the module. `folder` is the case's own."""

    def __init__(self, folder: Path, broker: Broker, processes: Processes) -> None:
        self.folder = folder
        self.broker = broker
        self.processes = processes
        self.store_folder = folder / "store"
        self.journal = folder / "journal"
        self.workers: list[Process] = []
        self.coordinators: list[Process] = []
        self.batches: list[Asked] = []
        self.measured: Measured | None = None
        self._faults_from: float | None = None
        self._faults_to = 0.0
        self._files = 0
        for name in ("tmp", "turns", "inputs"):
            (folder / name).mkdir()
        self.env = make_fleet_env(folder, broker.url, broker.state_url) | LIMITS
        self.env |= {
            "BATCHMILL_STORE_WAL_DIR": "",
            "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "64",
            "BATCHMILL_SCHEDULER_QUEUE_SIZE": "1024",
            "BATCHMILL_ECHO_LATENCY_MS": str(LATENCY_MS),
            "BATCHMILL_ECHO_JOURNAL": str(self.journal),
            "BATCHMILL_ECHO_FAULTS_DIR": str(folder / "turns"),
            # Whatever a role leaves behind in the system's folder for temporary files is seen at the end.
            "TMPDIR": str(folder / "tmp"),
        }

    # -- roles -----------------------------------------------------------------------------------------------------

    def start(self, workers: int = 2, coordinators: int = 1, **env: str) -> None:
        """Bring up the roles, and wait until workers consume. `env`: for all of them."""
        self.env |= env
        for _ in range(coordinators):
            self.start_coordinator()
        started = [self.start_worker() for _ in range(workers)]
        for worker in started:
            worker.wait_line(READY, 90)

    def start_worker(self, name: str = "", **env: str) -> Process:
        """`workers start`: a supervisor with one worker. Keywords are its environment."""
        label = name or f"w{len(self.workers)}"
        worker = self.processes.worker(self.env | env, ECHO_MODEL, "--name", label)
        self.workers.append(worker)
        return worker

    def start_coordinator(self, **env: str) -> Process:
        """`producers coordinate`."""
        coordinator = self.processes.coordinator(self.env | env)
        self.coordinators.append(coordinator)
        return coordinator

    @staticmethod
    def child(worker: Process) -> psutil.Process:
        """The worker process below a supervisor."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = [p for p in worker.children() if p.status() != psutil.STATUS_ZOMBIE]
            return bool(found)

        wait_until(there, 60, "the supervisor has its worker")
        return found[0]

    @property
    def settings(self) -> Settings:
        """What the roles read."""
        return settings_module.load(env=self.env)

    @property
    def store(self) -> LocalStore:
        """The fleet's store."""
        return LocalStore(self.store_folder)

    # -- batches ---------------------------------------------------------------------------------------------------

    def producers(self, *argv: str, status: tuple[int, ...] = (0,), **env: str) -> Any:
        """A command with `--json`, and what it printed."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "producers", *argv, "--json"],
            env=base | self.env | env,
            cwd=self.folder,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in status, f"{argv}: {done.returncode}: {done.stderr.decode()}"
        return json.loads(done.stdout)

    def write_input(self, count: int, marks: Mapping[int, str] | None = None) -> tuple[Path, list[str]]:
        """An input file, and its custom_ids."""
        self._files += 1
        path = self.folder / "inputs" / f"batch{self._files}.jsonl"
        return path, requests.write(path, count, marks or {})

    def submit(
        self,
        count: int = REQUESTS,
        *options: str,
        marks: Mapping[int, str] | None = None,
        failed: Mapping[int, str | int] | None = None,
    ) -> Asked:
        """Submit a batch by the command line. `failed`: number → the code it must fail with."""
        path, ids = self.write_input(count, marks)
        made = self.producers("submit", str(path), "--detach", *options)
        return self.expect(made["id"], ids, {ids[n]: code for n, code in (failed or {}).items()})

    def expect(self, batch_id: str, ids: list[str], failed: dict[str, str | int] | None = None) -> Asked:
        """Let `finish` look at a batch too."""
        asked = Asked(batch_id, ids, failed or {})
        self.batches.append(asked)
        return asked

    def status(self, asked: Asked) -> Status:
        """Where the batch stands, by the store."""
        store = self.store
        return read_status(store, read_batch(store, asked.id))

    def dead_letters(self) -> int:
        """Messages that coordinators recorded and took out of the dead-letter queue."""
        return sum(process.text.count("dead_letter ") for process in self.processes.started)

    def answered(self) -> int:
        """Requests that engines have answered so far, all batches together."""
        return sum(1 for event in echo_journal.read(str(self.journal)) if event.kind == "=")

    def logged(self) -> int:
        """Requests that have their final result by the status files, all batches together."""
        counts = [self.status(asked).request_counts for asked in self.batches]
        return sum(c.completed + c.failed for c in counts)

    def wait_ended(self, asked: Asked, timeout: float = 120) -> str:
        """Wait for a batch's end; its final status."""
        wait_until(lambda: self.status(asked).status in FINAL, timeout, f"{asked.id} ends", 0.1)
        return self.status(asked).status

    def wait_progress(self, share: float = 0.3, timeout: float = 90) -> None:
        """Wait until that share of all requests is answered."""
        wanted = share * sum(len(asked.custom_ids) for asked in self.batches)
        wait_until(lambda: self.answered() >= wanted, timeout, f"{wanted:.0f} requests are answered", 0.05)

    # -- the fault -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """The block is the fault: it recovers from the block's end on. May be entered again: the last end counts."""
        if self._faults_from is None:
            self._faults_from = time.monotonic()
        yield
        self._faults_to = time.monotonic()
        self._logged_then = self.logged()

    def wait_recovered(self, timeout: float = 120) -> None:
        """Wait until a result is logged after the fault."""
        if self._faults_from is None:
            return
        wait_until(lambda: self.logged() > self._logged_then or self._all_ended(), timeout, "work goes on", 0.1)
        self._progress_at = time.monotonic()

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, timeout: float = 150) -> Aftermath:
        """Wait for all batches, end the fleet, and judge; `AssertionError` with everything that is wrong."""
        self.wait_recovered(timeout)
        for asked in self.batches:
            self.wait_ended(asked, timeout)
        found = Aftermath([self._outcome(asked) for asked in self.batches])
        if self._faults_from is not None:
            self.measured = measure(
                echo_journal.read(str(self.journal)), self._faults_from, self._faults_to, self._progress_at
            )
        idle = self._settle(lambda: brokers.messages(self.broker), 60)
        self.end()
        found.messages = idle | self._settle(lambda: brokers.messages(self.broker), 30)
        found.keys = self._settle(lambda: brokers.leftovers(self.broker), 90)
        found.processes = [f"{p.pid} {' '.join(p.cmdline())[:100]}" for p in self.processes.survivors()]
        found.locks = self._locks()
        found.files = self._files_left()
        wrong = faults(found)
        assert not wrong, "\n".join(wrong)
        return found

    def end(self) -> None:
        """SIGTERM to all roles that live; each must end by itself, with status 0."""
        for group in (self.workers, self.coordinators):
            running = [p for p in group if p.alive]
            for process in running:
                process.signal(signal.SIGTERM)
            for process in running:
                status = process.wait(60)
                assert status == 0, f"{process.name} ended with {status}:\n" + "\n".join(process.lines[-20:])

    def _all_ended(self) -> bool:
        return all(self.status(asked).status in FINAL for asked in self.batches)

    def _outcome(self, asked: Asked) -> Outcome:
        out = self.folder / f"out-{asked.id}"
        # 1: some requests failed, 4: cancelled or expired.
        status = self.producers("results", asked.id, "--output", str(out), status=(0, 1, 4))
        return Outcome(
            batch=asked.id,
            custom_ids=asked.custom_ids,
            expected=requests.answers(self.store, asked.id),
            output=_lines(out / "output.jsonl"),
            errors=_lines(out / "errors.jsonl"),
            summary=json.loads((out / "summary.json").read_bytes()),
            status=status,
            failed=asked.failed,
            may_fail=asked.may_fail,
            final=asked.final,
        )

    @staticmethod
    def _settle(ask: Any, timeout: float) -> Any:
        """What `ask` finds once it finds nothing, or when time is up."""
        deadline = time.monotonic() + timeout
        while (left := ask()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _locks(self) -> list[str]:
        held = []
        for path in self.store_folder.rglob("*lock"):
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(str(path))
        return held

    def _files_left(self) -> list[str]:
        left = list(self.store_folder.rglob(".tmp-*"))
        for name in ("active", "incoming", "control"):
            left += [path for path in (self.store_folder / name).rglob("*") if path.is_file()]
        left += (self.folder / "tmp").rglob("*")
        # What workers note about themselves while they live (`places.run_dir`).
        left += (path for path in (self.folder / "home").rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in left)


def injected(name: str, folder: Path) -> dict[str, str]:
    """Environment of a process that is to do a fault to itself; see `inject/sitecustomize.py`."""
    return {"PYTHONPATH": f"{INJECT}:{ROOT}", "BATCHMILL_TEST_INJECT": name, "BATCHMILL_TEST_INJECT_DIR": str(folder)}


def _lines(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n"), f"{path.name}: the last line is cut"
    return [json.loads(line) for line in raw.split(b"\n")[:-1]]


__all__ = ["REQUESTS", "Asked", "Depth", "Fleet", "injected"]
