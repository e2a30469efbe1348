"""Bring the embedded fleet up, ask it for a model, watch it, end it: what commands call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec
from blake3 import blake3

from common import places, plain_yaml
from common.errors import Unreachable, UsageError
from common.machine import physical_memory
from common.registry import Registry
from common.settings import Settings
from common.store import open_store
from producers.embedded import demand, procfs, record, redis_server
from producers.embedded.child import cut_log
from producers.embedded.keys import NAMES, ensure_keys
from producers.embedded.layout import Layout, layout
from producers.embedded.linger import LINGER_ENV
from producers.embedded.lock import FileLock, holder_pid, is_held
from producers.embedded.record import Record, WorkerState

#: Share of this machine's memory that the result cache of an embedded fleet may take, unless the settings name another.
CACHE_SHARE = 0.25
#: Seconds that starting or ending may take before a command stops waiting for it.
_START_S = 60.0
_KILL_S = 10.0
#: Seconds that the daemon has to answer how things stand.
_ANSWER_S = 3.0

_ROOT = Path(__file__).resolve().parents[2]


class Fleet:
    """This command's hold on the running fleet, which does not end by itself before `close`.

    `settings` are complete: broker, store and message keys filled in. `notice` is a line to show, or None.
    """

    def __init__(self, start: _Start, use: FileLock, notice: str | None) -> None:
        self.settings = start.settings
        self.model = start.model
        self.notice = notice
        self._start, self._use = start, use

    @property
    def logs(self) -> Path:
        """The folder of its logs."""
        return self._start.layout.logs

    def record(self) -> Record | None:
        """What the fleet says of itself at this moment."""
        return record.read(self._start.layout.record)

    def worker_state(self, model: str | None = None) -> WorkerState:
        """The worker of `model` (default: the one asked for); `starting` until the fleet has taken up the wish."""
        name = model or self.model or ""
        found = self.record()
        for worker in found.workers if found else []:
            if worker.model == name:
                return worker
        return WorkerState(model=name, state="starting", log=str(self.logs))

    def problem(self, model: str | None = None) -> str | None:
        """One line with a log's path when this model will get no worker, or the fleet does not run; else None."""
        found = self.record()
        if not is_held(self._start.layout.lock):
            if found is not None and found.state == "stopped":
                return "the fleet was stopped (`producers fleet down`); submit or `producers watch` brings it up again"
            return (
                found.problem if found is not None and found.problem else f"the fleet does not run; logs: {self.logs}"
            )
        if found is not None and found.problem:
            return found.problem
        worker = self.worker_state(model)
        return worker.detail if worker.state == "failed" else None

    def tend(self) -> bool:
        """Bring the fleet up again when it was killed (not when somebody ended it); True when that was needed.

        A command that follows a batch calls this every second or so; `Unreachable` when it cannot be started.
        """
        where = self._start.layout
        if not self._was_killed():
            return False
        with _told(where), FileLock(where.start_lock) as lock:
            _acquire(lock, where)
            # Another follower may have done it meanwhile, or somebody ended the fleet.
            if not self._was_killed():
                return False
            self._start.spawn()
        return True

    def _was_killed(self) -> bool:
        where = self._start.layout
        if is_held(where.lock):
            return False
        found = record.read(where.record)
        return found is None or found.state not in ("stopped", "stopping", "failed")

    def close(self) -> None:
        """Let the fleet end by itself once it has nothing to do; it goes on with unfinished batches."""
        self._use.release()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def ensure(
    settings: Settings,
    registry: Registry,
    model: str | None,
    *,
    linger_s: float | None = None,
    say: Callable[[str], None] = lambda _line: None,
    env: Mapping[str, str] = os.environ,
) -> Fleet:
    """The running fleet with a worker of `model` (`name@version`) asked for; started when there is none.

    Returns once broker and coordinator run, without waiting for the model to load: see `Fleet.worker_state`.
    `linger_s` is how long the fleet stays with nothing to do (default: `BATCHMILL_FLEET_LINGER_S`, else 300; negative:
    until it is told to end); `say` gets a line when there is something to wait for. A running fleet with other settings
    is replaced when nobody uses it; else it stays, and `Fleet.notice` says so.

    `UsageError` for an unusable folder or setting, `Unreachable` when the fleet cannot be started.
    """
    if settings.broker.url:
        raise UsageError("a broker is configured (broker.url), so the embedded fleet is not for this command")
    where = layout(env)
    where.create()
    use = FileLock(where.use_lock)
    notice = None
    try:
        with _told(where), FileLock(where.start_lock) as lock:
            start = _prepare(settings, registry, model, linger_s, where, env)
            _acquire(lock, where, say)
            alone = use.acquire(0.2)
            if not use.acquire(_START_S, shared=True):
                raise Unreachable(f"{where.use_lock} is held by a command that does not end")
            notice = _replace_other(start, alone, say)
            running = is_held(where.lock)
            if running:
                start.ask()
            else:
                say("starting the embedded fleet")
                start.spawn()
    except BaseException:
        use.release()
        raise
    return Fleet(start, use, notice)


