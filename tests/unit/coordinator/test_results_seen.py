"""When results count as taken in."""

from __future__ import annotations

from producers.coordinator.results_seen import ResultsSeen


def seen(arrived: int = 0, taken: int = 0, slack: int = 0) -> ResultsSeen:
    found = ResultsSeen(slack)
    for _ in range(arrived):
        found.arrived()
    for _ in range(taken):
        found.took()
    return found


def test_an_empty_queue_with_nothing_on_its_way_is_seen_at_once() -> None:
    found = seen(3, 3)
    found.asked(10.0, 0)
    assert found.at == 10.0


def test_a_busy_queue_is_seen_once_as_many_messages_were_taken_in_as_stood_in_it() -> None:
    found = seen(3, 1)
    found.asked(10.0, 4)
    for _ in range(5):
        found.arrived()
        found.took()
        found.asked(11.0, 4)  # One question at a time.
        assert found.at == 0.0
    found.took()
    assert found.at == 10.0
    found.asked(12.0, 1)
    found.idle(13.0)
    assert found.at == 13.0


def test_what_may_be_on_the_wire_counts_while_messages_wait() -> None:
    found = seen(slack=2)
    found.asked(10.0, 1)
    for taken in range(3):
        assert found.at == 0.0, taken
        found.arrived()
        found.took()
    assert found.at == 10.0


def test_a_new_connection_brings_what_was_not_acknowledged_again() -> None:
    found = seen(5, 2)
    found.asked(10.0, 0)
    found.again()
    found.asked(20.0, 0)
    assert found.at == 20.0
