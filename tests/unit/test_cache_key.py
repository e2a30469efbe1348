"""Which requests share an answer: only determined ones, and only those that cannot be told apart by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.urls import URL_CODE
from workers.cache.key import key, key_space

SPACE = key_space("m@1", {"digest": "d"})
CHAT = URL_CODE["/v1/chat/completions"]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hé"}], "temperature": 0, "max_tokens": 5}


def of(body: dict[str, Any], url: int = CHAT, space: bytes = SPACE) -> bytes | None:
    return key(space, url, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("change", "determined"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1}, False),
        ({"temperature": None}, False),
        ({"temperature": True}, False),
        ({"temperature": 0.7, "seed": 3}, True),
        ({"temperature": 0.7, "seed": None}, False),
    ],
)
def test_only_determined_requests_have_a_key(change: dict[str, Any], determined: bool) -> None:
    assert (of(BODY | change) is not None) is determined


def test_without_a_temperature_it_is_sampled() -> None:
    assert of({k: v for k, v in BODY.items() if k != "temperature"}) is None


def test_what_samples_nothing_always_has_a_key() -> None:
    assert of({"input": "x"}, URL_CODE["/v1/embeddings"]) is not None


def test_what_does_not_change_the_answer_does_not_change_the_key() -> None:
    same = [
        {**BODY, "user": "u", "metadata": {"a": "b"}, "model": "other name"},
        dict(reversed(BODY.items())),
        BODY | {"temperature": 0.0, "max_tokens": 5.0},
    ]
    assert {of(body) for body in same} == {of(BODY)}
    assert key(SPACE, CHAT, json.dumps(BODY, indent=2, ensure_ascii=False).encode()) == of(BODY)


@pytest.mark.parametrize(
    "change", [{"max_tokens": 6}, {"seed": 1}, {"messages": []}, {"stop": ["a"]}, {"response_format": {"type": "text"}}]
)
def test_what_may_change_the_answer_changes_the_key(change: dict[str, Any]) -> None:
    assert of(BODY | change) != of(BODY)


def test_another_model_another_space() -> None:
    spaces = [key_space("m@1", {"digest": "d"}), key_space("m@2", {"digest": "d"}), key_space("m@1", {"digest": "e"})]
    assert len({of(BODY, space=space) for space in spaces}) == 3
    assert of({"input": "x"}, URL_CODE["/v1/embeddings"]) != of({"input": "x"}, URL_CODE["/v1/score"])


@given(st.binary(max_size=60))
def test_rubbish_has_no_key_and_raises_nothing(body: bytes) -> None:
    assert key(SPACE, CHAT, body) is None or isinstance(json.loads(body), dict)
