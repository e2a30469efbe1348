"""Two leaders of a shard at the same time: what the earlier one does from the takeover on never counts."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import VERSION, Kind, Results, encode
from common.store import LocalStore
from producers.batch import Status, folder, read_status
from producers.coordinator.book import Book
from producers.coordinator.core import Ousted
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import Ledger
from producers.coordinator.records import Cancelled, Type
from producers.coordinator.records import encode as encode_record
from producers.coordinator.recovery import recover
from producers.coordinator.status_files import StatusFiles
from tests.support.coordinators import MODEL, make_batch, part_of

ROWS = 24


@pytest.mark.parametrize("stopped", ["before the file", "before the fence", "after the fence", "after the name"])
def test_a_leader_that_hangs_in_the_middle_of_a_status_never_has_the_last_word(tmp_path: Path, stopped: str) -> None:
    store = LocalStore(tmp_path / "store")
    batch = make_batch(store, 1)
    old = Leadership(store, 0, tmp_path / "wal-a", 600)
    assert old.acquire(threading.Event())
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert goes_on.wait(60)

    def fence() -> None:
        if stopped == "before the fence":
            hang()
        old.check()
        if stopped == "after the fence":
            hang()

    failed: list[BaseException] = []

    def say() -> None:
        try:
            if stopped == "before the file":
                hang()
            StatusFiles(store).say(Status(id=batch.id, status="in_progress"), fence)
            if stopped == "after the name":
                hang()
        except BaseException as exc:
            failed.append(exc)

    zombie = threading.Thread(target=say)
    zombie.start()
    assert hangs.wait(60)
    # As one that saw it silent for long enough: on another host, since here the first would count as alive.
    store.create_exclusive("epochs/0/2", b"{}")
    new = Leadership(store, 0, tmp_path / "wal-b", 600)
    new.epoch = 2
    store.sweep(folder(batch.id))
    StatusFiles(store).say(Status(id=batch.id, status="completed"), new.check)
    goes_on.set()
    zombie.join(60)
    assert read_status(store, batch).status == "completed"
    assert [type(exc) for exc in failed] == {
        "before the file": [Ousted],
        "before the fence": [Ousted],
        "after the fence": [FileNotFoundError],
        "after the name": [],
    }[stopped]
    assert [n for n in os.listdir(store.local_path(folder(batch.id))) if n.startswith(".tmp")] == []


class Life:
    """A leader with its ledger and its book."""

    def __init__(self, store: LocalStore, wal: Path, epoch: int, open_book: Callable[[Book], None]) -> None:
        self.ledger = Ledger(wal, epoch, segment_bytes=600)
        self.book = Book()
        open_book(self.book)
        recover(self.book, self.ledger)

    def settle(self, batch: str, pos: int, kind: Kind) -> None:
        """A result comes in."""
        results = Results(VERSION, "chunk", MODEL, "n", 0, False, [part_of(batch, [(pos, kind, b"line\n")])])
        place = self.ledger.append(Type.RESULTS, encode(results), {batch})
        self.book.results(results, place, 0.0)

    def cancel(self, batch: str) -> None:
        """A decision is made."""
        decision = Cancelled(batch, 0, 1.0)
        place = self.ledger.append(Type.DECISION, encode_record(decision), {batch})
        self.book.decided(decision, place)

    def seen(self, batch: str) -> tuple[set[int], set[int], bool]:
        """(settled, failed, cancelled)."""
        progress = self.book.batches[batch]
        every = [progress.rows.settled.span(0, ROWS), progress.rows.failed.span(0, ROWS)]
        settled, failed = ({i for i, flag in enumerate(flags) if flag} for flags in every)
        return settled, failed, progress.cut is not None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["old", "new", "new", "takeover", "cancel by old"]), st.integers(0, ROWS - 1), st.booleans()
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_what_an_old_leader_appends_after_the_takeover_is_seen_by_nobody(steps: list[tuple[str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = LocalStore(Path(name) / "store")
        batch = make_batch(store, ROWS)
        wal = Path(name) / "wal"

        def life(epoch: int) -> Life:
            return Life(store, wal, epoch, lambda book: book.open(batch))  # type: ignore[arg-type]

        old = new = life(1)
        epoch = 1
        for what, pos, success in steps:
            kind = Kind.OUTPUT if success else Kind.ERROR
            if what == "takeover":
                epoch += 1
                old, new = new, life(epoch)
                assert new.seen(batch.id) == old.seen(batch.id)
            elif what == "new":
                new.settle(batch.id, pos, kind)
            elif old is not new and what == "old":
                old.settle(batch.id, pos, kind)
            elif old is not new:
                old.cancel(batch.id)
        assert life(epoch + 1).seen(batch.id) == new.seen(batch.id)
