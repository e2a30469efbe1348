"""Which requests share an answer: only determined ones, and only those that cannot be told apart by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.urls import URL_CODE
from workers.cache.key import KEY_BYTES, Space, tag

SPACE = Space("m@1", "f")
CHAT = URL_CODE["/v1/chat/completions"]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hé"}], "temperature": 0, "max_tokens": 5}


def of(body: dict[str, Any], url: int = CHAT, space: Space = SPACE, tenant: str = "t") -> bytes | None:
    return space.key(tenant, url, json.dumps(body).encode())


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
        ({"temperature": 0.7, "seed": -1}, False),
        ({"temperature": 0.7, "seed": -1.0}, False),
        ({"temperature": 0.7, "seed": True}, False),
        ({"temperature": 0.7, "seed": "7"}, False),
        ({"temperature": 0, "seed": -1}, True),
        ({"temperature": -0.0}, True),
        ({"temperature": 1e-7}, False),
        ({"temperature": "0"}, False),
        ({"temperature": False}, False),
        # What is asked for beside the text has one answer with it.
        ({"logprobs": True, "top_logprobs": 5}, True),
        ({"temperature": 1, "n": 3, "seed": 1}, True),
        ({"temperature": 1, "n": 3}, False),
    ],
)
def test_only_determined_requests_have_a_key(change: dict[str, Any], determined: bool) -> None:
    assert (of(BODY | change) is not None) is determined


def test_without_a_temperature_it_is_sampled() -> None:
    assert of({k: v for k, v in BODY.items() if k != "temperature"}) is None


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_what_samples_nothing_always_has_a_key(url: str) -> None:
    assert of({"input": "x"}, URL_CODE[url]) is not None


def test_what_does_not_change_the_answer_does_not_change_the_key() -> None:
    same = [
        {**BODY, "user": "u", "metadata": {"a": "b"}, "model": "other name"},
        dict(reversed(BODY.items())),
        BODY | {"temperature": 0.0, "max_tokens": 5.0},
    ]
    assert {of(body) for body in same} == {of(BODY)}
    assert SPACE.key("t", CHAT, json.dumps(BODY, indent=2, ensure_ascii=False).encode()) == of(BODY)
    assert SPACE.key("t", CHAT, json.dumps(BODY).replace(": 5", ": 5e0").encode()) == of(BODY)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 6},
        {"seed": 1},
        {"messages": []},
        {"stop": ["a"]},
        {"response_format": {"type": "text"}},
        {"n": 2},
        {"logprobs": True},
        {"top_p": 0.5},
        {"cache_salt": "x"},
        {"chat_template": "x"},
        {"field_of_tomorrow": None},
    ],
)
def test_what_may_change_the_answer_changes_the_key(change: dict[str, Any]) -> None:
    assert of(BODY | change) != of(BODY)


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("user", ["u", None], [5, ["u"], True]),
        ("metadata", [{}, {"a": "b"}, None], ["a", []]),
        ("request_id", ["r"], [5, None]),
        ("model", ["x"], [1, None]),
        ("stream", [False, None], ["no", 0]),
        ("stream_options", [None], [{}, {"include_usage": True}, "x"]),
        ("store", [True, None], ["x"]),
        ("custom_id", ["x", None], [1]),
        ("safety_identifier", ["x", None], [{}]),
        ("service_tier", ["auto", None], [1]),
        ("prompt_cache_key", ["x", None], [{}]),
        ("priority", [], [0, 5, "x"]),
    ],
)
def test_a_field_is_left_out_only_with_a_value_that_no_engine_refuses(
    field: str, taken: list[Any], refused: list[Any]
) -> None:
    """Or a request that an engine refuses would get the answer of one that it does not, or the other way round."""
    assert {of(BODY | {field: value}) for value in taken} <= {of(BODY)}
    assert len({of(BODY), *(of(BODY | {field: value}) for value in refused)}) == 1 + len(refused)


def test_inside_a_field_all_counts_as_it_is_written() -> None:
    """A chat template prints it, a grammar is made of it in its order."""
    schemas = [b'{"a": 1, "b": 1}', b'{"b": 1, "a": 1}', b'{"a": 1.0, "b": 1}']
    bodies = [b'{"temperature": 0, "tools": [%b]}' % schema for schema in schemas]
    assert len({SPACE.key("t", CHAT, body) for body in bodies}) == 3


def test_a_message_is_the_same_in_whatever_order_it_was_written() -> None:
    orders = [b'{"role": "user", "content": "x"}', b'{"content": "x", "role": "user"}']
    bodies = [b'{"temperature": 0, "messages": [%b]}' % message for message in orders]
    assert len({SPACE.key("t", CHAT, body) for body in bodies}) == 1
    assert SPACE.key("t", CHAT, b'{"temperature": 0, "messages": ["x", {}, null]}') is not None


def test_another_model_another_space() -> None:
    spaces = [Space("m@1", "f"), Space("m@2", "f"), Space("m@1", "g")]
    assert len({of(BODY, space=space) for space in spaces}) == 3
    assert of({"input": "x"}, URL_CODE["/v1/embeddings"]) != of({"input": "x"}, URL_CODE["/v1/score"])


def test_tenants_share_nothing() -> None:
    assert of(BODY, tenant="a") != of(BODY, tenant="b")


def test_keys_of_a_model_version_are_found_by_their_beginning() -> None:
    found = of(BODY)
    assert found is not None
    assert len(found) == KEY_BYTES
    assert found.startswith(tag("m@1"))


def test_a_model_may_keep_sampled_answers() -> None:
    warm = BODY | {"temperature": 1}
    assert of(warm) is None
    assert of(warm, space=Space("m@1", "f", everything=True)) is not None


def test_a_seed_counts_only_where_the_engine_takes_one() -> None:
    seeded = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "seed": 1}
    assert of(seeded) is not None
    assert of(seeded, URL_CODE["/v1/messages"]) is None


@pytest.mark.parametrize("field", ["previous_response_id", "previous_input_messages", "conversation"])
def test_an_answer_that_depends_on_another_one_has_no_key(field: str) -> None:
    responses = URL_CODE["/v1/responses"]
    asked = {"input": "x", "temperature": 0}
    assert of(asked | {field: None}, responses) is not None
    assert of(asked | {field: "resp_1"}, responses) is None


def test_what_a_response_repeats_of_its_request_counts() -> None:
    asked = {"input": "x", "temperature": 0}
    responses = URL_CODE["/v1/responses"]
    assert of(asked | {"metadata": {"a": "1"}}, responses) != of(asked, responses)
    assert of(asked | {"model": "alias"}, responses) == of(asked, responses)


@pytest.mark.parametrize("text", ["1e300", "-0.0", "123456789012345678901234567890", "0.1"])
def test_any_number_will_do(text: str) -> None:
    assert SPACE.key("t", CHAT, b'{"temperature": 0, "x": [%b, {"y": %b}]}' % (text.encode(), text.encode()))


@given(st.binary(max_size=60))
def test_rubbish_has_no_key_and_raises_nothing(body: bytes) -> None:
    assert SPACE.key("t", CHAT, body) is None or isinstance(json.loads(body), dict)
