"""Where one batch stands: what of it was sent, what is settled, what it cost. Pure: no clock, no disk."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from common.messages import CacheFacts, Usage
from producers import schedule
from producers.batch import Batch, Counts, Status
from producers.coordinator.records import Cancelled, Cut
from producers.coordinator.row_states import RowStates
from producers.schedule import RunWindow, run_window


@dataclass(slots=True)
class Progress:
    """One batch that is not finalised."""

    batch: Batch
    rows: RowStates
    #: Every row below this was sent at least once.
    next_pos: int = 0
    #: Chunks that may be out with rows of it.
    chunks: dict[str, None] = field(default_factory=dict)
    #: Places of the ledger records that the assembler needs: 8 bytes a result message.
    places: array[int] = field(default_factory=lambda: array("Q"))
    usage: Usage = field(default_factory=Usage)
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
        return max(0, self.next_pos - self.rows.settled.count) if self.sendable else 0

    @property
    def unsent(self) -> int:
        """Rows never sent."""
        return self.batch.planned - self.next_pos if self.sendable else 0

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