def make_way(
    settings: Settings,
    registry: Callable[[], Registry],
    *,
    say: Callable[[str], None] = lambda _line: None,
    env: Mapping[str, str] = os.environ,
) -> None:
    """End a running fleet that has other settings and nothing to do. To be called before a batch is enqueued.

    Afterwards it would have that batch to do. `Unreachable` when it is busy with another store: nobody would run what
    is enqueued in this one.
    """
    where = layout(env)
    if not is_held(where.lock):
        return
    with _told(where), FileLock(where.start_lock) as lock, FileLock(where.use_lock) as use:
        start = _prepare(settings, registry(), None, None, where, env)
        _acquire(lock, where, say)
        _replace_other(start, use.acquire(0.2), say)


def status(env: Mapping[str, str] = os.environ) -> Record:
    """How the fleet stands now; `state` is `stopped` when none runs, with the last problem if it failed."""
    where = layout(env)
    found = _ask_daemon(where)
    if is_held(where.lock):
        return found or Record(state="starting", pid=holder_pid(where.lock) or 0, logs=str(where.logs))
    if found is None:
        return Record(state="stopped", pid=0, logs=str(where.logs))
    found.state = "failed" if found.problem else "stopped"
    found.processes, found.workers, found.ends_at = [], [], None
    return found


def down(env: Mapping[str, str] = os.environ, *, drain_s: float = 30.0, kill_now: bool = False) -> bool:
    """End the fleet and everything it started; False when none was running. Unfinished batches wait in the store.

    Workers finish what they run for up to their own `inference.drain_s`, for which `drain_s` makes room here;
    `kill_now` ends them at once.
    """
    where = layout(env)
    if not where.folder.exists():
        return False
    with FileLock(where.start_lock) as lock:
        _acquire(lock, where)
        return _end(where, drain_s, kill_now=kill_now)


