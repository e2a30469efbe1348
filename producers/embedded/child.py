"""One supervised process of the fleet: started with a log, started again when it exits, later and later."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from producers.embedded import procfs
from producers.embedded.record import Process

#: A log larger than this is set aside (`.1`), and begun anew.
LOG_BYTES = 16 << 20
#: Seconds between looks at how large it is.
LOG_EVERY_S = 60.0

_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0
#: After this long alive, an exit is the first one again.
_STEADY_S = 60.0

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: What our commands say to a person.
_SPOKEN = re.compile(r"^(workers|producers): (?!.*; waiting up to|set BATCHMILL_DEBUG)(error: )?")
_TELLING = re.compile(r"^(error|usage|fatal)|error:|Error\b|cannot|No module named", re.IGNORECASE)


class Child:
    """A process and when to start it again. Times are the caller's monotonic seconds."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.name, self.log = name, log
        self.restarts = 0
        #: Exits in a row without `settle` in between.
        self.failures = 0
        self.exit_status: int | None = None
        self.last_line: str | None = None
        self._argv, self._env, self._cwd = list(argv), dict(env), cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._started_ticks = 0
        #: When it was last started.
        self.started_at = 0.0
        #: Not before this (monotonic) is it started again.
        self.next_start = 0.0
        self._log_from = 0
        self._log_looked_at = 0.0

    @property
    def alive(self) -> bool:
        """True between start and the `tend` that noticed the exit."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Its process id while it lives."""
        return None if self._process is None else self._process.pid

    def record(self) -> Process | None:
        """Itself for the fleet's record; None while it does not run."""
        if self._process is None:
            return None
        return Process(name=self.name, pid=self._process.pid, started=self._started_ticks, restarts=self.restarts)

    def settle(self) -> None:
        """It does its work: what happens from now on is not a failed start."""
        self.failures = 0

    def retry_now(self) -> None:
        """Forget earlier failures and start at the next `tend`."""
        self.failures, self.next_start = 0, 0.0

    def tend(self, now: float, start: bool = True) -> bool:
        """Notice an exit, start it (again) when it is time and `start`; True when something changed."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                if now - self._log_looked_at >= LOG_EVERY_S:
                    self._log_looked_at = now
                    if cut_log(self.log):
                        self._log_from = 0
                return False
            self._ended(now, status)
            return True
        if not start or now < self.next_start:
            return False
        self._start(now)
        return True

    def _start(self, now: float) -> None:
        if self.exit_status is not None:
            self.restarts += 1
        cut_log(self.log)
        parent = os.getpid()
        with open(self.log, "ab", opener=lambda p, f: os.open(p, f, 0o600)) as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                # Must be set between fork and exec; safe, since the daemon has one thread.
                preexec_fn=lambda: procfs.die_with(parent),  # noqa: PLW1509
            )
        seen = procfs.look(self._process.pid)
        self._started_ticks = seen.started if seen else 0
        self.started_at = now

    def _ended(self, now: float, status: int) -> None:
        self._process = None
        self.exit_status = status
        self.last_line = telling_line(self.log, self._log_from)
        if now - self.started_at > _STEADY_S:
            self.failures = 0
        self.failures += 1
        self.next_start = now + min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** (self.failures - 1))

    def terminate(self) -> None:
        """SIGTERM to it alone: it ends its own children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it and all that is in its session's group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def cut_log(log: Path) -> bool:
    """Set a log aside that has become large; True when that was done.

    Its writer goes on in the same file, which it only ever appends to; what it writes in between is in neither.
    """
    try:
        if log.stat().st_size <= LOG_BYTES:
            return False
        aside = log.with_name(log.name + ".1")
        aside.unlink(missing_ok=True)
        with open(aside, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as target:
            with open(log, "rb") as source:
                shutil.copyfileobj(source, target)
        os.truncate(log, 0)
    except OSError:
        return False  # The disk may be full; there is another look soon.
    return True


def telling_line(log: Path, start: int) -> str | None:
    """The line of a log (from byte `start` on) that says best why a process ended; at most 300 characters."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 32_768))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (_SPOKEN, _TELLING):
        telling = [line for line in lines if pattern.search(line)]
        if telling:
            lines = telling
            break
    chosen = lines[-1] if lines else ""
    chosen = re.sub(r"^(error|fatal): ", "", _SPOKEN.sub("", chosen), flags=re.IGNORECASE)
    return chosen[:300] or None
