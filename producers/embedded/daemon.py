"""The daemon of the embedded fleet: `python -m producers.embedded.daemon FOLDER`, started by `fleet.ensure`.

It runs Redis, the coordinators and one worker command a model, starts again what exits, and ends when nothing has
been asked of it for the linger time. One thread, so that children may be tied to it (PR_SET_PDEATHSIG is tied to the
thread that forked): when it is killed, they are, and the next command finds a store to go on with.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec
import redis

from common import logs, places, registry, settings
from common.errors import BatchmillError, Unreachable, UsageError
from common.live import LiveState, WorkerFacts
from common.registry import Registry
from common.settings import Settings
from common.store import open_store
from producers.embedded import demand, procfs, redis_server
from producers.embedded.child import Child
from producers.embedded.layout import Layout
from producers.embedded.linger import linger
from producers.embedded.lock import FileLock
from producers.embedded.record import ASK_SIGNAL, Record, WorkerState, read, write

#: Failures of a worker in a row after which nobody tries again unasked.
GIVE_UP_AFTER = 3
#: Redis and coordinator are tried longer: without them nothing works.
REDIS_GIVE_UP_AFTER = 6
_REDIS_SUSPECT_FILE_AFTER = 2

_COORDINATOR_SETTLED_S = 10.0

_TICK_S = 0.5
_RECORD_EVERY_S = 5.0


class Daemon:
    """The running fleet. `run` returns when all its processes have ended."""

    def __init__(self, layout: Layout, loaded: Settings, models: Registry, env: dict[str, str]) -> None:
        self.layout, self.settings, self.registry, self.env = layout, loaded, models, env
        self.log = logs.get("fleet")
        self.stopping = False
        self.hurry = False
        self.problem: str | None = None
        store_url = places.store_url(loaded, env)
        self.store = open_store(store_url)
        self.active = demand.ActiveBatches(self.store, 1.0 if store_url.startswith(("/", "file:")) else 10.0)
        self.live = LiveState(loaded)
        self.redis = self._child("redis", redis_server.argv(redis_server.find_binary(), layout))
        self.coordinators = [
            self._child(f"coordinator-{n}", _python("producers", "coordinate", "--shard", str(n)))
            for n in range(loaded.scheduler.shards)
        ]
        self.workers: dict[str, Child] = {}
        #: Model → when it was last asked for (Unix seconds), as far as acted upon.
        self.asked: dict[str, float] = {}
        self.failed: set[str] = set()
        #: Told to end because another model needs its GPUs, or because its batches may not run for now.
        self.making_way: set[str] = set()
        #: Model → when one of its batches last might have run (Unix seconds).
        self.last_due: dict[str, float] = {}
        self.started_at = demand.now_s()
        self.linger_s = linger(env)
        self.idle_since: float | None = None
        self.up = False
        self.redis_answers = False
        self.facts: list[WorkerFacts] = []
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        #: Somebody asked how things stand: not looked at yet, and looked at but not written down.
        self._asked = self._owed = False
        self._looked_at = 0.0
        self._written: bytes = b""
        self._written_at = 0.0
        self._start_lock = FileLock(layout.start_lock)

    def _child(self, name: str, argv: list[str]) -> Child:
        return Child(name, argv, self.env, self.layout.logs / f"{name}.log", self.layout.folder)

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to end or idle for long; the exit status."""
        self._install_signals()
        procfs.adopt_orphans()
        self.log.info("the fleet starts", folder=str(self.layout.folder), linger_s=self.linger_s)
        self._write_record()
        try:
            while not self.stopping:
                self._tick(time.monotonic())
                if self.problem and not self.up:
                    return 1
                self._wait(_TICK_S)
        finally:
            self._end()
        return 0

    def _tick(self, now: float) -> None:
        self._begin_look()
        self._tend_redis(now)
        if self.redis_answers:
            if not self.up:
                self._release_unacked()
                self.up = True
            for coordinator in self.coordinators:
                coordinator.tend(now)
                if coordinator.alive and now - coordinator.started_at > _COORDINATOR_SETTLED_S:
                    coordinator.settle()
            self._look_at_workers()
            self._tend_workers(now)
        self._reap_orphans()
        self._consider_ending()
        self._write_record()

    def _tend_redis(self, now: float) -> None:
        changed = self.redis.tend(now)
        if changed and not self.redis.alive:
            self.redis_answers = False
            self.log.warning("redis ended", status=self.redis.exit_status, line=self.redis.last_line)
            if self.redis.failures == _REDIS_SUSPECT_FILE_AFTER:
                aside = redis_server.set_aside(self.layout)
                self.log.warning("redis does not start on its file, which was set aside", moved_to=str(aside))
            if self.redis.failures >= REDIS_GIVE_UP_AFTER:
                self.problem = f"Redis does not start: {self._why(self.redis)}"
        if self.redis.alive:
            self.redis_answers = redis_server.answers(self.layout)
            if self.redis_answers:
                self.redis.settle()

    def _release_unacked(self) -> None:
        try:
            count = redis_server.release_unacked(self.layout)
        except (redis.RedisError, OSError) as exc:
            self.log.warning("messages of a killed fleet wait for their visibility timeout", error=type(exc).__name__)
            return
        if count:
            self.log.info("messages that a killed fleet held are delivered again", count=count)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _look_at_workers(self) -> None:
        # What was known stays known while Redis does not answer: of a worker that has ended it says nothing.
        with contextlib.suppress(redis.RedisError, msgspec.DecodeError, OSError):
            self.facts = self.live.workers()

    def _tend_workers(self, now: float) -> None:
        self.active.models(now)
        wanted = demand.read_wanted(self.layout.wanted)
        for model, (wish, at) in wanted.items():
            if at > self.asked.get(model, 0.0):
                self.asked[model] = at
                self.idle_since = None
                if wish.linger_s is not None:
                    self.linger_s = wish.linger_s
                if model in self.workers:
                    self.failed.discard(model)
                    self.workers[model].retry_now()
        # For a batch whose hours have not come no model is loaded; the coordinator and this process wait for it.
        for model in [*self.active.due, *wanted]:
            if model not in self.workers:
                name = f"worker-{model.replace('@', '.')}"
                self.workers[model] = self._child(name, self._worker_argv(model))
        self.last_due.update(dict.fromkeys(self.active.due, demand.now_s()))
        for model, child in self.workers.items():
            resting = self._rests(model)
            if resting and child.alive and model not in self.making_way and not self._works(model):
                self.making_way.add(model)
                child.terminate()
            may_start = not resting and model not in self.failed and self._has_devices(model, self.active.due)
            if not child.tend(now, start=may_start):
                if child.alive and any(f.state == "ready" for f in self._facts_of(model)):
                    child.settle()
                continue
            if child.alive:
                self.log.info("worker started", model=model, pid=child.pid)
                continue
            if model in self.making_way:
                self.making_way.discard(model)
                child.retry_now()
                self.log.info("worker unloaded", model=model)
                continue
            self.log.warning("worker ended", model=model, status=child.exit_status, line=child.last_line)
            if self._hopeless(child):
                self.failed.add(model)

    @staticmethod
    def _hopeless(child: Child) -> bool:
        """True when another start would end the same way. The command itself tries again before it gives up; killed,
        or without its broker, it says nothing of the model.
        """
        status = child.exit_status or 0
        return child.failures >= GIVE_UP_AFTER or (status > 0 and status != Unreachable.exit_code)

    def _rests(self, model: str) -> bool:
        """True while a model need not be loaded: it has unfinished batches, and none of them was to run for a while."""
        if self.linger_s < 0 or self.active.due.get(model) or not self.active.waiting.get(model):
            return False
        wanted_at = max(self.asked.get(model, 0.0), self.last_due.get(model, self.started_at))
        return demand.now_s() - wanted_at >= self.linger_s

    def _works(self, model: str) -> bool:
        return any(f.running + f.waiting for f in self._facts_of(model))

    def _has_devices(self, model: str, due: dict[str, int]) -> bool:
        """One model at a time has the GPUs; it gives them up when it has nothing to do and another has."""
        if not self._needs_gpus(model):
            return True
        others = [m for m, c in self.workers.items() if m != model and c.alive and self._needs_gpus(m)]
        for other in others:
            if not due.get(other) and other not in self.making_way:
                self.making_way.add(other)
                self.workers[other].terminate()
        return not others

    def _needs_gpus(self, model: str) -> bool:
        if self.settings.inference.engine == "echo":
            return False
        try:
            return self.registry.get(model).hardware.gpus > 0
        except UsageError:
            return False

    def _worker_argv(self, model: str) -> list[str]:
        argv = _python("workers", "start", "--model", model, "--give-up-after", str(GIVE_UP_AFTER))
        if self._needs_gpus(model) and not self.settings.inference.device_ids and has_gpu():
            argv.append("--all-gpus")
        return argv

    def _facts_of(self, model: str) -> list[WorkerFacts]:
        """What living workers of the running command say: a killed one's word outlives it."""
        child = self.workers.get(model)
        if child is None or not child.alive:
            return []
        ours = (f for f in self.facts if f.model == model and f.supervisor == child.pid)
        return [f for f in ours if not procfs.is_gone(f.pid)]

    def _worker_state(self, model: str, child: Child) -> WorkerState:
        log = str(child.log)
        if model in self.failed:
            detail = f"the worker of {model} cannot start: {self._why(child)}"
            return WorkerState(model=model, state="failed", detail=detail, log=log)
        if not child.alive:
            if self.stopping:
                return WorkerState(model=model, state="draining", detail="the fleet is ending", log=log)
            if child.failures:
                detail = f"the worker of {model} ended and is started again: {self._why(child)}"
                return WorkerState(model=model, state="restarting", detail=detail, log=log)
            detail = f"another model has the GPUs; {model} starts when that has nothing left to do"
            if self._rests(model):
                detail = f"{model} is not loaded: its batches are paused, or their hours have not come"
            return WorkerState(model=model, state="waiting", detail=detail, log=log)
        said = {f.state for f in self._facts_of(model)}
        state = next((s for s in ("ready", "loading", "draining") if s in said), "starting")
        return WorkerState(model=model, state=state, log=log)

    def _why(self, child: Child) -> str:
        status = child.exit_status or 0
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        line = f"{child.last_line} ({how})" if child.last_line else how
        return f"{line}; log: {child.log}"

    # -- the end ------------------------------------------------------------------------------------------------------

    def _consider_ending(self) -> None:
        if self.problem or self.linger_s < 0:
            return
        now = demand.now_s()
        use = FileLock(self.layout.use_lock)
        with use:
            if self.active.models(time.monotonic()) or not use.try_acquire():
                self.idle_since = None
                return
        if self.idle_since is None:
            self.idle_since = now
        if now - max(self.idle_since, *self.asked.values(), self.started_at) < self.linger_s:
            return
        # Whoever wants the fleet holds the start lock while asking; so from here on nobody asks until it is gone.
        if not self._start_lock.try_acquire():
            return
        with use:
            asked = [at for _, at in demand.read_wanted(self.layout.wanted).values()]
            if not use.try_acquire() or self.active.models() or max(asked, default=0.0) > self.idle_since:
                self._start_lock.release()
                self.idle_since = None
                return
        self.log.info("nothing to do, the fleet ends", after_s=self.linger_s)
        self.stopping = True

    def _end(self) -> None:
        """Workers first (what they finish is still taken), then coordinators, then Redis; then whatever is left."""
        self.stopping = True
        self._write_record()
        self._end_children(list(self.workers.values()), self.settings.inference.drain_s + 20)
        self._end_children(self.coordinators, 20)
        self._end_children([self.redis], 15)
        killed = procfs.kill_all(lambda: procfs.below(os.getpid()))
        if killed:
            self.log.warning("processes left by those that ended were killed", count=killed)
        self._reap_orphans()
        with contextlib.suppress(OSError):
            self.layout.socket.unlink(missing_ok=True)
        self._write_record(final=True)
        self.log.info("the fleet has ended")

    def _end_children(self, children: list[Child], timeout_s: float) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + timeout_s
        while any(c.alive for c in children):
            now = time.monotonic()
            for child in children:
                child.tend(now, start=False)
            self._reap_orphans()
            if self.hurry or now > deadline:
                for child in children:
                    child.kill()
            if any(c.alive for c in children):
                self._wait(0.1)
                self._begin_look()
                self._write_record()

    # -- plumbing -----------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        # Any signal, a child's end among them, wakes the loop at once.
        signal.set_wakeup_fd(self._wake_w.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.signal(ASK_SIGNAL, self._told_to_look)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _told_to_look(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True

    def _told_to_end(self, _signal: int, _frame: FrameType | None) -> None:
        # The second time somebody is in a hurry.
        self.hurry = self.stopping
        self.stopping = True

    def _begin_look(self) -> None:
        """From here on the record is of now. In this order: who asks later than we look waits for the next look."""
        self._owed, self._asked = self._owed or self._asked, False
        self._looked_at = time.monotonic()

    def _wait(self, seconds: float) -> None:
        select.select([self._wake_r], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass

    def _reap_orphans(self) -> None:
        """Collect descendants that were handed to us; a child of our own is left to its `Child`."""
        own = {c.pid for c in [self.redis, *self.coordinators, *self.workers.values()]}
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in own:
                    return
                os.waitpid(found.si_pid, 0)

    def _state(self, final: bool) -> str:
        if self.problem:
            return "failed"
        if final:
            return "stopped"
        return "stopping" if self.stopping else "up" if self.up else "starting"

    def _write_record(self, final: bool = False) -> None:
        ends_at = None
        if self.idle_since is not None and self.linger_s >= 0 and not self.stopping:
            ends_at = max(self.idle_since, *self.asked.values(), self.started_at) + self.linger_s
        children = [self.redis, *self.coordinators, *self.workers.values()]
        troubled = [c for c in self.coordinators if c.failures >= GIVE_UP_AFTER]
        problem = self.problem
        if problem is None and troubled and not self.stopping:
            problem = f"the coordinator does not start: {self._why(troubled[0])}"
        record = Record(
            state=self._state(final),
            pid=os.getpid(),
            fingerprint=self.env.get("BATCHMILL_FLEET_FINGERPRINT", ""),
            started_at=self.started_at,
            ends_at=ends_at,
            problem=problem,
            socket=str(self.layout.socket),
            store=self.store.url,
            logs=str(self.layout.logs),
            processes=[r for c in children if (r := c.record()) is not None],
            workers=[] if final else [self._worker_state(m, c) for m, c in sorted(self.workers.items())],
        )
        encoded = msgspec.json.encode(record)
        now = time.monotonic()
        if encoded == self._written and now - self._written_at < _RECORD_EVERY_S and not self._owed:
            return
        self._written, self._written_at, self._owed = encoded, now, False
        record.updated_at, record.looked_at = demand.now_s(), self._looked_at
        try:
            write(self.layout.record, record)
        except OSError as exc:
            self.log.warning("the fleet's record cannot be written", error=exc.strerror)


def sweep(layout: Layout) -> int:
    """Kill what a fleet in this folder left behind; the number of processes. The caller holds the fleet's lock."""
    old = read(layout.record)
    recorded = [(p.pid, p.started) for p in old.processes] if old else []
    return procfs.kill_all(lambda: procfs.of_fleet(layout.folder, recorded))


def _python(module: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", module, *argv]


def has_gpu() -> bool:
    """True when the driver's own tool lists a GPU (torch is not asked: this process must stay small)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU " in listed.stdout


def main() -> int:
    """Run the fleet in the folder named on the command line; its settings come by the environment."""
    layout = Layout(Path(sys.argv[1]))
    lock = FileLock(layout.lock)
    # A command that asks whether it is held does so by holding it for a moment.
    if not lock.acquire(2.0):
        return 0
    lock.write_pid()
    try:
        loaded = settings.load()
        logs.configure(loaded.telemetry, "fleet")
        sweep(layout)
        return Daemon(layout, loaded, registry.load(), dict(os.environ)).run()
    except (BatchmillError, OSError) as exc:
        problem = str(exc)
        with contextlib.suppress(OSError):
            write(layout.record, Record(state="failed", pid=os.getpid(), problem=problem, updated_at=demand.now_s()))
        sys.stderr.write(f"error: {problem}\n")
        return exc.exit_code if isinstance(exc, BatchmillError) else Unreachable.exit_code


if __name__ == "__main__":
    sys.exit(main())
