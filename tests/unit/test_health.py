"""When a worker holds itself to be sick, and when it was the requests."""

from __future__ import annotations

from common.live import WorkerFacts
from workers import health
from workers.health import Health, Verdict


def facts(node: str, state: str = "ready", tried: int = 100, failing: float = 0.0, model: str = "m@1") -> WorkerFacts:
    return WorkerFacts(
        node=node, model=model, host="h", pid=1, device="", engine="echo", state=state, max_num_seqs=8,
        chunks_in_flight=3, tried=tried, failing=failing,
    )  # fmt: skip


ME = facts("me")
WELL = facts("well")


def failing(good: int = 10, bad: int = 90) -> Health:
    found = Health(64, 0.5)
    found.note(good, bad)
    return found


def test_it_takes_enough_failures_among_the_last_requests() -> None:
    found = Health(64, 0.5)
    found.note(0, 63)
    assert not found.suspicious
    found.note(0, 1)
    assert found.suspicious
    for _ in range(8):
        found.note(8, 0)
    assert (found.tried, found.failing, found.suspicious) == (64, 0.0, False)
    found.note(0, 31)
    assert not found.suspicious
    assert not Health(64, 0).suspicious
    never = Health(64, 0)
    never.note(0, 1000)
    assert not never.suspicious


def test_nobody_is_sick_alone_or_among_others_that_fail_or_have_not_tried() -> None:
    assert failing().judge(ME, [ME], 0.0) is None
    for other in (
        facts("b", failing=0.4),
        facts("b", tried=10),
        facts("b", state="draining"),
        facts("b", state="sick"),
        facts("b", model="other@1"),
    ):
        assert failing().judge(ME, [ME, other], 0.0) is None
    assert Health(64, 0.5).judge(ME, [ME, WELL], 0.0) is None


def test_a_sick_worker_stops_and_ends_while_others_stay_well() -> None:
    found = failing()
    assert found.judge(ME, [ME, WELL], 10.0) is Verdict.STOP
    sick = facts("me", state="sick")
    assert found.judge(sick, [sick, WELL], 10.0 + health.CONFIRM_S - 1) is None
    assert found.judge(sick, [sick, WELL], 10.0 + health.CONFIRM_S) is Verdict.END


def test_it_goes_on_when_others_fail_at_the_same_or_are_gone_and_is_left_alone_for_a_while() -> None:
    found = failing()
    assert found.judge(ME, [WELL], 10.0) is Verdict.STOP
    sick = facts("me", state="sick")
    assert found.judge(sick, [facts("well", failing=0.9)], 12.0) is Verdict.RESUME
    found.note(0, 100)
    assert found.suspicious
    assert found.judge(ME, [WELL], 13.0) is None
    assert found.judge(ME, [WELL], 12.0 + health.IMMUNE_S) is Verdict.STOP
    assert found.judge(sick, [], 13.0 + health.IMMUNE_S) is Verdict.RESUME
