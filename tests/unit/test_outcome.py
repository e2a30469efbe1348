"""What an answer means: final or not, and what it cost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Kind
from common.urls import URL_CODE, URLS
from workers.outcome import Outcome, judge


def code(url: str) -> int:
    return URL_CODE[f"/v1/{url}"]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "function_call", "content_filter", "repetition"])
@pytest.mark.parametrize("url", ["chat/completions", "completions"])
def test_normal_finishes_are_final(url: str, reason: str) -> None:
    answer = body(
        choices=[{"finish_reason": reason}],
        usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    )
    assert judge(code(url), 200, answer) == Outcome(Kind.OUTPUT, None, 7, 3, 4)


@pytest.mark.parametrize("reason", ["abort", "error", None, "something new"])
def test_other_finishes_are_not(reason: str | None) -> None:
    one = {"finish_reason": "stop"}
    answer = body(choices=[one, {"finish_reason": reason}])
    assert judge(code("chat/completions"), 200, answer).kind is Kind.RETRY


def test_a_completion_without_choices_is_not_an_answer() -> None:
    assert judge(code("chat/completions"), 200, body(choices=[])) == Outcome(Kind.RETRY, "no_choices")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"status": "completed"}, Kind.OUTPUT),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, Kind.OUTPUT),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, Kind.OUTPUT),
        ({"status": "incomplete", "incomplete_details": None}, Kind.RETRY),
        ({"status": "incomplete", "incomplete_details": {"reason": "interrupted"}}, Kind.RETRY),
        ({"status": "cancelled"}, Kind.RETRY),
        ({"status": "failed"}, Kind.RETRY),
        ({"status": "in_progress"}, Kind.RETRY),
    ],
)
def test_responses(fields: dict[str, Any], kind: Kind) -> None:
    usage = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 5}}
    outcome = judge(code("responses"), 200, body(**fields, usage=usage))
    assert outcome.kind is kind
    if kind is Kind.OUTPUT:
        assert outcome == Outcome(Kind.OUTPUT, None, 9, 2, 5)


@pytest.mark.parametrize("reason", ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "pause_turn"])
def test_messages_count_cached_tokens_as_prompt(reason: str) -> None:
    usage = {
        "input_tokens": 10,
        "output_tokens": 4,
        "cache_read_input_tokens": 6,
        "cache_creation_input_tokens": 1,
    }
    outcome = judge(code("messages"), 200, body(stop_reason=reason, usage=usage))
    assert outcome == Outcome(Kind.OUTPUT, None, 17, 4, 6)


def test_a_message_without_stop_reason_was_aborted() -> None:
    assert judge(code("messages"), 200, body(stop_reason=None, usage=None)).kind is Kind.RETRY


@pytest.mark.parametrize("url", ["embeddings", "score", "rerank"])
def test_pooling_answers_have_no_finish(url: str) -> None:
    answer = body(data=[], usage={"prompt_tokens": 8, "total_tokens": 8, "prompt_tokens_details": None})
    assert judge(code(url), 200, answer) == Outcome(Kind.OUTPUT, None, 8, 0, 0)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 422, 451])
def test_deterministic_4xx_are_final(status: int) -> None:
    assert judge(0, status, b"whatever").kind is Kind.ERROR


@pytest.mark.parametrize("status", [0, 100, 302, 408, 409, 425, 429, 499, 500, 501, 502, 503, 504, 599])
def test_the_rest_may_be_tried_again(status: int) -> None:
    assert judge(0, status, b"{}") == Outcome(Kind.RETRY, f"http_{status}")


@pytest.mark.parametrize(
    "raw", [b"", b"not json", b"[1]", b'{"choices":5}', b'{"choices":[{"finish_reason":1}]}', b"\xff"]
)
def test_a_body_that_cannot_be_read_is_not_believed(raw: bytes) -> None:
    assert judge(0, 200, raw) == Outcome(Kind.RETRY, "unreadable_answer")


@given(st.integers(0, len(URLS) - 1), st.integers(-1, 700), st.binary(max_size=200))
def test_any_answer_is_judged(url: int, status: int, raw: bytes) -> None:
    outcome = judge(url, status, raw)
    assert (outcome.kind is Kind.RETRY) == (outcome.reason is not None)


def test_the_engines_word_is_kept_short() -> None:
    outcome = judge(0, 200, body(choices=[{"finish_reason": "x" * 1000}]))
    assert outcome.reason is not None
    assert len(outcome.reason) < 50
