"""Which chunks are presumed lost. Pure: the book and what was seen in, verdicts out.

A wrong verdict costs work done twice, never an answer; a missing one would leave a batch waiting for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from producers.coordinator.book import Book
from producers.coordinator.lanes import Outstanding
from producers.coordinator.records import Lost

#: Seconds a worker's lease may be missing before it counts as lapsed: its last results are on their way.
GRACE_S = 1.0
#: Seconds to wait for a result message that a later one overtook.
OVERTAKEN_S = 10.0
#: Queues of workers that are gone of which something is remembered, about.
_SPARE = 256


def see_leases(book: Book, nodes: Mapping[str, str | None], now: float) -> None:
    """Fold in who holds which chunk (`nodes`: chunk id → node, or None)."""
    for chunk_id, node in nodes.items():
        chunk = book.out.get(chunk_id)
        if chunk is None:
            continue
        if node is not None:
            if chunk.held_since is None or node != chunk.node:
                chunk.held_since = now
            chunk.leased_at, chunk.node = now, node
            book.lane(chunk.model).silent.discard(node)
            chunk.unleased_since = chunk.missing_since = None
            leased = book.lane(chunk.model).leased_order
            leased[chunk.queue] = max(leased.get(chunk.queue, -1), chunk.order)
        elif chunk.leased_at is not None and chunk.unleased_since is None:
            chunk.unleased_since = now


def see_queues(book: Book, waiting: Mapping[str, int | None], now: float) -> None:
    """Fold in how many messages wait in each queue (None: not known).

    A chunk that nobody holds looks missing while later ones of its queue were taken, or while its queue is empty.
    """
    for chunk in book.out.values():
        if chunk.leased_at is not None or not chunk.published:
            continue
        passed = book.lane(chunk.model).leased_order.get(chunk.queue, -1) > chunk.order
        if passed or waiting.get(chunk.queue) == 0:
            if chunk.missing_since is None:
                chunk.missing_since = now
        else:
            chunk.missing_since = None


def see_workers(book: Book, nodes: Collection[str], now: float) -> None:
    """Fold in which workers take chunks, for those that went to one worker alone and that nobody holds yet."""
    for lane in book.lanes.values():
        # Who has not announced itself is given nothing anyway.
        lane.silent.intersection_update(nodes)
        if len(lane.leased_order) > _SPARE + len(book.out):
            known = {chunk.queue for chunk in book.out.values()}
            lane.leased_order = {queue: order for queue, order in lane.leased_order.items() if queue in known}
    for chunk in book.out.values():
        if not chunk.target or not chunk.published:
            continue
        there = chunk.target in nodes and chunk.target not in book.lane(chunk.model).silent
        if there or chunk.leased_at is not None:
            chunk.target_gone_since = None
        elif chunk.target_gone_since is None:
            chunk.target_gone_since = now


def judge(book: Book, now: float, hold_until: float, seen_at: float, lease_s: float, unclaimed_s: float) -> list[Lost]:
    """The chunks that are lost.

    `seen_at`: results published before it are taken in. Until then a chunk whose lease is gone may simply be done.
    """
    if now < hold_until:
        return []
    found = []
    for chunk in book.out.values():
        if chunk.done is not None:
            if now - chunk.done_at > OVERTAKEN_S and seen_at > chunk.done_at:
                found.append(Lost(chunk.id, leased=False))
        elif _lapsed(chunk, now, seen_at, lease_s):
            found.append(Lost(chunk.id, leased=True, node=chunk.node or ""))
        elif chunk.missing_since is not None and now - chunk.missing_since > unclaimed_s:
            found.append(Lost(chunk.id, leased=False))
        elif chunk.target_gone_since is not None and now - chunk.target_gone_since > lease_s + GRACE_S:
            # Its message waits where nobody looks.
            found.append(Lost(chunk.id, leased=False))
    return found


def _lapsed(chunk: Outstanding, now: float, seen_at: float, lease_s: float) -> bool:
    since = chunk.unleased_since
    if since is None or now - since <= GRACE_S:
        return False
    return seen_at > since or now - since > 4 * lease_s
