"""Which publishes the broker has still to confirm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.confirms import Confirms, Sent


def sent(number: int) -> Confirms:
    confirms = Confirms()
    for i in range(1, number + 1):
        confirms.sent(f"q{i % 2}", f"k{i}", float(i))
    return confirms


def keys(found: list[Sent]) -> list[str]:
    return [one.key for one in found]


def test_one_answer_may_settle_several() -> None:
    confirms = sent(5)
    confirms.ack(2, multiple=False)
    confirms.ack(3, multiple=True)
    assert keys(confirms.confirmed) == ["k2", "k1", "k3"]
    assert [one.key for one in confirms.waiting] == ["k4", "k5"]
    oldest = confirms.oldest
    assert oldest is not None
    assert (oldest.queue, oldest.at) == ("q0", 4.0)
    confirms.nack(0, multiple=True)  # tag 0: all there are
    assert keys(confirms.refused) == ["k4", "k5"]
    assert (len(confirms), confirms.oldest) == (0, None)


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=30))
def test_each_publish_is_settled_once_whatever_the_broker_says(answers: list[tuple[int, bool, bool]]) -> None:
    confirms = sent(10)
    for tag, multiple, ack in answers:
        (confirms.ack if ack else confirms.nack)(tag, multiple)
    settled = keys(confirms.confirmed) + keys(confirms.refused)
    assert sorted(settled + keys(confirms.waiting)) == sorted(f"k{i}" for i in range(1, 11))
    assert len(confirms) == 10 - len(settled)
