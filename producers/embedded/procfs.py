"""Processes by /proc: which are ours although their parent is gone. Linux only; elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

#: Set in the environment of every process of a fleet, to its folder.
MARK = "BATCHMILL_FLEET_FOLDER"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

try:
    _libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if os.uname().sysname == "Linux" else None
except OSError:
    _libc = None


@dataclass(frozen=True)
class Seen:
    """A living process: `started` in ticks since boot, `session` its session id."""

    pid: int
    parent: int
    session: int
    started: int


def look(pid: int) -> Seen | None:
    """A process as /proc has it; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, so count from the last one: state ppid pgrp session … starttime.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Seen(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def is_gone(pid: int) -> bool:
    """True when no such process lives; False also where that cannot be told."""
    return _libc is not None and look(pid) is None


def all_processes() -> list[Seen]:
    """Every living process of this user."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == os.getuid():
                        seen = look(int(entry.name))
                        if seen is not None:
                            found.append(seen)
    return found


def below(pid: int) -> list[Seen]:
    """All descendants of a process."""
    processes = all_processes()
    found: list[Seen] = []
    parents = {pid}
    while parents:
        children = [p for p in processes if p.parent in parents]
        found += children
        parents = {c.pid for c in children}
    return found


def of_fleet(folder: Path, recorded: Iterable[tuple[int, int]]) -> list[Seen]:
    """Processes of the fleet in `folder`, this one aside.

    By the mark in their environment, and by session: an engine's children rewrite their title and with it the memory
    /proc reads the environment from. `recorded` are (pid, started) of session leaders the daemon had written down; a
    leader with another start time is another process that got the number.
    """
    processes = all_processes()
    by_pid = {p.pid: p for p in processes}
    sessions = {}
    for pid, started in recorded:
        leader = by_pid.get(pid)
        if leader is None or leader.started == started:
            sessions[pid] = started
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in processes:
        if process.pid == os.getpid():
            continue
        ours = process.session in sessions and process.started >= sessions[process.session]
        if not ours:
            with contextlib.suppress(OSError):
                ours = mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        if ours:
            found.append(process)
    return found


def kill_all(find: Callable[[], list[Seen]], timeout_s: float = 10.0) -> int:
    """SIGKILL what `find` finds until it finds nothing; the number of processes killed."""
    killed: set[tuple[int, int]] = set()
    deadline = time.monotonic() + timeout_s
    while left := find():
        for process in left:
            killed.add((process.pid, process.started))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return len(killed)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can leave the tree."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """In a new child: be killed when `parent`'s calling thread ends, however it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
