"""Bodies that are held in pieces are the same bodies, and what many begin with is in memory once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import pieces as module
from common.pieces import PIECE, Pieces, length, whole

#: Around borders of pieces, of few kinds, so that many begin alike.
bodies = st.lists(
    st.builds(
        lambda kind, size, end: kind * size + end,
        st.sampled_from([b"a", b"b", b"ab"]),
        st.integers(0, 4 * PIECE),
        st.binary(max_size=3),
    ),
    max_size=40,
)


@given(bodies, st.booleans())
def test_a_body_is_what_it_was(given: list[bytes], collide: bool) -> None:
    """Also where digests are all the same: who else's beginning it would get then is told by the bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(module, "xxh3_64_intdigest", lambda _: 7)
        pieces = Pieces()
        held = [pieces.hold(body) for body in given]
        texts = [pieces.share(body)[0] for body in given]
    assert [whole(body) for body, _ in held] == given == texts
    assert [length(body) for body, _ in held] == [len(body) for body in given]


def test_what_many_begin_with_takes_memory_once_and_what_nobody_shares_no_more_than_before() -> None:
    rng = random.Random(1)
    documents = [rng.randbytes(16_000) for _ in range(10)]
    pieces = Pieces()
    shared = sum(pieces.hold(rng.choice(documents) + rng.randbytes(200))[1] for _ in range(1000))
    assert shared < 10 * 2.5 * 16_000 + 1000 * (200 + PIECE + 9 * 32)
    alone = sum(pieces.hold(rng.randbytes(16_200))[1] for _ in range(100))
    assert alone < 100 * 16_200 * 1.01
    pieces.clear()
    assert pieces.hold(documents[0])[1] > 16_000
