"""Single flight: one computation for equal requests, and never anybody's failure but one's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.cache.single_flight import SingleFlight

KEY = b"k"


def flight(*members: str) -> SingleFlight[str]:
    made: SingleFlight[str] = SingleFlight()
    assert [made.join(KEY, member) for member in members] == [True] + [False] * (len(members) - 1)
    return made


def test_the_first_leads_and_the_others_wait() -> None:
    made = flight("a", "b", "c")
    assert (len(made), made.waiting) == (1, 2)
    assert made.end("a") == ["b", "c"]
    assert (len(made), made.waiting) == (0, 0)
    assert made.join(KEY, "b")


def test_other_requests_are_other_flights() -> None:
    made = flight("a")
    assert made.join(b"other", "b")
    assert (len(made), made.waiting) == (2, 0)


def test_a_leader_that_leaves_hands_over_to_the_longest_waiting() -> None:
    made = flight("a", "b", "c")
    assert made.leave("a") == "b"
    with pytest.raises(ValueError, match="does not lead"):
        made.end("c")
    assert made.end("b") == ["c"]


def test_the_last_one_to_leave_ends_the_flight() -> None:
    made = flight("a", "b")
    assert made.leave("b") is None
    assert made.leave("a") is None
    assert len(made) == 0
    assert made.leave("a") is None
    assert made.join(KEY, "a")


def test_who_is_in_no_flight_ends_none() -> None:
    assert flight("a").end("b") == []


def test_a_member_is_in_one_flight_at_a_time() -> None:
    made = flight("a")
    with pytest.raises(ValueError, match="already"):
        made.join(b"other", "a")


_STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "end"]), st.integers(0, 5), st.integers(0, 1)), max_size=60
)


@given(_STEPS)
def test_everybody_has_one_outcome_and_a_key_one_computation(steps: list[tuple[str, int, int]]) -> None:
    """Against a model: who is in, who runs, and that nobody is forgotten or answered twice."""
    made: SingleFlight[int] = SingleFlight()
    inside: dict[int, bytes] = {}
    leads: dict[bytes, int] = {}
    for step, member, number in steps:
        key = b"%d" % number
        if step == "join" and member not in inside:
            assert made.join(key, member) is (key not in leads)
            leads.setdefault(key, member)
            inside[member] = key
        elif step == "leave":
            of = inside.pop(member, None)
            others = {m for m, k in inside.items() if k == of}
            successor = made.leave(member)
            if of is None or leads[of] != member:
                assert successor is None
            elif others:
                assert successor in others
                leads[of] = successor
            else:
                assert successor is None
                del leads[of]
        elif step == "end" and key in leads:
            leader = leads.pop(key)
            waited = made.end(leader)
            assert len(waited) == len(set(waited))
            assert {leader, *waited} == {m for m, k in inside.items() if k == key}
            inside = {m: k for m, k in inside.items() if k != key}
        assert len(made) == len(leads) == len(set(inside.values()))
        assert made.waiting == len(inside) - len(leads)
