"""Starts worker processes and keeps them: restarts those that fail, drains all on SIGTERM, leaves nothing behind.

When one ends abnormally, what it held and what was inside its engine is reported (`workers.crash_report`), so that the
coordinator sends it again at once and knows which requests to suspect.

Each child leads a process group of its own, so that a terminal's Ctrl-C or a signal to our group does not reach the
engine's processes, which would abort their requests at once. What is left of the group when a child has ended is
killed: the engine's processes hold the GPU's memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from common import logs
from common.errors import UsageError
from workers.breadcrumb import BREADCRUMB
from workers.crash_report import Reporter
from workers.parent import SUPERVISOR_PID

#: Seconds before a restart; doubles with every failed start in a row.
BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
#: A child that lived this long had started.
HEALTHY_S = 60.0
#: Exit statuses of a worker that could not start (`common.errors`), however long it took to find out: loading weights
#: and failing at the end is no healthy life.
CANNOT_START = (1, 3)
#: Exit status of a worker whose requests failed while others' did not; seconds until it is started with a new engine;
#: how often that is tried, unless it lived well for so many seconds in between.
SICK = 75
SICK_WAIT_S = 30.0
SICK_TIMES = 3
SICK_FORGOTTEN_S = 3600.0
#: Our status when a child was given up that signals had ended.
EXIT_KILLED = 70
#: Seconds a child has to end beyond the drain: requeueing, stopping the engine.
GRACE_S = 45.0

log = logs.get(__name__)


@dataclass
class Child:
    """One worker process: how to start it, and how it stands."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    #: Where it leaves its breadcrumb.
    crumb: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    #: Failed starts in a row.
    failures: int = 0
    #: Times in a row that it was found sick.
    sick: int = 0
    #: When to start it again, by the monotonic clock; None: not.
    due: float | None = 0.0


def backoff(failures: int) -> float:
    """Seconds to wait before restart number `failures` (from 1)."""
    return min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** (failures - 1))


class Supervisor:
    """Runs in the main thread, which starts all children: the kernel's parent-death signal hangs on that thread."""

    def __init__(
        self, children: list[Child], drain_s: float, give_up_after: int = 0, reporter: Reporter | None = None
    ) -> None:
        self._children = children
        self._reporter = reporter
        self._give_up_after = give_up_after
        self._drain_s = drain_s
        self._signals = 0
        self._deadline = 0.0
        self._status = 0
        self._killed = False

    def run(self) -> int:
        """Until every child has ended for good; returns 0, the status of a child that is not started again (2: it would
        say the same again; any, after `give_up_after` failed starts in a row), or 1 when one had to be killed.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._reporter is not None:
            for child in self._children:
                if child.crumb is not None:
                    self._reporter.take_left(child.crumb)
        try:
            while True:
                self._start_due()
                if all(child.process is None and child.due is None for child in self._children):
                    break
                if select.select([reader], [], [], self._pause())[0]:
                    os.read(reader, 4096)
                self._reap()
                if self._signals and time.monotonic() > self._deadline:
                    self._kill_all()
        finally:
            self._kill_all()
            if self._reporter is not None:
                self._reporter.close()
        log.info("all workers gone", killed=self._killed)
        return self._status or int(self._killed)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            self._deadline = time.monotonic() + self._drain_s + GRACE_S
        for child in self._children:
            child.due = None
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    # To the worker alone. The second one makes it skip the rest of its drain.
                    child.process.send_signal(signal.SIGTERM)

    def _start_due(self) -> None:
        for child in self._children:
            if child.process is None and child.due is not None and child.due <= time.monotonic():
                env = {**os.environ, **child.env, SUPERVISOR_PID: str(os.getpid())}
                if child.crumb is not None and self._reporter is not None:
                    env[BREADCRUMB] = str(child.crumb)
                child.process = subprocess.Popen(child.argv, env=env, start_new_session=True)
                child.started_at = time.monotonic()
                if self._signals:
                    # One that came while it was being started has missed it.
                    child.process.terminate()
                log.info("worker started", node=child.name, pid=child.process.pid)

    def _pause(self) -> float:
        due = [child.due for child in self._children if child.due is not None and child.process is None]
        if self._signals:
            due.append(self._deadline)
        # SIGCHLD wakes us; the second is for what might be missed.
        return min(1.0, max(0.0, min(due, default=time.monotonic() + 1.0) - time.monotonic()))

    def _reap(self) -> None:
        for child in self._children:
            process = child.process
            if process is None or not _has_ended(process.pid):
                continue
            _kill_group(process.pid)
            status = process.wait()
            child.process = None
            was_ready = self._tell(child, status, charge=status != 0)
            self._ended(child, status, was_ready)

    def _tell(self, child: Child, status: int, *, charge: bool) -> bool:
        """Report what an ended worker held; returns whether it left word of having been ready."""
        if child.crumb is None or self._reporter is None:
            return False
        reason = f"signal {-status}" if status < 0 else f"exit {status}"
        return self._reporter.take(child.crumb, reason, charge=charge)

    def _ended(self, child: Child, status: int, was_ready: bool) -> None:
        if self._signals or status == 0:
            child.due = None
            log.info("worker ended", node=child.name, status=status)
            return
        if status == SICK:
            self._rest(child)
            return
        if status == UsageError.exit_code:
            # It has said what is wrong; starting it again would only say it again.
            self._give_up(status)
            return
        # A worker that served and was ended by a request is no worker that cannot start. Where a breadcrumb can say so,
        # nothing else counts: a defect that ends a start after the weights are loaded has status 70 too.
        told = child.crumb is not None and self._reporter is not None
        lived = not told and status not in CANNOT_START and time.monotonic() - child.started_at > HEALTHY_S
        child.failures = 0 if was_ready or lived else child.failures + 1
        if child.failures and child.failures == self._give_up_after:
            log.error("worker given up", node=child.name, status=status, failures=child.failures)
            self._give_up(status if status > 0 else EXIT_KILLED)
            return
        wait = backoff(max(1, child.failures))
        child.due = time.monotonic() + wait
        log.warning("worker failed; starting it again", node=child.name, status=status, seconds=wait)

    def _rest(self, child: Child) -> None:
        """A new engine may help; a machine that stays sick is a person's to look at. The other workers go on."""
        child.sick = 1 if time.monotonic() - child.started_at > SICK_FORGOTTEN_S else child.sick + 1
        if child.sick < SICK_TIMES:
            child.due = time.monotonic() + SICK_WAIT_S
            log.error("worker is sick; starting it with a new engine", node=child.name, seconds=SICK_WAIT_S)
            return
        child.due = None
        self._status = SICK
        log.error("worker given up: its requests fail and others' do not; look at its GPU", node=child.name)

    def _give_up(self, status: int) -> None:
        self._status = status
        for other in self._children:
            other.due = None
            if other.process is not None:
                other.process.terminate()
        self._signals += 1
        self._deadline = time.monotonic() + self._drain_s + GRACE_S

    def _kill_all(self) -> None:
        for child in self._children:
            child.due = None
            if child.process is not None:
                self._killed = True
                log.error("worker killed: it did not end in time", node=child.name)
                _kill_group(child.process.pid)
                status = child.process.wait()
                child.process = None
                self._tell(child, status, charge=False)


def _has_ended(pid: int) -> bool:
    # Not reaped yet, so that the group's number cannot belong to anybody else when it is killed.
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
