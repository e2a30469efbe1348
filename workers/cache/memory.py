"""What one chunk has to do with equal requests: recall answers before the engine, say which rows may share one, and
keep new answers after publishing.

Sharing needs no cache, only the key. Batches that read the cache (`read`, `on`) share with any such batch of their
tenant, as they take any answer of it; the others want their answers computed for themselves, so there it is only within
the batch.
"""

from __future__ import annotations

import struct
from typing import Protocol

from common.messages import Chunk, Kind, Row
from workers.cache.key import Space
from workers.cache.result_cache import ResultCache
from workers.results import Done, Source


class Rows(Protocol):
    """The rows of a chunk; `workers.chunk.ChunkWork`."""

    def rows(self) -> list[tuple[int, Row]]:
        """Every row with the number of its slice."""
        ...

    def answered(self, row: int, body: bytes) -> bool:
        """This row needs no engine; False when that is no answer to it."""
        ...

    def missed(self, row: int) -> None:
        """The cache has no answer for this row."""
        ...

    def may_share(self, row: int, flight: bytes) -> None:
        """Rows with the same `flight` have one answer."""
        ...


class Memory:
    """Runs in the chunk's own thread, so that neither hashing nor Redis is ever on the engine's loop.

    `cache`: None where there is none, or the chunk wants none. `share`: equal rows may be computed once.
    """

    def __init__(self, cache: ResultCache | None, space: Space, chunk: Chunk, *, share: bool) -> None:
        self._cache = cache
        self._space = space
        self._tenants = [part.tenant for part in chunk.slices]
        self._read = cache is not None and chunk.cache in ("read", "on")
        self._write = cache is not None and chunk.cache in ("write", "on")
        self._scopes: list[bytes] | None = None
        if share:
            # A row that waits for another one has that one's time.
            limit = struct.pack("<d", chunk.timeout_s)
            private = chunk.cache not in ("read", "on")
            self._scopes = [limit + part.batch.encode() if private else limit for part in chunk.slices]
        self._keys: dict[tuple[int, int], bytes] = {}
        self._day = ""

    def recall(self, work: Rows) -> None:
        """Answer what the cache has, and say which of the other rows may share an answer."""
        wanted: list[tuple[int, bytes]] = []
        self._day = self._space.day()
        rows = work.rows()
        for number, (part, row) in enumerate(rows):
            found = self._space.key(self._tenants[part], row.url, row.body)
            if found is not None:
                wanted.append((number, found))
                if self._write:
                    self._keys[part, row.pos] = found
        known: dict[bytes, bytes] = {}
        if self._read and self._cache is not None:
            known = self._cache.get([found for _, found in wanted])
        hits = 0
        for number, found in wanted:
            body = known.get(found)
            if body is not None:
                if work.answered(number, body):
                    hits += 1
                    continue
                if self._cache is not None:
                    self._cache.reject(found)
            if self._read:
                work.missed(number)
            part, row = rows[number]
            if self._scopes is not None and self._space.determined(row.url, row.body):
                work.may_share(number, found + self._scopes[part])
        if self._read and self._cache is not None:
            self._cache.count(hits, len(wanted) - hits)

    def keep(self, taken: list[Done]) -> None:
        """Remember answers that have just been published."""
        if not self._write or self._cache is None:
            return
        if self._space.day() != self._day:
            # A template that prints the date may have printed either, so the keys, told before midnight, may be wrong.
            return
        for done in taken:
            # What was shared, its leader keeps.
            if done.source >= Source.CACHE or done.tried.outcome.kind is not Kind.OUTPUT or done.tried.status != 200:
                continue
            found = self._keys.get((done.part, done.row.pos))
            if found is not None:
                self._cache.put(found, done.tried.body)
