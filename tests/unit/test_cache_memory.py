"""What a chunk asks of the result cache, and what it tells it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from common.errors import UsageError
from common.messages import Chunk, Kind, Row, Slice
from common.registry import ModelVersion
from common.registry import load as load_registry
from workers.attempt import Tried
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.cache.result_cache import ResultCache
from workers.outcome import Outcome
from workers.results import Done, Source


class Cache:
    """A result cache as a table."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.asked = self.hits = self.misses = 0

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self.asked += 1
        return {key: self.held[key] for key in keys if key in self.held}

    def put(self, key: bytes, body: bytes) -> None:
        self.held[key] = body

    def count(self, hits: int, misses: int) -> None:
        self.hits += hits
        self.misses += misses

    def reject(self, key: bytes) -> None:
        self.held.pop(key, None)


class Work:
    """Rows of two slices; which of them were answered."""

    def __init__(self, temperature: float = 0.0) -> None:
        body = msgspec.json.encode({"prompt": "x", "temperature": temperature, "max_tokens": 3})
        self._rows = [(part, Row(pos, pos, b'"c"', 1, body)) for part in (0, 1) for pos in (0, 1)]
        self.taken: dict[int, bytes] = {}
        self.missed_rows: list[int] = []
        self.flights: dict[int, bytes] = {}

    def rows(self) -> list[tuple[int, Row]]:
        return self._rows

    def answered(self, row: int, body: bytes) -> bool:
        if body == b"no answer":
            return False
        self.taken[row] = body
        return True

    def missed(self, row: int) -> None:
        self.missed_rows.append(row)

    def may_share(self, row: int, flight: bytes) -> None:
        self.flights[row] = flight

    def done(self, number: int, kind: Kind = Kind.OUTPUT, status: int = 200, source: Source = Source.MISSED) -> Done:
        part, row = self._rows[number]
        return Done(part, row, Tried(status, b'{"n":%d}' % number, Outcome(kind, None)), source)


def memory(
    cache: Cache | None, *tenants: str, mode: str = "on", everything: bool = False, share: bool = True, **more: Any
) -> Memory:
    slices = [Slice(f"batch_{number}", 0, 2, 1, b"", tenant) for number, tenant in enumerate(tenants)]
    chunk = Chunk(1, "c", "m@1", "results.0", 1, 0.0, 0.0, more.get("timeout_s", 60.0), mode, slices)
    space = Space("m@1", "f", everything=everything)
    return Memory(cast(ResultCache, cache), space, chunk, share=share)


def test_answers_go_to_the_tenant_whose_slice_it_is() -> None:
    cache, first, second = Cache(), Work(), Work()
    mine = memory(cache, "a", "b")
    mine.recall(first)
    mine.keep([first.done(0)])
    assert first.taken == {}
    memory(cache, "b", "a").recall(second)
    # Rows 2 and 3 are tenant a's now, and ask what row 0 asked.
    assert second.taken == {2: b'{"n":0}', 3: b'{"n":0}'}


@pytest.mark.parametrize(("mode", "found", "kept"), [("read", 4, 0), ("write", 0, 1)])
def test_it_only_does_what_the_batch_asked_for(mode: str, found: int, kept: int) -> None:
    cache, work = Cache(), Work()
    before = memory(cache, "a", "a")
    before.recall(work)
    before.keep([work.done(3)])
    again = Work()
    mine = memory(cache, "a", "a", mode=mode)
    asked = cache.asked
    mine.recall(again)
    assert (len(again.taken), cache.asked - asked) == (found, int(mode == "read"))
    cache.held.clear()
    mine.keep([again.done(0)])
    assert len(cache.held) == kept


