"""Faults that a process does to itself, at a place that no signal from outside would hit.

Python imports this module at start where this folder is on PYTHONPATH. `BATCHMILL_TEST_INJECT` names the fault (a
function below), `BATCHMILL_TEST_INJECT_DIR` is a folder by which a fault that should happen once knows that it has.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def once(name: str) -> bool:
    """True for the first process that asks."""
    try:
        os.close(os.open(os.path.join(os.environ["BATCHMILL_TEST_INJECT_DIR"], name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill_before_ack() -> None:
    """SIGKILL once a chunk's last results are confirmed and its message is not acknowledged yet."""
    from workers.node import Ending, Node

    infer = Node.infer

    def wrapped(self: Node, *args: Any, **kwargs: Any) -> Any:
        ending = infer(self, *args, **kwargs)
        if ending[0] is Ending.DONE and ending[1].startswith("requests=") and self.ended > 1 and once("before_ack"):
            os.kill(os.getpid(), signal.SIGKILL)
        return ending

    Node.infer = wrapped  # type: ignore[method-assign]


def raise_in_task() -> None:
    """The first chunks end in a MemoryError and a SystemExit of the task itself, two each."""
    from workers.node import Node

    infer = Node.infer

    def wrapped(self: Node, *args: Any, **kwargs: Any) -> Any:
        for number, error in enumerate((MemoryError, SystemExit, MemoryError, SystemExit)):
            if once(f"raised{number}"):
                raise error
        return infer(self, *args, **kwargs)

    Node.infer = wrapped  # type: ignore[method-assign]


def deadly_requests() -> None:
    """The real engine: a request that says POISON ends its core, one that says HANG is never answered."""
    if "--no-supervisor" not in sys.orig_argv:
        return  # One of the engine's own processes.
    import asyncio

    from workers.engine import loader

    load = loader.load

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        engine: Any = load(*args, **kwargs)
        infer = engine.infer

        async def faulty(url: str, body: bytes) -> Any:
            if b"HANG" in body:
                await asyncio.Event().wait()
            if b"POISON" in body:
                # In company: the others are in the engine before it.
                await asyncio.sleep(0.3)
                os.kill(engine._processes[0].pid, signal.SIGKILL)
            return await infer(url, body)

        engine.infer = faulty
        return engine

    loader.load = wrapped


def clock_ahead() -> None:
    """The wall clock is ten minutes ahead."""
    _shift(600.0)


def clock_behind() -> None:
    """The wall clock is ten minutes behind."""
    _shift(-600.0)


def _shift(seconds: float) -> None:
    real = time.time
    time.time = lambda: real() + seconds
    time.time_ns = lambda: int(time.time() * 1e9)


def kill_at_step() -> None:
    """SIGKILL before step `BATCHMILL_TEST_INJECT_STEP` (from 0) of those by which a submit changes the store."""
    from common.store import LocalStore

    wanted = int(os.environ["BATCHMILL_TEST_INJECT_STEP"])
    count = 0

    def counted(method: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == wanted:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return method(*args, **kwargs)

        return wrapped

    for name in ("create_locked", "open_write", "put_atomic", "create_exclusive", "move", "delete"):
        setattr(LocalStore, name, counted(getattr(LocalStore, name)))


_name = os.environ.get("BATCHMILL_TEST_INJECT")
#: A supervisor passes its environment on to the worker, which alone is meant.
if _name and not ("workers" in sys.orig_argv and "--no-supervisor" not in sys.orig_argv):
    globals()[_name]()