# -- how ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    """All that it takes to start the daemon for this command."""

    layout: Layout
    settings: Settings
    model: str | None
    linger_s: float | None
    env: dict[str, str]
    settings_text: bytes
    fingerprint: str

    def ask(self) -> None:
        """Ask the fleet for the model."""
        if self.model is not None:
            demand.write_wanted(self.layout.wanted, demand.Wanted(model=self.model, linger_s=self.linger_s))

    def spawn(self) -> None:
        """Start the daemon and wait until it serves; the start lock is held. `Unreachable` says why it does not."""
        where = self.layout
        redis_server.find_binary()
        where.create()
        where.record.unlink(missing_ok=True)
        demand.clear_wanted(where.wanted)
        self.ask()
        temporary = where.settings.with_name(".settings")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(self.settings_text)
        temporary.replace(where.settings)
        log = where.logs / "fleet.log"
        cut_log(log)
        with open(log, "ab", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "producers.embedded.daemon", str(where.folder)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.env,
                cwd=where.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while True:
            found = record.read(where.record)
            if found is not None and found.pid == process.pid:
                if found.state == "up":
                    return
                if found.state == "failed":
                    raise Unreachable(f"the embedded fleet does not start: {found.problem}")
            if process.poll() is not None:
                raise Unreachable(f"the embedded fleet does not start (exit status {process.returncode}); log: {log}")
            if time.monotonic() > deadline:
                process.kill()
                raise Unreachable(f"the embedded fleet did not start within {_START_S:g} s; log: {log}")
            time.sleep(0.03)


def _prepare(
    settings: Settings,
    registry: Registry,
    model: str | None,
    linger_s: float | None,
    where: Layout,
    env: Mapping[str, str],
) -> _Start:
    """The complete settings, and the environment by which the processes get them."""
    complete = _complete(settings, where, env)
    security = complete.security
    if security.dispatch_key is None or security.results_key is None:
        with FileLock(where.keys / ".lock") as lock:
            if not lock.acquire(_START_S):
                raise Unreachable(f"{lock.path} is held by a command that does not end")
            made = ensure_keys(where.keys)
        fields = {n: getattr(security, n) or made[n] for n in NAMES}
        complete = msgspec.structs.replace(complete, security=msgspec.structs.replace(security, **fields))
    text = plain_yaml.dump(msgspec.to_builtins(complete)).encode()
    child_env = {k: v for k, v in env.items() if k not in _setting_variables()}
    child_env |= {
        "BATCHMILL_CONFIG": str(where.settings),
        "BATCHMILL_MODELS": str(Path(registry.where).absolute()),
        "BATCHMILL_HOME": str(places.home(env)),
        procfs.MARK: str(where.folder),
        "PYTHONUNBUFFERED": "1",
        # `python -m` finds the package from any folder, installed or not, and nothing of that folder.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])]),
    }
    if linger_s is not None:
        child_env[LINGER_ENV] = str(linger_s)
    text_of_models = b""
    with contextlib.suppress(OSError):
        text_of_models = Path(registry.where).read_bytes()
    parts = [text, text_of_models, sys.executable.encode(), str(_ROOT).encode(), _version().encode()]
    parts += [f"{k}={v}".encode() for k, v in sorted(env.items()) if k.startswith("BATCHMILL_ECHO_")]
    fingerprint = blake3(b"\0".join(parts)).hexdigest()[:32]
    child_env["BATCHMILL_FLEET_FINGERPRINT"] = fingerprint
    return _Start(where, complete, model, linger_s, child_env, text, fingerprint)


def _complete(settings: Settings, where: Layout, env: Mapping[str, str]) -> Settings:
    """Settings with the embedded broker and the store filled in; relative paths are made absolute.

    The daemon works in its own folder, and its processes must find what the command that was typed here meant.
    """

    def absolute(path: str | None) -> str | None:
        return str(places.expanded(path).absolute()) if path and "://" not in path else path

    replace: Any = msgspec.structs.replace
    cache = settings.cache
    if cache.url is None:
        # Another database of the fleet's own server, where the cache counts its own bytes (docs/cache.md).
        most = CACHE_SHARE * physical_memory() / (1 << 30) or cache.capacity_gb
        cache = replace(
            cache, url=f"unix://{quote(str(where.socket))}?db=1", capacity_gb=max(0.01, min(cache.capacity_gb, most))
        )
    store = settings.store
    inference = settings.inference
    complete: Settings = replace(
        settings,
        broker=replace(settings.broker, url=f"redis+socket://{quote(str(where.socket))}?virtual_host=0"),
        cache=cache,
        store=replace(store, url=absolute(places.store_url(settings, env)), wal_dir=absolute(store.wal_dir)),
        inference=replace(
            inference, models_dir=absolute(inference.models_dir), model_path=absolute(inference.model_path)
        ),
    )
    return complete


def _setting_variables() -> frozenset[str]:
    names = {
        f"BATCHMILL_{section.encode_name}_{field.encode_name}".upper()
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    }
    return frozenset(names | {f"{n}_FILE" for n in names})


def _version() -> str:
    try:
        return metadata.version("batchmill")
    except metadata.PackageNotFoundError:
        return "unknown"


def _replace_other(start: _Start, alone: bool, say: Callable[[str], None]) -> str | None:
    """End the running fleet if it has other settings and nothing to do; a line for people if it stays with those.

    `alone`: no other command uses it. `Unreachable` when it stays and serves another store.
    """
    where = start.layout
    found = record.read(where.record) if is_held(where.lock) else None
    if found is None or found.fingerprint == start.fingerprint:
        return None
    if alone and not _busy(found.store or start.settings.store.url or ""):
        say("the running fleet has other settings; starting it anew")
        _end(where, start.settings.inference.drain_s, kill_now=False)
        return None
    if found.store and found.store != start.settings.store.url:
        raise Unreachable(
            f"the embedded fleet runs batches of another store, {found.store}, and would not see this one's: wait "
            f"until they have ended, or give this store a fleet of its own (BATCHMILL_HOME)"
        )
    return (
        "the running fleet has other settings or models and is busy, so it goes on with those; "
        "`producers fleet down` ends it"
    )


def _busy(store: str) -> bool:
    """True while there are unfinished batches."""
    return bool(demand.ActiveBatches(open_store(store), 0).models())


@contextlib.contextmanager
def _told(where: Layout) -> Iterator[None]:
    """A full disk or a lost right as one line."""
    try:
        yield
    except OSError as exc:
        place = exc.filename or where.folder
        raise Unreachable(f"the embedded fleet cannot be started: {place}: {exc.strerror}") from None


def _acquire(lock: FileLock, where: Layout, say: Callable[[str], None] = lambda _line: None) -> None:
    """Take the start lock; a fleet that ends at this moment holds it until it is gone."""
    if lock.acquire(1.0):
        return
    say("waiting for another command that starts or ends the fleet")
    if not lock.acquire(2 * _START_S):
        raise Unreachable(f"another command starts or ends the fleet and does not get on; logs: {where.logs}")


def _end(where: Layout, drain_s: float, *, kill_now: bool) -> bool:
    """SIGTERM to the daemon, SIGKILL when that takes too long, then a sweep; the start lock is held."""
    running = is_held(where.lock)
    pid = holder_pid(where.lock)
    if running and pid is not None and _is_daemon(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kill_now else signal.SIGTERM)
        if not _gone(where, drain_s + 60):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _gone(where, _KILL_S)
    found = record.read(where.record)
    recorded = [(p.pid, p.started) for p in found.processes] if found else []
    procfs.kill_all(lambda: procfs.of_fleet(where.folder, recorded))
    if running and found is not None:
        # Whoever still follows a batch must not bring up again what was ended on purpose.
        found.state, found.processes, found.workers, found.ends_at = "stopped", [], [], None
        record.write(where.record, found)
    return running


def _ask_daemon(where: Layout) -> Record | None:
    """A record that is no older than this call; the last one written when there is no daemon, or it is too busy."""
    pid = holder_pid(where.lock)
    if pid is None or not _is_daemon(pid):
        return record.read(where.record)
    asked_at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, record.ASK_SIGNAL)
    deadline = asked_at + _ANSWER_S
    while True:
        found = record.read(where.record)
        fresh = found is not None and found.looked_at >= asked_at
        if fresh or time.monotonic() > deadline or not is_held(where.lock):
            return found
        time.sleep(0.02)


def _gone(where: Layout, timeout_s: float) -> bool:
    with FileLock(where.lock) as lock:
        return lock.acquire(timeout_s)


def _is_daemon(pid: int) -> bool:
    try:
        return b"producers.embedded.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
