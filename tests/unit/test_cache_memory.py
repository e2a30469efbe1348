"""What a chunk asks of the result cache, and what it tells it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from common.errors import UsageError
from common.messages import Kind, Row
from common.registry import ModelVersion
from common.registry import load as load_registry
from workers.attempt import Tried
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.cache.result_cache import ResultCache
from workers.outcome import Outcome
from workers.results import Done


class Cache:
    """A result cache as a table."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.asked = 0

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self.asked += 1
        return {key: self.held[key] for key in keys if key in self.held}

    def put(self, key: bytes, body: bytes) -> None:
        self.held[key] = body


class Work:
    """Rows of two slices; which of them were answered."""

    def __init__(self, temperature: float = 0.0) -> None:
        body = msgspec.json.encode({"prompt": "x", "temperature": temperature, "max_tokens": 3})
        self._rows = [(part, Row(pos, pos, b'"c"', 1, body)) for part in (0, 1) for pos in (0, 1)]
        self.taken: dict[int, bytes] = {}

    def rows(self) -> list[tuple[int, Row]]:
        return self._rows

    def answered(self, row: int, body: bytes) -> None:
        self.taken[row] = body

    def done(self, number: int, kind: Kind = Kind.OUTPUT, status: int = 200, cached: bool = False) -> Done:
        part, row = self._rows[number]
        return Done(part, row, Tried(status, b'{"n":%d}' % number, Outcome(kind, None)), cached)


def memory(cache: Cache, *tenants: str, read: bool = True, write: bool = True, everything: bool = False) -> Memory:
    space = Space("m@1", "f", everything=everything)
    return Memory(cast(ResultCache, cache), space, tenants, read=read, write=write)


def test_answers_go_to_the_tenant_whose_slice_it_is() -> None:
    cache, first, second = Cache(), Work(), Work()
    mine = memory(cache, "a", "b")
    mine.recall(first)
    mine.keep([first.done(0)])
    assert first.taken == {}
    memory(cache, "b", "a").recall(second)
    # Rows 2 and 3 are tenant a's now, and ask what row 0 asked.
    assert second.taken == {2: b'{"n":0}', 3: b'{"n":0}'}


@pytest.mark.parametrize(("read", "write", "found", "kept"), [(True, False, 4, 0), (False, True, 0, 1)])
def test_it_only_does_what_the_batch_asked_for(read: bool, write: bool, found: int, kept: int) -> None:
    cache, work = Cache(), Work()
    before = memory(cache, "a", "a")
    before.recall(work)
    before.keep([work.done(3)])
    again = Work()
    mine = memory(cache, "a", "a", read=read, write=write)
    asked = cache.asked
    mine.recall(again)
    assert (len(again.taken), cache.asked - asked) == (found, int(read))
    cache.held.clear()
    mine.keep([again.done(0)])
    assert len(cache.held) == kept


@pytest.mark.parametrize(
    ("kind", "status", "cached"), [(Kind.RETRY, 200, False), (Kind.ERROR, 400, False), (Kind.OUTPUT, 200, True)]
)
def test_only_new_answers_with_a_normal_end_are_kept(kind: Kind, status: int, cached: bool) -> None:
    cache, work = Cache(), Work()
    mine = memory(cache, "a", "a")
    mine.recall(work)
    mine.keep([work.done(0, kind, status, cached)])
    assert cache.held == {}


def test_sampled_answers_are_kept_only_where_the_model_says_so() -> None:
    for everything in (False, True):
        cache, work = Cache(), Work(temperature=1.0)
        mine = memory(cache, "a", "a", everything=everything)
        mine.recall(work)
        mine.keep([work.done(0)])
        assert len(cache.held) == int(everything)


def test_models_say_what_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {m@1: {source: /m, cache: all}, m@2: {source: /m}}\n")
    registry = load_registry(file)
    assert [registry.get(name).cache for name in ("m@1", "m@2")] == ["all", ModelVersion(source="/m").cache]
    file.write_text("models: {m@1: {source: /m, cache: sometimes}}\n")
    with pytest.raises(UsageError, match="sometimes"):
        load_registry(file)
