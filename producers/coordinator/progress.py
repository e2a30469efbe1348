"""Where one batch stands: what of it was sent, what is settled, what it cost. Pure: no clock, no disk."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.messages import CacheFacts, Usage
from producers import schedule
from producers.batch import Batch, Counts, Status
from producers.coordinator.costs import Costs
from producers.coordinator.records import Cancelled, Cut
from producers.coordinator.row_states import Positions, RowStates
from producers.schedule import RunWindow, run_window


class Stretch(NamedTuple):
    """Rows `[start, end)` of a batch that were never sent. `home`: the worker that got those before them, if known."""

    start: int
    end: int
    home: str


@dataclass(slots=True)
class Progress:
    """One batch that is not finalised."""

    batch: Batch
    rows: RowStates
    #: Every row below this was sent at least once, but for those skipped.
    next_pos: int = 0
    #: The worker whose own queue the rows just below it went to; empty: whoever took them.
    home: str = ""
    #: What goes on with prefixes that a worker is at, left to that one, in the order in which it was left (`sticky`).
    skipped: list[Stretch] = field(default_factory=list)
    #: Chunks that may be out with rows of it.
    chunks: dict[str, None] = field(default_factory=dict)
    #: Places of the ledger records that the assembler needs: 8 bytes a result message.
    places: array[int] = field(default_factory=lambda: array("Q"))
    usage: Usage = field(default_factory=Usage)
    costs: Costs = field(default_factory=Costs)
    #: Rows sent more than once.
    resent: int = 0
    #: Results that came for rows that were settled already.
    duplicates: int = 0
    #: Unix seconds.
    started_at: float | None = None
    #: Why it ends before all of it is answered, where it does: the first such decision stands.
    cut: Cut | None = None
    closed_at: float | None = None
    #: The result cache as it was then.
    cache: CacheFacts | None = None
    #: The same as its last results tell of it.
    cache_seen: CacheFacts | None = None
    #: Why the batch cannot be processed.
    failure: str | None = None
    #: A trouble with this batch's own files; said beside its status.
    trouble: str | None = None
    #: Its rows could not be read a moment ago: they are left alone until then (Unix seconds).
    unreadable_until: float = 0.0
    #: Final status, once the outputs stand.
    final: str | None = None
    #: A person said that nothing more is to be sent for now.
    paused: bool = False
    #: Just taken up: what was asked of it before (cancel, pause) is not folded in yet.
    fresh: bool = False
    #: One of `producers.batch.PRIORITIES`, by the last word on it.
    priority: str = "normal"
    window: RunWindow | None = None
    #: A worker held a deadline to be over that is not: its clock is wrong, so no more chunks carry one.
    clock_doubted: bool = False

    @property
    def id(self) -> str:
        """The batch's id."""
        return self.batch.id

    @property
    def outstanding(self) -> int:
        """Rows sent (or waiting to be sent again) and not settled: what the window counts.

        Too low by rows that an earlier leader had sent, whose record of it did not count, and that are answered.
        """
        return max(0, self.next_pos - self._left - self.rows.settled.count) if self.sendable else 0

    @property
    def unsent(self) -> int:
        """Rows never sent."""
        return self.batch.planned - self.next_pos + self._left if self.sendable else 0

    @property
    def _left(self) -> int:
        return sum(s.end - s.start for s in self.skipped)

    @property
    def row_cost(self) -> float:
        """What the plan estimates for a request of it, on average, in tokens."""
        return self.batch.cost / max(1, self.batch.planned)

    @property
    def work_done(self) -> float:
        """The share of the work that is settled, by the plan's estimate of each request; 0 to 1."""
        if self.complete or not self.batch.cost:
            return float(self.complete)
        return min(1.0, self.costs.settled / self.batch.cost)

    @property
    def ahead(self) -> Stretch:
        """What is left of the plan's end, which may be nothing."""
        return Stretch(self.next_pos, self.batch.planned, self.home)

    def following(self, count: int) -> Positions:
        """The next rows in the order of the plan, at most `count`, without those that are answered."""
        stretch = self.ahead if self.next_pos < self.batch.planned else self.skipped[0]
        return self.open_rows(stretch.start, min(stretch.end, stretch.start + count))

    def open_rows(self, start: int, end: int) -> Positions:
        """The positions in `[start, end)` that are not settled."""
        return (start + np.flatnonzero(~self.rows.settled.span(start, end))).astype(np.uint32)

    def goes_out(self, rows: Positions, node: str) -> int:
        """These rows are sent (to `node`, by its own queue); how many of them were sent before."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        again = int(np.count_nonzero(rows < self.next_pos))
        if end > self.next_pos:
            if start > self.next_pos:
                self._skip(start)
            self.next_pos, self.home = end, node
        if not again or not self.skipped:
            return again
        skipped = []
        for stretch in self.skipped:
            mine = rows[np.searchsorted(rows, stretch.start) : np.searchsorted(rows, stretch.end)]
            again -= len(mine)
            if not len(mine):
                skipped.append(stretch)
                continue
            left = (
                Stretch(stretch.start, int(mine[0]), stretch.home),
                Stretch(int(mine[-1]) + 1, stretch.end, node or stretch.home),
            )
            skipped += [part for part in left if part.start < part.end]
        self.skipped = skipped
        return again

    def _skip(self, end: int) -> None:
        """Rows from `next_pos` to `end` are left for later, as far as they are not answered."""
        start = self.rows.settled.full_until(self.next_pos)
        if start < end:
            self.skipped.append(Stretch(start, end, self.home))

    def pass_answered(self) -> bool:
        """Leave out rows where the unsent begin that an earlier leader had answered; True: there were some."""
        before = self.next_pos, self.skipped
        if self.next_pos < self.batch.planned:
            self.next_pos = self.rows.settled.full_until(self.next_pos)
        if self.skipped:
            moved = [s._replace(start=self.rows.settled.full_until(s.start)) for s in self.skipped]
            self.skipped = [s for s in moved if s.start < s.end]
        return before != (self.next_pos, self.skipped)

    @property
    def sendable(self) -> bool:
        """True while rows of it are still wanted, now or later."""
        return self.cut is None and self.closed_at is None and self.failure is None

    def dispatchable(self, now: float) -> bool:
        """True while rows of it may go out at `now` (Unix seconds)."""
        return self.sendable and not self.paused and not self.fresh and self.opens(now) <= now

    @property
    def scheduled(self) -> bool:
        """True when its submitter said when it may run."""
        return self.window is not None or self.batch.not_before is not None

    def opens(self, now: float) -> float:
        """From when on rows of it may go out, `now` or later (Unix seconds): by its submitter, and by its files."""
        return schedule.opens(max(now, self.unreadable_until), self.batch.not_before, self.window)

    @property
    def accepting(self) -> bool:
        """True while results count."""
        return self.closed_at is None and self.failure is None

    @property
    def complete(self) -> bool:
        """True when every row is settled."""
        return self.rows.settled.count == self.batch.planned

    @property
    def cut_word(self) -> str | None:
        """How a batch ends that is cut: `cancelled` or `expired`; None: it is not."""
        if self.cut is None:
            return None
        return "cancelled" if isinstance(self.cut, Cancelled) else "expired"

    def outcome(self, missed: int) -> str:
        """The final status, given how many rows the cut left without an answer."""
        if self.failure is not None:
            return "failed"
        # Everything was answered before the cut took hold: then it cut nothing.
        return self.cut_word or "completed" if missed else "completed"

    def status(self) -> Status:
        """The batch's status; `reason`, `in_flight` of a live fleet and `updated_at` are the caller's."""
        failed = self.rows.failed.count + self.batch.invalid
        return Status(
            id=self.batch.id,
            status=self._word(),
            reason=self.failure or (self.trouble if self.final is None else None),
            priority=self.priority,
            paused=self.paused and self.sendable,
            model=self.batch.model,
            name=self.batch.name,
            request_counts=Counts(
                total=self.batch.requests, completed=self.rows.settled.count - self.rows.failed.count, failed=failed
            ),
            in_flight=self.outstanding,
            work_done=self.work_done,
            resent=self.resent,
            usage=self.usage,
            cache=self.cache,
            created_at=self.batch.created_at,
            started_at=self.started_at,
            finished_at=self.closed_at if self.final is not None else None,
        )

    def _word(self) -> str:
        if self.final is not None:
            return self.final
        if self.closed_at is not None or self.cut is not None:
            return "cancelling" if self.cut_word == "cancelled" else "finalizing"
        return "queued" if self.started_at is None else "in_progress"


def new_progress(batch: Batch) -> Progress:
    """A batch of which nothing is known yet; `UsageError` when its window cannot be read here."""
    window = None if batch.run_between is None else run_window(batch.run_between)
    return Progress(batch, RowStates(batch.planned), priority=batch.priority, window=window)
