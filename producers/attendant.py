"""Looks after the embedded fleet while one of its batches is followed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from common.errors import Unreachable
from producers.batch_view import BatchView
from producers.embedded import WorkerState

#: Seconds between two looks at the fleet.
LOOK_S = 1.0
#: Seconds that a problem must last: the fleet takes a moment to notice that it was asked to try again.
PROBLEM_S = 3.0

#: States of a worker that explain why nothing is answered yet.
_REASONS = {"waiting": "waiting_for_devices", "starting": "starting_worker", "loading": "loading_model"}


class Hold(Protocol):
    """What this needs of `producers.embedded.Fleet`."""

    def tend(self) -> bool:
        """Bring the fleet up again when it was killed."""
        ...

    def problem(self, model: str | None = None) -> str | None:
        """Why the model will get no worker."""
        ...

    def worker_state(self, model: str | None = None) -> WorkerState:
        """The model's worker."""
        ...


class Attendant:
    """Given every view of the batch: brings a killed fleet up again, and says what the batch waits for."""

    def __init__(self, fleet: Hold, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._say, self._clock = fleet, say, clock
        self._next_look = 0.0
        self._problem_since: float | None = None
        self._reason: str | None = None

    def __call__(self, seen: BatchView) -> BatchView:
        """The view, with the fleet's reason; `Unreachable` when the batch cannot go on without a person's help."""
        if seen.final:
            return seen
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look(seen, now)
        # A batch that moves needs no reason; of one that does not, the fleet knows more than the store, unless it is
        # not meant to move.
        if seen.reason in ("paused", "scheduled") or (seen.reason is None and seen.answered):
            return seen
        here = "starting_coordinator" if seen.reason == "no_coordinator" else seen.reason
        return msgspec.structs.replace(seen, reason=self._reason or here)

    def _look(self, seen: BatchView, now: float) -> None:
        if self._fleet.tend():
            self._say("the embedded fleet had ended and was brought up again")
        problem = self._fleet.problem(seen.model)
        if problem is None:
            self._problem_since = None
        elif self._problem_since is None:
            self._problem_since = now
        elif now - self._problem_since >= PROBLEM_S:
            raise Unreachable(f"{problem}; {seen.id} is kept, 'producers watch {seen.id}' goes on with it")
        worker = self._fleet.worker_state(seen.model)
        self._reason = worker.detail or _REASONS.get(worker.state)
