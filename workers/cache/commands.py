"""What `workers cache …` does. Unlike a worker, a person waits for the server and is told when it does not answer."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

import msgspec
import redis
from msgspec.structs import replace
from redis.exceptions import OutOfMemoryError

from common import addresses, places, say
from common import registry as registries
from common import settings as setting_files
from common.errors import Unreachable, UsageError
from common.interrupts import terminated_like_interrupted
from common.new_file import destination, replacing
from common.settings import Settings
from common.store import open_store
from workers.cache.archive import Sink, Writer, read
from workers.cache.finished import FinishedBatch
from workers.cache.key import KEY_BYTES
from workers.cache.server import KEYS_AT_ONCE, PATIENT_S, CacheServer
from workers.cache.value import MAX_BODY, values

#: Bytes of keys kept in memory before they go to a temporary file, and keys of one question whether they are there.
_KEYS_IN_MEMORY, _KEYS_ASKED = 4 << 20, 1024
#: The name that means stdout or stdin, and bytes of it put aside at a time.
STREAM, _COPIED = Path("-"), 1 << 20


class ModelFigures(msgspec.Struct, frozen=True):
    """Lookups of all workers of a model version since the server was emptied."""

    hits: int = 0
    misses: int = 0
    written: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache stats --json`. Sizes in bytes; `policy` is `evicts` or `counts` (docs/cache.md).

    `capacity_bytes` is the bound that holds; `server_limit_bytes`: the server's `maxmemory` (0: it has none), which
    whatever else is on the server (`server_bytes` in all) has a part in.
    """

    url: str
    policy: str
    entries: int
    bytes: int
    capacity_bytes: int
    server_bytes: int
    server_limit_bytes: int
    evicted: int
    models: dict[str, ModelFigures]


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache warm --json`."""

    batch: str
    model: str
    lines: int
    #: Answers that the cache may keep.
    determined: int
    #: Of these: in the cache when all had been written.
    written: int
    #: Of these: larger than an entry may be.
    too_large: int
    #: The rest: written, and gone again before the end, mostly to make room for those that came later.
    pushed_out: int
    #: Lines without a fingerprint, written by an older release.
    unmarked: int
    capacity_bytes: int


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache import --json`. `entries` of the file; of these, `written` were there when all had gone in."""

    file: str
    entries: int
    written: int
    pushed_out: int
    capacity_bytes: int


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache export --json`."""

    file: str
    entries: int
    #: Entries that are signed with another key, or are none; the file has not got them.
    unreadable: int
    bytes: int


def stats() -> Stats:
    """Figures of the cache's server."""
    settings = _settings()
    with _server(settings) as server:
        facts = server.facts()
        models = {model: msgspec.convert(found, ModelFigures) for model, found in sorted(server.counts().items())}
    return Stats(
        url=addresses.shown(settings.cache.url or ""),
        policy=facts.policy,
        entries=facts.entries,
        bytes=facts.bytes,
        capacity_bytes=facts.capacity,
        server_bytes=facts.server_bytes,
        server_limit_bytes=facts.server_limit,
        evicted=facts.evicted,
        models=models,
    )


def export(file: Path, model: str | None) -> Exported:
    """Write all entries, or a model's, to a file, which appears when it is whole, or to stdout (`-`).

    `UsageError` before anything is asked of the server for what is no regular file, and when there are entries and
    none can be read.
    """
    target: contextlib.AbstractContextManager[Sink]
    if file == STREAM:
        if sys.stdout.isatty():
            raise UsageError("-: a terminal shows no entries; name a file, or redirect stdout (> FILE)")
        target = _stdout()
    else:
        destination(file)
        # Readable by its owner alone: it holds answers.
        target = replacing(file, 0o600)
    settings = _settings()
    versions = _versions(model) if model is not None else [None]
    sealed = values(settings)
    with _server(settings) as server, _errors(str(file)), terminated_like_interrupted():
        server.leave_no_trace()
        with target as out:
            writer, unreadable = Writer(out), 0
            for version in versions:
                for keys in server.scan(version):
                    for key, value in zip(keys, server.get(keys)[1], strict=True):
                        frame = sealed.frame(key, value) if value is not None else None
                        if frame is not None:
                            writer.add(key, frame)
                        elif value is not None:
                            unreadable += 1
            if unreadable and not writer.count:
                raise UsageError(
                    f"none of the {unreadable:,} entries in the cache could be read: they are signed with another key; "
                    "set security.results_key to that of the fleet whose answers they are"
                )
            writer.close()
    return Exported(file=str(file), entries=writer.count, unreadable=unreadable, bytes=writer.bytes)


