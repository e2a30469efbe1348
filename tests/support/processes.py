"""Subprocesses of a test: started with a log, waited for by what they print, and gone at the end, children included.

Each carries a mark in its environment. Children inherit it, so `survivors` finds them wherever they hang in the
process tree, and nothing that this test run did not start is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.ports import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MARK = "BATCHMILL_TEST_MARK"


class Process:
    """A running command. Its stdout and stderr go to `log`, line by line."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.name, self.log = name, log
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._open = True
        self.popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self.popen.pid
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with open(self.log, "ab", buffering=0) as file:
            for raw in self.popen.stdout:
                file.write(raw)
                with self._news:
                    self._lines.append(raw.decode("utf-8", "replace").rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._open = False
            self._news.notify_all()

    @property
    def lines(self) -> list[str]:
        """What it has printed so far."""
        with self._news:
            return list(self._lines)

    @property
    def text(self) -> str:
        """What it has printed so far, as one string."""
        return "\n".join(self.lines)

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self.popen.poll() is None

    def wait_line(self, pattern: str, timeout: float = 60, after: int = 0) -> re.Match[str]:
        """The first line (from number `after` on) that matches.

        `AssertionError` when the process ends first, or `timeout` seconds are over (`PATIENCE_S` if that is more).
        """
        wanted = re.compile(pattern)
        timeout = max(timeout, PATIENCE_S)
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                while after < len(self._lines):
                    found = wanted.search(self._lines[after])
                    if found:
                        return found
                    after += 1
                left = deadline - time.monotonic()
                if not self._open or left <= 0:
                    why = f"{timeout:g} s are over" if self._open else "it ended"
                    tail = "\n".join(self._lines[-30:])
                    raise AssertionError(f"{self.name}: no line matches {pattern!r}, {why}. Last lines:\n{tail}")
                self._news.wait(left)

    def wait(self, timeout: float = 60) -> int:
        """Its exit status (negative: the signal)."""
        timeout = max(timeout, PATIENCE_S)
        try:
            status = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = "\n".join(self.lines[-30:])
            raise AssertionError(f"{self.name} still runs after {timeout:g} s. Last lines:\n{tail}") from None
        # A child of its may hold the pipe open for good; what matters is in by then.
        self._reader.join(2)
        return status

    def signal(self, sig: int) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(sig)

    def kill(self) -> None:
        """SIGKILL this process alone, and wait for its end."""
        self.popen.kill()
        self.popen.wait(PATIENCE_S)

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, and its exit status."""
        self.popen.terminate()
        return self.wait(timeout)

    def children(self) -> list[psutil.Process]:
        """All processes below it."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Processes:
    """Starts processes with `folder` for their logs; `close` ends every one and whatever they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.started: list[Process] = []

    @property
    def marks(self) -> dict[str, str]:
        """The environment by which `survivors` finds a process.

        Celery and vLLM show titles by setproctitle, which would write them over the environment, mark and all.
        """
        return {MARK: self.mark, "SPT_NOENV": "1"}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start a command. `env` is added to this process's environment without its `BATCHMILL_…` variables."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        base |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)} | self.marks
        log = self.folder / f"{len(self.started):02}-{name}.log"
        process = Process(name, argv, base | dict(env or {}), cwd or self.folder, log)
        self.started.append(process)
        return process

    def python(self, name: str, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Process:
        """Start `python …` of this interpreter: `python("worker", "-m", "workers", "start", …)`."""
        return self.start(name, [sys.executable, *argv], env, cwd)

    def coordinator(self, env: Mapping[str, str], *argv: str) -> Process:
        """`producers coordinate`."""
        return self.python("coordinator", "-m", "producers", "coordinate", *argv, env=env)

    def worker(self, env: Mapping[str, str], model: str, *argv: str) -> Process:
        """`workers start --model MODEL`."""
        return self.python("worker", "-m", "workers", "start", "--model", model, *argv, env=env)

    def survivors(self) -> list[psutil.Process]:
        """Every living process that one of ours started, however far down, zombies aside."""
        found = []
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return found

    def wait_gone(self, timeout: float = PATIENCE_S) -> None:
        """Wait until nothing is left; `AssertionError` names what is."""
        timeout = max(timeout, PATIENCE_S)
        deadline = time.monotonic() + timeout
        while left := self.survivors():
            if time.monotonic() > deadline:
                names = [f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in left]
                raise AssertionError(f"still there after {timeout:g} s: {names}")
            psutil.wait_procs(left, timeout=0.1)

    def close(self) -> None:
        """SIGTERM to what we started, SIGKILL to all that is left 10 s later."""
        running = [p for p in self.started if p.alive]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
        while left := self.survivors():
            for other in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
            psutil.wait_procs(left, timeout=1)
        for process in self.started:
            process.popen.wait(PATIENCE_S)
