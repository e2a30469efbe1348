"""What one chunk has to do with the result cache: recall answers before the engine, keep new ones after publishing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.messages import Kind, Row
from workers.cache.key import Space
from workers.cache.result_cache import ResultCache
from workers.results import Done


class Rows(Protocol):
    """The rows of a chunk; `workers.chunk.ChunkWork`."""

    def rows(self) -> list[tuple[int, Row]]:
        """Every row with the number of its slice."""
        ...

    def answered(self, row: int, body: bytes) -> None:
        """This row needs no engine."""
        ...


class Memory:
    """Runs in the chunk's own thread, so that neither hashing nor Redis is ever on the engine's loop.

    `tenants`: of each slice.
    """

    def __init__(self, cache: ResultCache, space: Space, tenants: Sequence[str], *, read: bool, write: bool) -> None:
        self._cache = cache
        self._space = space
        self._tenants = tenants
        self._read = read
        self._write = write
        self._keys: dict[tuple[int, int], bytes] = {}

    def recall(self, work: Rows) -> None:
        """Answer what the cache has."""
        rows = work.rows()
        wanted: list[tuple[int, bytes]] = []
        for number, (part, row) in enumerate(rows):
            found = self._space.key(self._tenants[part], row.url, row.body)
            if found is not None:
                self._keys[part, row.pos] = found
                wanted.append((number, found))
        if not self._read:
            return
        known = self._cache.get([found for _, found in wanted])
        for number, found in wanted:
            body = known.get(found)
            if body is not None:
                work.answered(number, body)

    def keep(self, taken: list[Done]) -> None:
        """Remember answers that have just been published."""
        if not self._write:
            return
        for done in taken:
            if done.cached or done.tried.outcome.kind is not Kind.OUTPUT or done.tried.status != 200:
                continue
            found = self._keys.get((done.part, done.row.pos))
            if found is not None:
                self._cache.put(found, done.tried.body)