def import_(file: Path) -> Imported:
    """Put the entries of a file or of stdin (`-`) into the cache; all of it is checked before the first one goes in."""
    settings = _settings()
    sealed = values(settings)
    name = "stdin" if file == STREAM else str(file)
    with _server(settings) as server, _errors(name), _source(file) as source, _Put(server) as put:
        for _ in read(source, name):
            pass
        source.seek(0)
        for entries in read(source, name):
            for at in range(0, len(entries), KEYS_AT_ONCE):
                put.add([(key, sealed.seal(key, frame)) for key, frame in entries[at : at + KEYS_AT_ONCE]])
        there, capacity = put.present(), server.facts().capacity
    return Imported(
        file=str(file), entries=put.count, written=there, pushed_out=put.count - there, capacity_bytes=capacity
    )


@contextlib.contextmanager
def _stdout() -> Iterator[say.Raw]:
    """Stdout for an archive: cut off, it is none, so whoever reads it notices."""
    yield say.Raw()
    say.flush()


@contextlib.contextmanager
def _source(file: Path) -> Iterator[BinaryIO]:
    """A file that can be read twice; what comes by a pipe is put aside in a temporary one."""
    if file != STREAM and (file.is_file() or not file.exists()):
        with open(file, "rb") as found:
            yield found
        return
    if file == STREAM and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("-: nothing comes in at stdin; name a file, or redirect one (< FILE)")
    with contextlib.ExitStack() as held:
        pipe = sys.stdin.buffer if file == STREAM else held.enter_context(open(file, "rb"))
        with _errors(tempfile.gettempdir()):
            aside = held.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(pipe, aside, _COPIED)
        aside.seek(0)
        yield aside


def warm(batch_id: str) -> Warmed:
    """Put the determined answers of a finished batch into the cache."""
    settings = _settings()
    batch = FinishedBatch(open_store(places.store_url(settings), make=False), batch_id)
    entry = registries.load().versions.get(batch.model)
    if entry is not None and entry.cache == "off":
        raise UsageError(f"model {batch.model}: models.yaml says `cache: off`")
    sealed = values(settings)
    too_large = 0
    with _server(settings) as server, _Put(server) as put:
        held: list[tuple[bytes, bytes]] = []
        for key, body in batch.answers(everything=entry is not None and entry.cache == "all"):
            if len(body) > MAX_BODY:
                too_large += 1
                continue
            held.append((key, sealed.pack(key, body)))
            if len(held) == KEYS_AT_ONCE:
                put.add(held)
                held.clear()
        put.add(held)
        there, capacity = put.present(), server.facts().capacity
    tally = batch.tally
    if tally.lines and tally.unmarked == tally.lines:
        raise UsageError(
            f"batch {batch_id}: its lines carry no fingerprint (an older release wrote them), so nobody can tell which "
            "engine they are true of; nothing was written"
        )
    return Warmed(
        batch=batch_id,
        model=batch.model,
        lines=tally.lines,
        determined=tally.determined,
        written=there,
        too_large=too_large,
        pushed_out=put.count - there,
        unmarked=tally.unmarked,
        capacity_bytes=capacity,
    )


