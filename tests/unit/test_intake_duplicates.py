"""Repeated custom ids are found in files of any length, whatever the hashes do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Unreachable
from producers.intake import across_windows as module
from producers.intake import external_sort, temporary
from producers.intake.duplicates import Duplicates
from producers.intake.external_sort import ExternalSort

RECORD = np.dtype([("key", "<u8"), ("value", "<u4")])


@given(st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=60), max_size=6), st.integers(1, 50))
@settings(deadline=None)
def test_everything_comes_out_sorted_and_no_key_is_split(runs: list[list[int]], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "_STRIDE", 4)
        patch.setattr(external_sort, "_RUN", 20)
        patch.setattr(temporary, "SPOOL_BYTES", 256)
        sort = ExternalSort(RECORD, "key", piece=piece)
        everything: list[Any] = []
        for run in runs:
            records = np.zeros(len(run), RECORD)
            records["key"] = run
            records["value"] = np.arange(len(run)) + len(everything)
            everything += records.tolist()
            sort.add(records)
        for _ in range(2):  # it can be read again
            arrays = [array.tolist() for array in sort]
            flat = [record for array in arrays for record in array]
            assert sorted(flat) == sorted(everything)
            assert [k for k, _ in flat] == sorted(k for k, _ in everything)
            for one, other in itertools.pairwise(arrays):
                assert one[-1][0] < other[0][0]
        sort.close()


def test_pieces_stay_small_however_much_there_is() -> None:
    rng = np.random.default_rng(1)
    sort = ExternalSort(RECORD, "key", piece=8192)
    for _ in range(40):
        records = np.zeros(5000, RECORD)
        records["key"] = rng.integers(0, 2**63, 5000)
        sort.add(records)
    sizes = [len(array) for array in sort]
    assert sum(sizes) == 200_000
    assert max(sizes) < 2 * 8192


def run(windows: list[list[tuple[bytes, bool]]]) -> list[tuple[int, int, int]]:
    """`(index, line, first line)` of all repeats; lines are twice the index, plus one."""
    table = Duplicates()
    index = 0
    found = []
    for window in windows:
        numbered = [(index + n, 2 * (index + n) + 1, i, refused) for n, (i, refused) in enumerate(window)]
        index += len(window)
        found += table.add_window([r[:3] for r in numbered if not r[3]], [r[:3] for r in numbered if r[3]])
    found += table.across_windows()
    again = list(table.across_windows())
    assert again == found[len(found) - len(again) :]
    table.close()
    flat = [i for w in windows for i in w]
    for repeat in found:
        assert flat[repeat.index][0] == repeat.custom_id
    return sorted((r.index, r.line, r.first_line) for r in found)


ids = st.lists(
    st.lists(st.tuples(st.sampled_from([b'"%d"' % n for n in range(12)]), st.booleans()), max_size=12), max_size=5
)


def check(windows: list[list[tuple[bytes, bool]]]) -> None:
    flat = [i for w in windows for i in w]
    expected = [
        n for n, (custom_id, refused) in enumerate(flat) if not refused and custom_id in [i for i, _ in flat[:n]]
    ]
    found = run(windows)
    assert [index for index, _, _ in found] == expected
    for index, line, first_line in found:
        assert line == 2 * index + 1
        assert first_line < line
        assert flat[(first_line - 1) // 2][0] == flat[index][0]


@given(ids)
@settings(deadline=None)
def test_every_repeat_is_found_once(windows: list[list[tuple[bytes, bool]]]) -> None:
    check(windows)


@given(ids)
@settings(deadline=None)
def test_equal_hashes_of_different_ids_are_no_repeat(windows: list[list[tuple[bytes, bool]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Two hashes for all ids, which also makes halves of them equal.
        patch.setattr(module, "xxh3_128_digest", lambda text: bytes(8) + bytes([text[1] % 2]) * 8)
        check(windows)


def test_a_window_of_nothing_but_one_id() -> None:
    assert len(run([[(b'"same"', False)] * 3000] * 3)) == 8999


def test_ids_across_many_windows() -> None:
    def windows() -> Iterator[list[tuple[bytes, bool]]]:
        for w in range(30):
            yield [(b'"id-%d"' % (w * 2000 + n), False) for n in range(2000)]
        yield [(b'"id-%d"' % n, False) for n in range(0, 60_000, 7)]

    found = run(list(windows()))
    assert [first for _, _, first in found] == [2 * n + 1 for n in range(0, 60_000, 7)]


def test_a_full_temporary_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(module, "spooled", lambda folder: Full())
    table = Duplicates()
    table.add_window([(0, 1, b'"a"')], [])
    with pytest.raises(Unreachable, match="temporary files: No space left on device; free some space or set TMPDIR"):
        table.add_window([(1, 2, b'"b"')], [])
