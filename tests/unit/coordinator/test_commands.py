"""What a person's command means for a batch."""

from __future__ import annotations

import msgspec
import pytest

from common.plan import Window
from producers.batch import Batch, Command, Input
from producers.coordinator.commands import Refusal, decision
from producers.coordinator.dispatcher import CLOCK_SLACK_S, _not_after
from producers.coordinator.progress import Progress, new_progress
from producers.coordinator.records import Cancelled, Decision, Expired, Paused, Reprioritised, Resumed


def progress(**fields: object) -> Progress:
    batch = Batch(
        id="batch_x",
        model="m@1",
        created_at=0.0,
        shard=0,
        input=Input("x", 0, ""),
        requests=10,
        planned=10,
        invalid=0,
        cost=0,
        windows=[Window(0, 10, 0, 10)],
    )
    return new_progress(msgspec.structs.replace(batch, **fields))


def ask(word: str, of: Progress, **fields: str) -> Decision | None:
    return decision(Command(command=word, at=1.0, **fields), of, 2.0)


def test_commands_are_decisions() -> None:
    it = progress()
    it.next_pos = 4
    assert ask("cancel", it) == Cancelled("batch_x", 4, 2.0)
    assert ask("pause", it) == Paused("batch_x", 2.0)
    assert ask("resume", it) is None
    assert ask("reprioritize", it, priority="high") == Reprioritised("batch_x", "high", 2.0)
    assert ask("reprioritize", it, priority="normal") is None
    it.paused = True
    assert ask("pause", it) is None
    assert ask("resume", it) == Resumed("batch_x", 2.0)


def test_a_batch_that_ends_obeys_no_more() -> None:
    it = progress()
    it.cut = Expired("batch_x", 0, 1.0)
    assert [ask(word, it) for word in ("cancel", "pause", "resume")] == [None, None, None]


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(Refusal, match="'explode' is no command of this version"):
        ask("explode", progress())
    with pytest.raises(Refusal, match="'huge' is not one of low"):
        ask("reprioritize", progress(), priority="huge")


def test_a_batch_goes_out_when_it_may() -> None:
    it = progress(not_before=50.0, run_between="00:01-00:02")
    assert [it.dispatchable(now) for now in (49.0, 50.0, 60.0, 119.0, 120.0)] == [False, False, True, True, False]
    assert [it.opens(now) for now in (0.0, 70.0, 120.0)] == [60.0, 70.0, 86460.0]
    it.paused = True
    assert not it.dispatchable(60.0)
    assert it.sendable


def test_a_chunk_may_be_dropped_when_nobody_wants_any_of_it() -> None:
    early, late, never = progress(expires_at=100.0), progress(expires_at=200.0), progress()
    assert _not_after([early, late]) == 200.0 + CLOCK_SLACK_S
    assert _not_after([early, never]) == 0.0
    late.clock_doubted = True
    assert _not_after([early, late]) == 0.0


@pytest.mark.parametrize(
    ("cut", "missed", "status"),
    [
        (None, 0, "completed"),
        (Cancelled("batch_x", 0, 1.0), 3, "cancelled"),
        (Expired("batch_x", 0, 1.0), 3, "expired"),
        # All was answered before it took hold.
        (Cancelled("batch_x", 0, 1.0), 0, "completed"),
    ],
)
def test_a_cut_that_left_nothing_out_was_none(cut: Cancelled | Expired | None, missed: int, status: str) -> None:
    it = progress()
    it.cut = cut
    assert it.outcome(missed) == status
