"""What `workers cache …` does. Unlike a worker, a person waits for the server and is told when it does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import redis
from redis.exceptions import OutOfMemoryError

from common import places
from common import registry as registries
from common import settings as setting_files
from common.errors import Unreachable, UsageError
from common.interrupts import terminated_like_interrupted
from common.new_file import destination, replacing
from common.settings import Settings
from common.store import open_store
from workers.cache.archive import Writer, read
from workers.cache.finished import FinishedBatch
from workers.cache.server import KEYS_AT_ONCE, PATIENT_S, CacheServer
from workers.cache.value import MAX_BODY, values


class ModelFigures(msgspec.Struct, frozen=True):
    """Lookups of all workers of a model version since the server was emptied."""

    hits: int = 0
    misses: int = 0
    written: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache stats --json`. Sizes in bytes; `policy` is `evicts` or `counts` (docs/cache.md)."""

    url: str
    policy: str
    entries: int
    bytes: int
    capacity_bytes: int
    evicted: int
    models: dict[str, ModelFigures]


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """`workers cache warm --json`."""

    batch: str
    model: str
    lines: int
    written: int
    #: Lines without a fingerprint, written by an older release.
    unmarked: int


def stats() -> Stats:
    """Figures of the cache's server."""
    settings = _settings()
    with _server(settings) as server:
        facts = server.facts()
        models = {model: msgspec.convert(found, ModelFigures) for model, found in sorted(server.counts().items())}
    return Stats(
        url=_shown(settings),
        policy=facts.policy,
        entries=facts.entries,
        bytes=facts.bytes,
        capacity_bytes=facts.capacity,
        evicted=facts.evicted,
        models=models,
    )


def export(file: Path, model: str | None) -> tuple[int, int]:
    """Write all entries, or a model's, to a file; it appears when it is whole. Entries written, and bytes.

    `UsageError` before anything is asked of the server for what is no regular file.
    """
    if str(file) == "-":
        raise UsageError("-: the entries go to a file, not to stdout; name one")
    destination(file)
    settings = _settings()
    versions = _versions(model) if model is not None else [None]
    sealed = values(settings)
    with _server(settings) as server, _errors(file), terminated_like_interrupted():
        server.leave_no_trace()
        # Readable by its owner alone: it holds answers.
        with replacing(file, 0o600) as out:
            writer = Writer(out)
            for version in versions:
                for keys in server.scan(version):
                    for key, value in zip(keys, server.get(keys)[1], strict=True):
                        frame = sealed.frame(key, value) if value is not None else None
                        if frame is not None:
                            writer.add(key, frame)
            writer.close()
            size = out.tell()
    return writer.count, size


def import_(file: Path) -> int:
    """Put the entries of a file into the cache; all of it is checked before the first one goes in."""
    settings = _settings()
    sealed = values(settings)
    if file.exists() and not file.is_file():
        raise UsageError(f"{file}: is not a regular file, which can be read twice")
    count = 0
    with _server(settings) as server, _errors(file), open(file, "rb") as source:
        for _ in read(source, str(file)):
            pass
        source.seek(0)
        for entries in read(source, str(file)):
            for at in range(0, len(entries), KEYS_AT_ONCE):
                part = entries[at : at + KEYS_AT_ONCE]
                _put(server, [(key, sealed.seal(key, frame)) for key, frame in part], count)
                count += len(part)
    return count


def warm(batch_id: str) -> Warmed:
    """Put the determined answers of a finished batch into the cache."""
    settings = _settings()
    batch = FinishedBatch(open_store(places.store_url(settings), make=False), batch_id)
    entry = registries.load().versions.get(batch.model)
    if entry is not None and entry.cache == "off":
        raise UsageError(f"model {batch.model}: models.yaml says `cache: off`")
    sealed = values(settings)
    written = 0
    with _server(settings) as server:
        held: list[tuple[bytes, bytes]] = []
        for key, body in batch.answers(everything=entry is not None and entry.cache == "all"):
            if len(body) > MAX_BODY:
                continue
            held.append((key, sealed.pack(key, body)))
            if len(held) == KEYS_AT_ONCE:
                _put(server, held, written)
                written += len(held)
                held.clear()
        if held:
            _put(server, held, written)
            written += len(held)
    tally = batch.tally
    if tally.lines and tally.unmarked == tally.lines:
        raise UsageError(
            f"batch {batch_id}: its lines carry no fingerprint (an older release wrote them), so nobody can tell which "
            "engine they are true of; nothing was written"
        )
    return Warmed(batch=batch_id, model=batch.model, lines=tally.lines, written=written, unmarked=tally.unmarked)


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
    """This machine's settings; those of its embedded fleet where they name neither a broker nor a cache."""
    settings = setting_files.load()
    embedded = places.fleet_dir() / "settings.yaml"
    if settings.broker.url is None and settings.cache.url is None and embedded.is_file():
        return setting_files.load(embedded)
    return settings


@contextlib.contextmanager
def _server(settings: Settings) -> Iterator[CacheServer]:
    if not settings.cache.url:
        raise UsageError("cache.url is not set: there is no result cache (BATCHMILL_CACHE_URL)")
    server = CacheServer(settings, PATIENT_S)
    try:
        server.follow()
        yield server
    except redis.RedisError as exc:
        raise Unreachable(f"cache.url: {_shown(settings)} does not answer: {type(exc).__name__}: {exc}") from None
    finally:
        server.close()


def _put(server: CacheServer, entries: list[tuple[bytes, bytes]], before: int) -> None:
    try:
        server.put(entries)
    except OutOfMemoryError:
        raise UsageError(
            f"the cache's server is full and pushes nothing out; {before} entries were written. Give it memory, or a "
            "policy that evicts (allkeys-lru)"
        ) from None


@contextlib.contextmanager
def _errors(file: Path) -> Iterator[None]:
    try:
        yield
    except redis.RedisError:
        raise
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror or exc}") from None


def _shown(settings: Settings) -> str:
    """The server's address without its password."""
    scheme, _, rest = (settings.cache.url or "").partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
