"""What is out, what must be sent again, and the batches of a model version. Plain data and its upkeep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.messages import Failure, infer_queue, node_queue
from producers.coordinator.chunk_times import ChunkTimes
from producers.coordinator.costs import Costs
from producers.coordinator.fair_queue import FairQueue
from producers.coordinator.progress import Progress
from producers.coordinator.row_states import Positions


@dataclass(slots=True)
class Share:
    """What a chunk that is out holds of one batch (rows whose failed attempt came back are taken out)."""

    batch: str
    positions: Positions
    attempt: int
    #: Crashes with these rows inside the engine, and losses in a row that no report explained (`suspicion`).
    charges: int
    lapses: int
    #: The worker that tried them in vain, `*`: more than one.
    tried: str = ""
    #: What the plan estimates for a row of it, on average, in tokens; 0: not known.
    cost: float = 0.0
    #: What its batch was charged for a row of it in the fair queue, in tokens; 0: nothing.
    charged: float = 0.0


class Done(NamedTuple):
    """What the last message of a chunk said."""

    node: str
    seq: int
    failure: Failure | None


@dataclass(slots=True)
class Outstanding:
    """A chunk that is out."""

    id: str
    model: str
    #: Chunks of a model version are numbered as they are sent.
    order: int
    #: Monotonic seconds.
    sent_at: float
    shares: list[Share]
    #: False until the broker confirmed it.
    published: bool
    #: The worker whose own queue it went to; empty: the queue of the model version.
    target: str = ""
    #: The chunk whose rows it carries a second time; empty: none.
    copy_of: str = ""
    #: True when some of its rows went out a second time.
    copied: bool = False
    #: Monotonic seconds since when that worker is not seen.
    target_gone_since: float | None = None
    #: Monotonic seconds when a worker was last seen to hold it.
    leased_at: float | None = None
    #: Monotonic seconds since when a lease that was there is missing.
    unleased_since: float | None = None
    #: Monotonic seconds since when whoever holds it now was seen to do so.
    held_since: float | None = None
    #: Who holds it.
    node: str | None = None
    #: Monotonic seconds since when it looks as if its message was lost in the queue.
    missing_since: float | None = None
    #: Rows that results came of.
    answered: int = 0
    #: Result messages that came, a bit for each `seq`, by node.
    seen: dict[str, int] = field(default_factory=dict)
    #: The last message, when it came before an earlier one, and when (monotonic seconds).
    done: Done | None = None
    done_at: float = 0.0

    @property
    def open(self) -> int:
        """About how many of its rows have no answer yet."""
        return max(0, sum(len(share.positions) for share in self.shares) - self.answered)

    @property
    def queue(self) -> str:
        """Where it was published."""
        return node_queue(self.model, self.target) if self.target else infer_queue(self.model)

    @property
    def ahead(self) -> bool:
        """True when it went to one worker alone, to be run there before what that has: its rows have waited before."""
        again = any(share.attempt > 1 or share.charges or share.lapses for share in self.shares)
        return bool(self.target) and (again or bool(self.copy_of))

    @property
    def isolated(self) -> bool:
        """True when its rows are suspects, which travel with nobody else."""
        return any(share.charges >= 2 for share in self.shares)

    @property
    def suspected(self) -> bool:
        """True when some of its rows were inside an engine that ended: nothing to have in two engines."""
        return any(share.charges for share in self.shares)


@dataclass(slots=True)
class Retry:
    """Rows to be sent again."""

    batch: str
    positions: Positions
    attempt: int
    charges: int
    lapses: int
    #: Monotonic seconds before which they are not sent.
    not_before: float
    #: What becomes of them when attempts are used up; an empty code: their last error line stands.
    code: str = ""
    message: str = ""
    tried: str = ""


@dataclass(slots=True)
class Lane:
    """One model version: its batches, in the order they came, and what it has to send again."""

    model: str
    batches: dict[str, None] = field(default_factory=dict)
    #: Those with rows that were never sent and may go out now.
    fresh: dict[str, None] = field(default_factory=dict)
    #: Those with such rows that may not: paused, before their time, outside their hours. Unix seconds of the next look.
    asleep: dict[str, float] = field(default_factory=dict)
    #: Rows that are sent and not settled, of each batch that has any, and of all, as they were last counted.
    counted: dict[str, int] = field(default_factory=dict)
    used: int = 0
    #: Batches that have changed since.
    changed: set[str] = field(default_factory=set)
    #: Whose turn it is.
    fair: FairQueue = field(default_factory=FairQueue)
    #: Batches whose weight is not known to it yet, and when all were weighed (monotonic seconds).
    unweighed: set[str] = field(default_factory=set)
    weighed_at: float = float("-inf")
    retries: list[Retry] = field(default_factory=list)
    #: Workers with which a chunk was lost, until one of them is heard of again.
    silent: set[str] = field(default_factory=set)
    next_order: int = 0
    #: Highest order that a worker was seen to hold, by queue.
    leased_order: dict[str, int] = field(default_factory=dict)
    times: ChunkTimes = field(default_factory=ChunkTimes)
    costs: Costs = field(default_factory=Costs)
    #: Monotonic seconds since when there is less to send than a full chunk.
    partial_since: float | None = None

    def take(self, taken: list[tuple[Retry, Positions]]) -> None:
        """These rows of these retries go out."""
        whole = set()
        for retry, rows in taken:
            if len(rows) == len(retry.positions):
                whole.add(id(retry))
            else:
                retry.positions = np.setdiff1d(retry.positions, rows).astype(np.uint32)
        # Some may have been settled since they were picked.
        self.retries = [r for r in self.retries if id(r) not in whole and len(r.positions)]

    def take_rows(self, batch_id: str, rows: Positions) -> None:
        """These rows need not be sent again, whichever retries they are in."""
        kept = []
        for retry in self.retries:
            if not len(retry.positions):
                continue
            apart = retry.positions[0] > rows[-1] or retry.positions[-1] < rows[0]
            if retry.batch == batch_id and not apart:
                stay = ~np.isin(retry.positions, rows)
                if not stay.all():
                    if not stay.any():
                        continue
                    retry.positions = retry.positions[stay]
            kept.append(retry)
        self.retries = kept

    def withdraw(self, batch_id: str) -> None:
        """Nothing of a batch is to be sent again."""
        self.retries = [r for r in self.retries if r.batch != batch_id]

    def drop(self, batch_id: str) -> None:
        """Forget a batch."""
        for known in (self.batches, self.fresh, self.asleep):
            known.pop(batch_id, None)
        self.changed.add(batch_id)
        self.unweighed.discard(batch_id)
        self.fair.forget(batch_id)


class Outcome:
    """What a result message changed."""

    __slots__ = ("duplicates", "settled", "touched", "unknown")

    def __init__(self) -> None:
        #: Batches that changed.
        self.touched: list[Progress] = []
        self.settled = 0
        self.duplicates = 0
        #: Results of batches that are ended or not ours.
        self.unknown = 0
