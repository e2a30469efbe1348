"""Reads the ledger at the start of a life: the book as it was, batch by batch."""

from __future__ import annotations

import time

from common.errors import BadMessage
from common.logs import get
from common.messages import decode_results
from producers.coordinator.book import Book
from producers.coordinator.ledger import Ledger
from producers.coordinator.records import Dispatch, Evidence, Finalised, Lost, Type, decode
from producers.coordinator.segments import Damage, Record

log = get(__name__)


def recover(book: Book, ledger: Ledger) -> int:
    """Fold every record of the batches that are open in `book` into it; returns how many stretches were damaged.

    Records of other batches are not needed any more. What was in a damaged stretch is simply sent again.
    """
    began, records, damaged = time.monotonic(), 0, 0
    for item in ledger.recover():
        if isinstance(item, Damage):
            damaged += not item.torn
            continue
        place, record = item
        records += 1
        for batch in _apply(book, place, record):
            ledger.hold(place, batch)
    ledger.seal_past()
    book.settle_recovery(time.monotonic())
    if records:
        log.info(
            "ledger_read",
            records=records,
            damaged=damaged,
            batches=len(book.batches),
            chunks_out=len(book.out),
            seconds=round(time.monotonic() - began, 3),
        )
    return damaged


def _apply(book: Book, place: int, record: Record) -> set[str]:
    """Fold one record in; the open batches that need it."""
    now = time.monotonic()
    if record.type is Type.RESULTS:
        try:
            results = decode_results(record.payload)
        except BadMessage as bad:
            # Whole, but of another version of this program.
            log.error("record_unreadable", place=place, reason=bad.reason)
            return set()
        needing = book.needing(results)
        if needing:
            book.results(results, place, now)
        return needing
    content = decode(record.type, record.payload)
    if isinstance(content, Dispatch):
        book.sent(content, now)
        return {s.batch for s in content.slices if s.batch in book.batches}
    if isinstance(content, Lost):
        chunk = book.out.get(content.chunk)
        book.lost(content, now)
        return {share.batch for share in chunk.shares} if chunk is not None else set()
    if isinstance(content, Finalised):
        # Its marker is still there: the outputs stand, and it is ended again, with the same bytes.
        return set()
    if isinstance(content, Evidence):
        return set()
    progress = book.decided(content, place)  # type: ignore[arg-type]
    return {progress.id} if progress is not None else set()