def clear(model: str | None) -> int:
    """Remove the entries of a model (None: all); how many there were. Workers forget theirs at once."""
    settings = _settings()
    versions = _versions(model) if model is not None else [None]
    removed = 0
    with _server(settings) as server:
        # Before, so that no worker goes on with what is about to go; after, for what it put back meanwhile.
        server.turn_epoch()
        for version in versions:
            for keys in server.scan(version):
                removed += server.drop(keys)
        server.turn_epoch()
    return removed


def _versions(model: str) -> list[str | None]:
    """A model version, or all versions of a name. One that models.yaml no longer has may be meant too."""
    if "@" in model:
        return [model]
    found: list[str | None] = [v for v in sorted(registries.load().versions) if v.partition("@")[0] == model]
    if not found:
        raise UsageError(f"no model '{model}' in models.yaml; name a version that is gone from it as {model}@VERSION")
    return found


def _settings() -> Settings:
    """This machine's settings; where they name no broker, the cache or its key is that of the embedded fleet."""
    settings = setting_files.load()
    embedded = places.fleet_dir() / "settings.yaml"
    if settings.broker.url is not None or not embedded.is_file():
        return settings
    if settings.cache.url is None:
        return setting_files.load(embedded)
    if not settings.security.results_key:
        # Its workers sign with a key that it made itself, whosever server holds what they sign.
        return replace(settings, security=setting_files.load(embedded).security)
    return settings


@contextlib.contextmanager
def _server(settings: Settings) -> Iterator[CacheServer]:
    if not settings.cache.url:
        raise UsageError("cache.url is not set: there is no result cache (BATCHMILL_CACHE_URL)")
    server = CacheServer(settings, PATIENT_S)
    try:
        server.follow()
        yield server
    except redis.ResponseError as exc:
        if str(exc).startswith("WRONGTYPE"):
            raise UsageError(
                f"cache.url: {settings.cache.url} holds something else under a name of the cache than workers do; "
                "delete its keys that begin with bm:cache/ (figures and epochs, no answers), then try again"
            ) from None
        raise Unreachable(f"cache.url: {settings.cache.url} refuses: {exc}") from None
    except redis.AuthenticationError:
        raise Unreachable(
            f"cache.url: {settings.cache.url} refuses to log us in; it takes redis://USER:PASSWORD@HOST:PORT/0"
        ) from None
    except redis.RedisError as exc:
        why = f"cache.url: {settings.cache.url} does not answer: {type(exc).__name__}: {exc}"
        if str(places.fleet_dir()) in unquote(settings.cache.url):
            why = (
                "the embedded fleet is not up, and its cache with it; bring it up (producers fleet up), or name "
                "another server in cache.url"
            )
        raise Unreachable(why) from None
    finally:
        server.close()


class _Put:
    """Writes entries and knows their keys, so that the end can tell which of them are still there."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server
        # No larger in memory for a batch of millions.
        self._keys = tempfile.SpooledTemporaryFile(_KEYS_IN_MEMORY)  # noqa: SIM115
        self.count = 0

    def __enter__(self) -> _Put:
        return self

    def __exit__(self, *_: object) -> None:
        self._keys.close()

    def add(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Write some; `UsageError` when the server takes nothing more."""
        if not entries:
            return
        try:
            self._server.put(entries)
        except OutOfMemoryError:
            raise UsageError(
                f"the cache's server is full and pushes nothing out; {self.count} entries were written. Give it "
                "memory, or a policy that evicts (allkeys-lru)"
            ) from None
        self._keys.write(b"".join(key for key, _ in entries))
        self.count += len(entries)

    def present(self) -> int:
        """How many of all that were written are there now."""
        self._keys.seek(0)
        found = 0
        while data := self._keys.read(_KEYS_ASKED * KEY_BYTES):
            found += self._server.present([data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)])
        return found


@contextlib.contextmanager
def _errors(where: str) -> Iterator[None]:
    try:
        yield
    except redis.RedisError:
        raise
    except OSError as exc:
        raise UsageError(f"{where}: {exc.strerror or exc}") from None