@pytest.mark.parametrize(
    ("kind", "status", "source"),
    [
        (Kind.RETRY, 200, Source.MISSED),
        (Kind.ERROR, 400, Source.MISSED),
        (Kind.OUTPUT, 202, Source.MISSED),
        (Kind.OUTPUT, 200, Source.CACHE),
        (Kind.OUTPUT, 200, Source.SHARED),
    ],
)
def test_only_new_answers_with_a_normal_end_are_kept(kind: Kind, status: int, source: Source) -> None:
    cache, work = Cache(), Work()
    mine = memory(cache, "a", "a")
    mine.recall(work)
    mine.keep([work.done(0, kind, status, source)])
    assert cache.held == {}


def test_sampled_answers_are_kept_only_where_the_model_says_so() -> None:
    for everything in (False, True):
        cache, work = Cache(), Work(temperature=1.0)
        mine = memory(cache, "a", "a", everything=everything)
        mine.recall(work)
        mine.keep([work.done(0)])
        assert len(cache.held) == int(everything)


def flights(cache: Cache | None, *tenants: str, temperature: float = 0.0, **of: Any) -> list[bytes]:
    """Of the rows of a chunk, all of which ask the same."""
    work = Work(temperature)
    memory(cache, *tenants, **of).recall(work)
    return [work.flights[number] for number in sorted(work.flights)]


def test_rows_of_one_answer_share_a_flight_also_without_a_cache() -> None:
    for cache, mode in ((Cache(), "on"), (None, "on"), (None, "read")):
        assert len(set(flights(cache, "a", "a", mode=mode))) == 1
    assert len(set(flights(Cache(), "a", "b"))) == 2, "tenants share nothing"
    assert flights(Cache(), "a", "a", share=False) == []


@pytest.mark.parametrize("mode", ["off", "write"])
def test_a_batch_that_does_not_read_shares_only_with_itself(mode: str) -> None:
    mine = flights(Cache(), "a", "a", mode=mode)
    assert [mine[0] == other for other in mine] == [True, True, False, False]
    assert mine[0] != flights(Cache(), "a", "a")[0]


def test_what_may_differ_shares_no_flight() -> None:
    assert flights(Cache(), "a", "a", temperature=1.0) == []
    assert flights(Cache(), "a", "a", temperature=1.0, everything=True) == [], "sampled answers are kept, not shared"
    assert len(flights(Cache(), "a", "a", everything=True)) == 4
    assert flights(None, "a", "a")[0] != flights(None, "a", "a", timeout_s=5.0)[0]


def test_rows_that_the_cache_has_not_are_told_so() -> None:
    cache, work = Cache(), Work()
    mine = memory(cache, "a", "b")
    mine.recall(work)
    assert work.missed_rows == [0, 1, 2, 3]
    mine.keep([work.done(0)])
    again = Work()
    memory(cache, "a", "b").recall(again)
    assert (sorted(again.taken), again.missed_rows, sorted(again.flights)) == ([0, 1], [2, 3], [2, 3])


def test_what_is_no_answer_is_a_miss() -> None:
    cache, work, again = Cache(), Work(), Work()
    memory(cache, "a", "b").recall(work)
    mine = memory(cache, "a", "b")
    mine.recall(work)
    mine.keep([work.done(0), work.done(2)])
    [spoiled, _] = cache.held
    cache.held[spoiled] = b"no answer"
    cache.hits = cache.misses = 0
    memory(cache, "a", "a").recall(again)
    assert (again.taken, again.missed_rows, sorted(again.flights)) == ({}, [0, 1, 2, 3], [0, 1, 2, 3])
    assert (cache.hits, cache.misses, spoiled in cache.held) == (0, 4, False)


def test_models_say_what_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {m@1: {source: /m, cache: all}, m@2: {source: /m}}\n")
    registry = load_registry(file)
    assert [registry.get(name).cache for name in ("m@1", "m@2")] == ["all", ModelVersion(source="/m").cache]
    file.write_text("models: {m@1: {source: /m, cache: sometimes}}\n")
    with pytest.raises(UsageError, match="sometimes"):
        load_registry(file)
