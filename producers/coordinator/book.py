"""What the coordinator knows, all batches together: what is out, what must be sent again, what came back.

Every change is the effect of one ledger record, so that reading the ledger again gives the same book. Pure: callers
append the record, pass the time in, and hold the lock.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from common.messages import TOO_LATE, Crash, Kind, Part, Results, Usage, kinds, positions
from producers.batch import Batch
from producers.coordinator import suspicion
from producers.coordinator.backoff import retry_delay
from producers.coordinator.lanes import Done, Lane, Outcome, Outstanding, Retry, Share
from producers.coordinator.progress import Progress, new_progress
from producers.coordinator.records import (
    Cancelled,
    Closed,
    Decision,
    Dispatch,
    Exhausted,
    Expired,
    Failed,
    Finalised,
    Lost,
    Paused,
    Reopened,
    Reprioritised,
    Resumed,
    unpack_positions,
)
from producers.coordinator.row_states import Mask, Positions
from producers.coordinator.usage import add_usage, usage_of_part

#: What a row gets whose worker ended the chunk without a word about it.
NO_ANSWER = ("no_answer", "the worker gave no answer")
#: Chunks given up, and crashes, that are remembered.
_MOST_REMEMBERED = 4096
#: Chunks no longer out that a batch may remember.
_SPARE_CHUNKS = 64
#: Result messages of one chunk whose gaps are watched.
_MOST_MESSAGES = 1 << 14

_Key = TypeVar("_Key", str, tuple[str, str])


class Book:
    """All open batches of a shard. Not thread-safe: callers hold one lock."""

    def __init__(self) -> None:
        self.batches: dict[str, Progress] = {}
        self.lanes: dict[str, Lane] = {}
        self.out: dict[str, Outstanding] = {}
        #: Chunks that were lost in an engine or with the worker they were sent to, the latest last: workers are told to
        #: drop what is left of them.
        self.given_up: dict[str, None] = {}
        #: Reports of crashes that were folded in, by chunk and worker's life, the latest last.
        self._crashes: dict[tuple[str, str], None] = {}

    # -- batches ---------------------------------------------------------------------------------------------------

    def open(self, batch: Batch) -> Progress:
        """Take up a batch."""
        progress = self.batches[batch.id] = new_progress(batch)
        lane = self.lane(batch.model)
        lane.batches[batch.id] = lane.fresh[batch.id] = None
        lane.unweighed.add(batch.id)
        lane.fair.activate(batch.id, batch.tenant)
        return progress

    def forget(self, batch_id: str) -> None:
        """Drop what is known of a batch that is finalised."""
        progress = self.batches.pop(batch_id, None)
        if progress is None:
            return
        self._withdraw(progress)
        lane = self.lanes[progress.batch.model]
        lane.drop(batch_id)
        if not lane.batches and not any(c.model == lane.model for c in self.out.values()):
            del self.lanes[lane.model]

    def lane(self, model: str) -> Lane:
        """The lane of a model version."""
        lane = self.lanes.get(model)
        if lane is None:
            lane = self.lanes[model] = Lane(model)
        return lane

    def window_used(self, lane: Lane) -> int:
        """Rows of a model version that are sent and not settled."""
        for batch_id in lane.changed:
            progress = self.batches.get(batch_id)
            now, before = progress.outstanding if progress is not None else 0, lane.counted.pop(batch_id, 0)
            lane.used += now - before
            if now:
                lane.counted[batch_id] = now
        lane.changed.clear()
        return lane.used

    # -- records ---------------------------------------------------------------------------------------------------

    def sent(
        self,
        record: Dispatch,
        now: float,
        taken: list[tuple[Retry, Positions]] | None = None,
        *,
        published: bool = True,
    ) -> Outstanding:
        """A chunk goes out. `taken`: the retries it serves, with their rows that it carries (None: find them)."""
        lane = self.lane(record.model)
        if taken:
            lane.take(taken)
        chunk = Outstanding(
            record.chunk, record.model, lane.next_order, now, [], published, record.node, record.copy_of
        )
        if record.copy_of in self.out:
            self.out[record.copy_of].copied = True
        lane.next_order += 1
        for piece in record.slices:
            progress = self.batches.get(piece.batch)
            if progress is None or not progress.sendable:
                continue
            rows = piece.positions()
            again = progress.goes_out(rows, record.node)
            progress.resent += again
            if again and taken is None:
                lane.take_rows(piece.batch, rows)
            lane.changed.add(piece.batch)
            self._note_chunk(progress, record.chunk)
            if progress.started_at is None:
                progress.started_at = record.sent_at
            charges = min(piece.charges, suspicion.CONVICTED - 1)  # Records of earlier versions counted otherwise.
            cost = piece.cost / len(rows)
            chunk.shares.append(Share(piece.batch, rows, piece.attempt, charges, piece.lapses, piece.tried, cost))
        if chunk.shares:
            self.out[chunk.id] = chunk
        return chunk

    def results(self, results: Results, place: int, now: float) -> Outcome:
        """Fold in a worker's message whose record lies at `place`.

        Parts of batches that are ended or unknown count as `unknown`; a part with positions outside its batch too.
        """
        outcome = Outcome()
        chunk = self.out.get(results.chunk)
        if results.crash is not None:
            self._crashed(results, results.crash, chunk, now, outcome)
            return outcome
        for part in results.parts:
            self._part(part, chunk, results.node, place, now, outcome)
            if results.cache is not None and (progress := self.batches.get(part.batch)) is not None:
                progress.cache_seen = results.cache
        if results.model in self.lanes:
            self.lanes[results.model].silent.discard(results.node)
        if chunk is not None:
            # Seen or not: a lease of less than a second may fall between two looks.
            leased = self.lane(chunk.model).leased_order
            leased[chunk.queue] = max(leased.get(chunk.queue, -1), chunk.order)
            self._follow(chunk, results, now)
            self._end_moot(chunk)
        return outcome

    def needing(self, results: Results) -> set[str]:
        """The open batches that a worker's message says something of; nobody needs one without any."""
        named = {part.batch for part in results.parts}
        if results.crash is not None:
            named.update(inside.batch for inside in results.crash.inside)
        found = {b for b in named if b in self.batches and self.batches[b].accepting}
        chunk = self.out.get(results.chunk)
        if chunk is not None:
            found.update(share.batch for share in chunk.shares)
        return found

    def lost(self, record: Lost, now: float) -> None:
        """A chunk is given up: its open rows go out again."""
        chunk = self.out.pop(record.chunk, None)
        if chunk is None:
            return
        lane = self.lane(chunk.model)
        if record.leased or chunk.target:
            # In a worker's own queue nobody else would find it; that worker, should it come back, need not run it.
            self._give_up(chunk.id)
        if record.node:
            lane.silent.add(record.node)
        for share, rows in self._open_shares(chunk):
            if record.leased:
                lane.retries.append(suspicion.after_lapse(share, rows, record.node, now))
            else:
                lane.retries.append(
                    Retry(share.batch, rows, share.attempt, share.charges, share.lapses, now, tried=share.tried)
                )

    def decided(self, decision: Decision, place: int) -> Progress | None:
        """Fold in a decision; None when its batch is not open."""
        progress = self.batches.get(decision.batch)
        if progress is None:
            return None
        self.lane(progress.batch.model).changed.add(progress.id)
        match decision:
            case Cancelled() | Expired():
                if progress.accepting and progress.cut is None:
                    progress.cut = decision
                    self.lane(progress.batch.model).withdraw(progress.id)
            case Paused() | Resumed():
                progress.paused = isinstance(decision, Paused)
                lane = self.lane(progress.batch.model)
                if progress.id in lane.asleep:
                    lane.asleep[progress.id] = 0.0
            case Reprioritised():
                progress.priority = decision.priority
                self.lane(progress.batch.model).unweighed.add(progress.id)
            case Exhausted():
                if progress.accepting:
                    rows = unpack_positions(decision.positions)
                    progress.rows.settle_failed(rows)
                    self.lane(progress.batch.model).take_rows(progress.id, rows)
                    progress.places.append(place)
            case Closed():
                progress.closed_at = decision.at
                progress.cache = decision.cache
                self._withdraw(progress)
            case Reopened():
                rows = unpack_positions(decision.positions)
                progress.closed_at = None
                progress.rows.reopen(rows)
                self._retry_open(progress, rows)
            case Failed():
                progress.failure = decision.reason
                progress.closed_at = decision.at
                self._withdraw(progress)
        return progress

    def finalised(self, record: Finalised) -> None:
        """The outputs of a batch stand."""
        progress = self.batches.get(record.batch)
        if progress is not None:
            progress.final = record.status

    def settle_recovery(self, now: float) -> None:
        """After the ledger was read: rows that were sent, are open, and are in no chunk go out again.

        That happens when the records in between were damaged.
        """
        held: dict[str, list[Positions]] = {}
        for chunk in self.out.values():
            for share in chunk.shares:
                held.setdefault(share.batch, []).append(share.positions)
        for lane in self.lanes.values():
            for retry in lane.retries:
                held.setdefault(retry.batch, []).append(retry.positions)
        for progress in self.batches.values():
            if not progress.sendable:
                continue
            at = progress.rows.settled.full_until(0)
            unsent = [np.arange(s.start, s.end, dtype=np.uint32) for s in progress.skipped]
            known = np.sort(np.concatenate([np.empty(0, np.uint32), *held.get(progress.id, []), *unsent]))
            while at < progress.next_pos:
                end = min(progress.next_pos, at + (1 << 16))
                opened = at + np.flatnonzero(~progress.rows.settled.span(at, end)).astype(np.uint32)
                stray = np.setdiff1d(opened, known, assume_unique=False).astype(np.uint32)
                self._retry_open(progress, stray, now)
                at = end

    # -- inside ----------------------------------------------------------------------------------------------------

    def _part(self, part: Part, chunk: Outstanding | None, node: str, place: int, now: float, outcome: Outcome) -> None:
        progress = self.batches.get(part.batch)
        rows = positions(part)
        if progress is None or not progress.accepting:
            outcome.unknown += len(rows)
            return
        try:
            merge = progress.rows.merge(rows, kinds(part))
        except ValueError:
            outcome.unknown += len(rows)
            return
        self.lane(progress.batch.model).changed.add(progress.id)
        accepted = merge.accepted
        taken = int(np.count_nonzero(accepted))
        failed = int(np.count_nonzero(merge.retry))
        outcome.settled += int(np.count_nonzero(merge.fresh))
        outcome.duplicates += len(rows) - taken - failed
        progress.duplicates += len(rows) - taken - failed
        outcome.touched.append(progress)
        if taken or failed:
            if not progress.places or progress.places[-1] != place:
                progress.places.append(place)
            usage = usage_of_part(part, accepted | merge.retry)
            add_usage(progress.usage, usage)
            self._learn(progress, chunk, merge.fresh, merge.fresh & (kinds(part) == Kind.OUTPUT), usage)
        if chunk is not None:
            chunk.answered += taken
        if failed and chunk is not None:
            self._attempt_failed(progress, chunk, rows[merge.retry], node, now)

    def _learn(self, progress: Progress, chunk: Outstanding | None, settled: Mask, good: Mask, usage: Usage) -> None:
        """What these rows were estimated to cost is settled; what they did cost is known of the good ones."""
        share = next((s for s in chunk.shares if s.batch == progress.id), None) if chunk is not None else None
        each = share.cost if share is not None and share.cost else progress.row_cost
        progress.costs.settled += each * int(np.count_nonzero(settled))
        measured = usage.prompt_tokens + usage.completion_tokens
        if not measured or not good.all():
            return  # What errors cost says nothing of what answers do.
        lane = self.lane(progress.batch.model)
        for costs in (progress.costs, lane.costs):
            costs.add(each * len(good), measured)
        if share is not None and share.charged:
            lane.fair.correct(progress.id, measured - share.charged * len(good))

    def _attempt_failed(self, progress: Progress, chunk: Outstanding, failed: Positions, node: str, now: float) -> None:
        lane = self.lane(chunk.model)
        for share in chunk.shares:
            if share.batch != progress.id:
                continue
            mine = np.isin(share.positions, failed)
            if not mine.any():
                continue
            again = self._held_nowhere_else(chunk, progress.id, share.positions[mine])
            if progress.sendable and len(again):
                delay = retry_delay(share.attempt)
                tried = suspicion.tried_on(share.tried, node)
                # The worker lived to tell: whatever lapsed before was not their doing.
                lane.retries.append(
                    Retry(progress.id, again, share.attempt + 1, share.charges, 0, now + delay, tried=tried)
                )
            share.positions = share.positions[~mine]

    def _follow(self, chunk: Outstanding, results: Results, now: float) -> None:
        """Keep track of a chunk's messages; settle it with its last one."""
        if results.seq < _MOST_MESSAGES:
            chunk.seen[results.node] = chunk.seen.get(results.node, 0) | 1 << results.seq
        if results.done:
            chunk.done, chunk.done_at = Done(results.node, results.seq, results.failure), now
            if results.elapsed_s > 0 and results.failure is None:
                times = self.lane(chunk.model).times
                times.add(results.elapsed_s, sum(len(s.positions) for s in chunk.shares), results.node)
        done = chunk.done
        if done is None:
            return
        left = self._open_shares(chunk)
        whole = done.seq >= _MOST_MESSAGES or chunk.seen.get(done.node, 0) == (1 << (done.seq + 1)) - 1
        if left and not whole:
            # Messages overtake each other when they are delivered again: wait for those that are on their way.
            return
        del self.out[chunk.id]
        if done.failure is not None and done.failure.code == TOO_LATE:
            self._given_back(chunk, left, now)
            return
        code, message = NO_ANSWER if done.failure is None else (done.failure.code, done.failure.message)
        lane = self.lane(chunk.model)
        for share, rows in left:
            due = now + retry_delay(share.attempt)
            tried = suspicion.tried_on(share.tried, done.node)
            lane.retries.append(
                Retry(share.batch, rows, share.attempt + 1, share.charges, 0, due, code, message, tried)
            )

    def _given_back(self, chunk: Outstanding, left: list[tuple[Share, Positions]], now: float) -> None:
        """Its deadline has passed by its worker's clock, but not by ours: that is no failed attempt of its rows."""
        for share, rows in left:
            self.batches[share.batch].clock_doubted = True
            self.lane(chunk.model).retries.append(
                Retry(share.batch, rows, share.attempt, share.charges, share.lapses, now, tried=share.tried)
            )

    def _partners(self, chunk: Outstanding) -> list[Outstanding]:
        """Other chunks that are out and may hold some of the same rows."""
        if not chunk.copied and not chunk.copy_of:
            return []
        origin = chunk.copy_of or chunk.id
        return [c for c in self.out.values() if c is not chunk and origin in (c.id, c.copy_of)]

    def _held_nowhere_else(self, chunk: Outstanding, batch_id: str, rows: Positions) -> Positions:
        """Those of a chunk's rows that need to be sent again when it is of no use: nobody else has them."""
        for other in self._partners(chunk):
            for share in other.shares:
                if share.batch == batch_id:
                    rows = rows[~np.isin(rows, share.positions)]
        return rows

    def _end_moot(self, chunk: Outstanding) -> None:
        """Give up the copies, or the original, of which nothing is open any more: this chunk answered it first."""
        for other in self._partners(chunk):
            if not any(
                len(self.batches[s.batch].rows.open_rows(s.positions)) for s in other.shares if s.batch in self.batches
            ):
                del self.out[other.id]
                self._give_up(other.id)

    def _crashed(self, results: Results, crash: Crash, chunk: Outstanding | None, now: float, outcome: Outcome) -> None:
        """A worker ended abnormally with this chunk: who was inside its engine is charged, and all go out again."""
        report = results.chunk, crash.life
        if report in self._crashes:
            return
        _remember(self._crashes, report)
        named: dict[str, Positions] = {}
        for inside in crash.inside:
            before = named.get(inside.batch, np.empty(0, np.uint32))
            named[inside.batch] = np.union1d(before, unpack_positions(inside.pos)).astype(np.uint32)
        if chunk is None:
            for batch_id, rows in named.items():
                self._charge_late(batch_id, rows, results.node)
            return
        del self.out[chunk.id]
        self._give_up(chunk.id)
        for batch_id, rows in named.items():
            self._charge_late(batch_id, rows, results.node)  # Those that a second copy holds too stay with that.
        lane = self.lane(chunk.model)
        lane.silent.add(results.node)
        for share, rows in self._open_shares(chunk):
            suspects = named.get(share.batch, np.empty(0, np.uint32))
            lane.retries.extend(suspicion.after_crash(share, rows, suspects, results.node, now))
            outcome.touched.append(self.batches[share.batch])

    def _charge_late(self, batch_id: str, rows: Positions, node: str) -> None:
        """Rows that are elsewhere by now: their chunk was lost before the report came, or they were in two."""
        progress = self.batches.get(batch_id)
        if progress is None or not progress.sendable:
            return
        lane = self.lane(progress.batch.model)
        lane.retries = [
            piece for retry in lane.retries for piece in suspicion.charged_late(retry, batch_id, rows, node)
        ]
        for chunk in self.out.values():
            if chunk.model == lane.model:
                chunk.shares = [
                    piece for share in chunk.shares for piece in suspicion.charged_late(share, batch_id, rows, node)
                ]

    def _give_up(self, chunk_id: str) -> None:
        _remember(self.given_up, chunk_id)

    def _open_shares(self, chunk: Outstanding) -> list[tuple[Share, Positions]]:
        """What must be sent again when the chunk is of no use."""
        found = []
        for share in chunk.shares:
            progress = self.batches.get(share.batch)
            if progress is None or not progress.sendable:
                continue
            rows = self._held_nowhere_else(chunk, share.batch, progress.rows.open_rows(share.positions))
            if len(rows):
                found.append((share, rows))
        return found

    def _note_chunk(self, progress: Progress, chunk_id: str) -> None:
        if len(progress.chunks) > 2 * len(self.out) + _SPARE_CHUNKS:
            progress.chunks = {c: None for c in progress.chunks if c in self.out}
        progress.chunks[chunk_id] = None

    def _withdraw(self, progress: Progress) -> None:
        self.lane(progress.batch.model).withdraw(progress.id)
        for chunk in [self.out[c] for c in progress.chunks if c in self.out]:
            chunk.shares = [s for s in chunk.shares if s.batch != progress.id]
            if not chunk.shares:
                del self.out[chunk.id]

    def _retry_open(self, progress: Progress, rows: Positions, now: float = 0.0) -> None:
        # In pieces that lie close together, so that each is one read.
        for start in range(0, len(rows), 256):
            piece = rows[start : start + 256]
            self.lane(progress.batch.model).retries.append(Retry(progress.id, piece, 1, 0, 0, now))


def _remember(known: dict[_Key, None], key: _Key) -> None:
    known[key] = None
    if len(known) > _MOST_REMEMBERED:
        del known[next(iter(known))]
