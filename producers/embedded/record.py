"""What the daemon says of the fleet: `fleet.json`, replaced whole at every change, read by the commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

#: Sent to the daemon by who wants a record of now, not of its last look; ignored by whoever does not know it.
ASK_SIGNAL = signal.SIGURG


class Process(msgspec.Struct, kw_only=True):
    """A process of the fleet. `started` is the kernel's start time in ticks: with the pid it names one process."""

    name: str
    pid: int
    started: int
    restarts: int = 0


class WorkerState(msgspec.Struct, kw_only=True):
    """The worker of one model.

    `state`: `waiting` (another model has the devices), `starting`, `loading` (the engine starts), `ready`, `draining`,
    `restarting` (it ended and will be started again), `failed` (given up until somebody asks for the model again).
    `detail` is one line for a person, set when something is wrong; `log` is the path of its log.
    """

    model: str
    state: str
    detail: str | None = None
    log: str = ""


class Record(msgspec.Struct, kw_only=True):
    """The whole fleet. `state`: starting, up, stopping, stopped, failed (`problem` says why)."""

    state: str
    pid: int
    fingerprint: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    #: All this is no older than this (monotonic seconds, which the processes of a machine share).
    looked_at: float = 0.0
    #: Unix seconds at which it ends if nothing is asked of it; None while there is work or somebody follows.
    ends_at: float | None = None
    problem: str | None = None
    socket: str = ""
    store: str = ""
    logs: str = ""
    processes: list[Process] = []
    workers: list[WorkerState] = []


def read(path: Path) -> Record | None:
    """The record; None when there is none (or one of another version, which is no use either)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def write(path: Path, record: Record) -> None:
    """Replace the record in one step. Not synced: it tells of processes, which do not survive the machine either."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        file.write(msgspec.json.encode(record))
    temporary.replace(path)
