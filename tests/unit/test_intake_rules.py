"""What a valid request is, line by line."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.registry import ModelVersion, Registry
from common.settings import Inference, Settings
from common.urls import URL_CODE
from producers.intake.explain import MAX_CUSTOM_ID, MAX_DEPTH, Refused
from producers.intake.rules import Rules

REGISTRY = Registry(
    {
        "tiny@1": ModelVersion(source="x", engine={"max_model_len": 2048}),
        "tiny@2": ModelVersion(source="x"),
        "other@1": ModelVersion(source="x", engine={"max-model-len": 100}),
        "twin@1": ModelVersion(source="x"),
        "twin@2": ModelVersion(source="x"),
    },
    {"tiny": "1"},
    "tiny",
)


def rules(model: str | None = None, default: int | None = None, **inference: Any) -> Rules:
    return Rules(Settings(inference=Inference(**inference)), REGISTRY, model, default)


def line(body: Any, custom_id: Any = "a", **more: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "body": body, **more}).encode()


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **more}


def raw(body: str) -> bytes:
    """A line whose body is written by hand."""
    return b'{"custom_id":"a","body":' + body.encode() + b"}"


def nested(depth: int) -> str:
    """A valid body of which something is that deep, the line around it counted."""
    inner = depth - 2
    return '{"messages":[{"role":"user","content":"x"}],"extra":' + "[" * inner + "]" * inner + "}"


MESSAGES = '"messages":[{"role":"user","content":"hi"}]'

BAD: list[tuple[str, bytes, str, str]] = [
    # The line as a whole.
    ("an array", b"[1]", "", "must be an object, is an array"),
    ("null", b"null", "", "must be an object, is null"),
    ("a string", b'"x"', "", "must be an object, is a string"),
    ("a number", b"12", "", "must be an object, is an integer"),
    ("cut off", line(chat())[:-5], "", "not valid JSON: it ends in the middle"),
    ("two objects", line(chat()) + line(chat()), "", "not valid JSON: trailing characters"),
    ("old Mac line ends", line(chat()) + b"\r" + line(chat()), "", "lines must end with \\n or \\r\\n"),
    ("single quotes", b"{'custom_id':'a'}", "", "not valid JSON"),
    ("a BOM in the middle", b"\xef\xbb\xbf" + line(chat()), "", "not valid JSON"),
    ("trailing comma", raw("{" + MESSAGES + ",}"), "", "not valid JSON"),
    ("a comment", raw("{" + MESSAGES + "/**/}"), "", "not valid JSON"),
    ("a raw tab in a string", raw('{"messages":[{"role":"user","content":"a\tb"}]}'), "", "not valid JSON"),
    ("a wrong escape", raw('{"messages":[{"role":"user","content":"a\\qb"}]}'), "", "not valid JSON"),
    ("NaN", raw("{" + MESSAGES + ',"temperature":NaN}'), "", "NaN is no JSON number"),
    ("Infinity", raw("{" + MESSAGES + ',"temperature":-Infinity}'), "", "-Infinity is no JSON number"),
    (
        "a lone high surrogate",
        raw('{"messages":[{"role":"user","content":"\\ud800"}]}'),
        "",
        "half of a surrogate pair",
    ),
    ("a lone low surrogate", raw("{" + MESSAGES + ',"user":"x\\uDFFFy"}'), "", "half of a surrogate pair"),
    ("a lone surrogate as a key", raw("{" + MESSAGES + ',"\\ud83d":1}'), "", "half of a surrogate pair"),
    (
        "a lone surrogate as id",
        b'{"custom_id":"\\ud800","body":{' + MESSAGES.encode() + b"}}",
        "",
        "half of a surrogate",
    ),
    # Custom ids.
    ("no custom_id", b'{"body":{' + MESSAGES.encode() + b"}}", "custom_id", "is missing"),
    ("custom_id null", line(chat(), None), "custom_id", "must be a string, is null"),
    ("custom_id a number", line(chat(), 7), "custom_id", "must be a string, is an integer; put it in quotes"),
    ("custom_id an array", line(chat(), ["a"]), "custom_id", "must be a string, is an array"),
    ("custom_id empty", line(chat(), ""), "custom_id", "is empty"),
    ("custom_id of 10 kB", line(chat(), "x" * 10_000), "custom_id", "has 10000 bytes, at most 1024"),
    # Around the body.
    ("no body", b'{"custom_id":"a"}', "body", "is missing"),
    ("body a string", line("x"), "body", "must be an object, is a string"),
    ("body null", line(None), "body", "must be an object, is null"),
    ("body an array", line([chat()]), "body", "must be an object, is an array"),
    ("method", line(chat(), method="GET"), "method", "must be POST"),
    ("url a number", line(chat(), url=5), "url", "must be a string, is an integer"),
    ("an unknown url", line(chat(), url="/v1/nope"), "url", "'/v1/nope' is not supported; supported are /v1/chat"),
    ("a whole url", line(chat(), url="http://h/v1/chat/completions"), "url", "is not supported"),
    ("no url to be found", line({"foo": 1}), "url", "has none of messages, prompt, input"),
    ("an empty body", line({}), "url", "has none of messages, prompt, input"),
    # What no answer can come from.
    ("stream", line(chat(stream=True)), "body.stream", "must be false or left out"),
    ("stream, escaped", raw("{" + MESSAGES + ',"str\\u0065am":true}'), "body.stream", "must be false"),
    ("stream, the second", raw("{" + MESSAGES + ',"stream":false,"stream":true}'), "body.stream", "must be false"),
    ("stream as text", line(chat(stream="true")), "body.stream", "must be true or false, is a string"),
    ("stream as a number", line(chat(stream=1)), "body.stream", "must be true or false, is an integer"),
    ("background", line({"input": "x", "background": True}, url="/v1/responses"), "body.background", "must be false"),
    # Models.
    ("an unknown model", line(chat(model="gpt-9")), "body.model", "unknown model 'gpt-9'; models.yaml has: other@1"),
    ("an unknown version", line(chat(model="tiny@9")), "body.model", "unknown model 'tiny@9'"),
    ("a name with two versions", line(chat(model="twin")), "body.model", "has versions twin@1, twin@2"),
    ("model a number", line(chat(model=1)), "body.model", "must be a string, is an integer"),
    # Bounds and types.
    ("max_tokens negative", line(chat(max_tokens=-1)), "body.max_tokens", "must be at least 1"),
    ("max_tokens zero", line(chat(max_tokens=0)), "body.max_tokens", "must be at least 1"),
    ("max_tokens huge", line(chat(max_tokens=10**9)), "body.max_tokens", "more than the context of tiny@1 of 2048"),
    ("max_tokens beyond 2^64", line(chat(max_tokens=2**70)), "body.max_tokens", "must be at most"),
    (
        "max_tokens beyond doubles",
        raw("{" + MESSAGES + ',"max_tokens":1e400}'),
        "body.max_tokens",
        "number out of range",
    ),
    ("max_tokens as text", line(chat(max_tokens="5")), "body.max_tokens", "must be an integer, is a string"),
    ("max_tokens a fraction", line(chat(max_tokens=1.5)), "body.max_tokens", "must be an integer, is a number"),
    ("max_tokens true", line(chat(max_tokens=True)), "body.max_tokens", "must be an integer, is true or false"),
    ("the newer name", line(chat(max_completion_tokens=2049)), "body.max_completion_tokens", "more than the context"),
    ("n zero", line(chat(n=0)), "body.n", "must be at least 1"),
    ("n huge", line(chat(n=10**9)), "body.n", "must be at most 16384"),
    (
        "a number beyond doubles",
        raw("{" + MESSAGES + ',"temperature":1e999}'),
        "body.temperature",
        "number out of range",
    ),
    ("an integer of 5,000 digits", raw("{" + MESSAGES + ',"seed":' + "9" * 5000 + "}"), "body.seed", "out of range"),
    ("too deep", raw(nested(MAX_DEPTH + 1)), "body", "nested deeper than 200 levels"),
    ("far too deep", raw(nested(100_000)), "", "nested deeper than 200 levels"),
    ("messages empty", line({"messages": []}), "body.messages", "must not be empty"),
    ("messages a string", line({"messages": "hi"}), "body.messages", "must be an array, is a string"),
    ("messages null", line({"messages": None}), "body.messages", "must be an array, is null"),
    ("a message a string", line({"messages": ["hi"]}), "body.messages[0]", "must be an object, is a string"),
    ("no role", line({"messages": [{"content": "x"}]}), "body.messages[0].role", "is missing"),
    ("role a number", line({"messages": [{"role": "a"}, {"role": 1}]}), "body.messages[1].role", "must be a string"),
    ("prompt a number", line({"prompt": 5}), "body.prompt", "must be a string or an array, is an integer"),
    ("prompt an object", line({"prompt": {}}), "body.prompt", "must be a string or an array, is an object"),
    ("prompt null", line({"prompt": None}), "body.prompt", "is missing"),
    ("prompt empty", line({"prompt": []}), "body.prompt", "must not be empty"),
    ("prompt of fractions", line({"prompt": [1.5]}), "body.prompt[0]", "is a number"),
    ("a token below 0", line({"prompt": [1, -1]}), "body.prompt[1]", "must be at least 0"),
    ("a token of 33 bits", line({"prompt": [[1], [2**32]]}), "body.prompt[1][0]", "must be at most 2147483647"),
    ("a token of 64 bits", line({"prompt": [2**64 - 1]}), "body.prompt[0]", "must be at most 2147483647"),
    ("a token of 100 bits", line({"input": [[2**100]]}), "body.input[0][0]", "must be at most 2147483647"),
    ("prompt of nothing", line({"prompt": [None]}), "body.prompt[0]", "is null"),
    ("no prompt", line({"max_tokens": 5}, url="/v1/completions"), "body.prompt", "is missing"),
    ("input an object", line({"input": {}}), "body.input", "must be a string or an array, is an object"),
    ("input empty", line({"input": []}), "body.input", "must not be empty"),
    ("responses without input", line({}, url="/v1/responses"), "body.input", "is missing"),
    ("responses of strings", line({"input": ["a"]}, url="/v1/responses"), "body.input[0]", "must be an object"),
    ("score without texts", line({"text_1": "a"}, url="/v1/score"), "body.documents", "is missing"),
    ("rerank without documents", line({"query": "a"}, url="/v1/rerank"), "body.documents", "is missing"),
    (
        "rerank of numbers",
        line({"query": "a", "documents": [1]}, url="/v1/rerank"),
        "body.documents[0]",
        "is an integer",
    ),
    ("messages without max_tokens", line(chat(), url="/v1/messages"), "body.max_tokens", "use --max-tokens-default"),
]


@pytest.mark.parametrize(("data", "field", "reason"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_line_is_refused_with_field_and_reason(data: bytes, field: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        rules().check(data)
    assert caught.value.field == field
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 300


@pytest.mark.parametrize(
    ("data", "twice"),
    [
        (b'{"custom_id":"a","custom_id":"b","body":{"prompt":"x"}}', True),
        (b'{"custom_id":"a","body":{"prompt":"x"},"custom_id" :"a"}', True),
        (b'{"custom_id":"custom_id","body":{"prompt":"x"}}', False),
        (b'{"custom_id":"a","body":{"prompt":"x","metadata":{"custom_id":"b"}}}', False),
        (b'{"custom_id":"a","mine":{"custom_id":"b"},"body":{"prompt":"\\"custom_id\\""}}', False),
        (b'{"mine":[{"custom_id":"b","custom_id":"c"}],"custom_id":"a","body":{"prompt":"x"}}', False),
    ],
)
def test_a_line_has_one_custom_id(data: bytes, twice: bool) -> None:
    if not twice:
        assert rules().check(data) is not None
        return
    with pytest.raises(Refused, match="custom_id: stands twice in the object"):
        rules().check(data)


GOOD: list[tuple[str, bytes, str]] = [
    ("the short form, chat", line(chat()), "/v1/chat/completions"),
    ("the short form, completion", line({"prompt": "x"}), "/v1/completions"),
    ("the short form, embedding", line({"input": "x"}), "/v1/embeddings"),
    ("the long form", line(chat(model="tiny"), method="POST", url="/v1/chat/completions"), "/v1/chat/completions"),
    (
        "null where OpenAI allows it",
        line(chat(max_tokens=None, stream=None, n=None), method=None, url=None),
        "/v1/chat/completions",
    ),
    ("stream false", line(chat(stream=False)), "/v1/chat/completions"),
    ("tokens as prompt", line({"prompt": [1, 2, 3]}), "/v1/completions"),
    ("the largest token", line({"prompt": [0, 2**31 - 1]}), "/v1/completions"),
    ("several prompts", line({"prompt": ["a", "b"]}), "/v1/completions"),
    ("several token prompts", line({"prompt": [[1, 2], [3]]}), "/v1/completions"),
    ("an embedded prompt", line({"prompt_embeds": "AAAA"}, url="/v1/completions"), "/v1/completions"),
    ("a prompt scored, not continued", line({"prompt": "x", "max_tokens": 0, "echo": True}), "/v1/completions"),
    ("a response of items", line({"input": [{"role": "user", "content": "x"}]}, url="/v1/responses"), "/v1/responses"),
    ("an embedded conversation", line(chat(), url="/v1/embeddings"), "/v1/embeddings"),
    ("a score", line({"text_1": "a", "text_2": ["b", "c"]}, url="/v1/score"), "/v1/score"),
    ("a score, newer names", line({"queries": "a", "documents": ["b"]}, url="/v1/score"), "/v1/score"),
    ("a rerank", line({"query": "a", "documents": ["b", "c"]}, url="/v1/rerank"), "/v1/rerank"),
    ("Anthropic's", line(chat(max_tokens=5), url="/v1/messages"), "/v1/messages"),
    ("unknown fields", line(chat(foo={"bar": [1.5, None, True]}), priority=3), "/v1/chat/completions"),
    ("numbers beyond 2^64", line(chat(seed=2**70)), "/v1/chat/completions"),
    ("the deepest there may be", raw(nested(MAX_DEPTH)), "/v1/chat/completions"),
    (
        "many brackets, none of them deep",
        line({"messages": [{"role": "user", "content": "{[" * 500}] * 300}),
        "/v1/chat/completions",
    ),
    ("CRLF", line(chat()) + b"\r", "/v1/chat/completions"),
    ("spaces around", b" \t" + line(chat()) + b"  ", "/v1/chat/completions"),
    ("the longest id", line(chat(), "x" * MAX_CUSTOM_ID), "/v1/chat/completions"),
    ("an emoji, escaped", line(chat(user="\U0001f600")), "/v1/chat/completions"),
]


@pytest.mark.parametrize(("data", "url"), [g[1:] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_line_is_taken(data: bytes, url: str) -> None:
    checked = rules().check(data)
    assert checked is not None
    custom_id, code, body, _, cost, output = checked
    given = json.loads(data)
    assert (json.loads(custom_id), code) == (given["custom_id"], URL_CODE[url])
    assert {k: v for k, v in json.loads(body).items() if k != "model"} == {
        k: v for k, v in given["body"].items() if k != "model"
    }
    assert 0 <= output <= cost


@pytest.mark.parametrize("blank", [b"", b" ", b"\r", b"\t \r", b"\x0b\x0c"])
def test_blank_lines_are_nothing(blank: bytes) -> None:
    assert rules().check(blank) is None


def test_bytes_that_are_not_utf8_are_refused() -> None:
    for bad in (b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"caf\xe9"):
        data = line(chat(user="here")).replace(b"here", bad)
        with pytest.raises(Refused, match=r"is not UTF-8 \(byte \d+\)"):
            rules().check(data, utf8=False)
    assert rules().check(line(chat()), utf8=False) is not None


def test_line_ends_of_other_alphabets_stay_in_their_strings() -> None:
    text = "a\u2028b\u2029c\u0085d"
    data = json.dumps({"custom_id": text, "body": chat(user=text)}, ensure_ascii=False).encode()
    checked = rules().check(data)
    assert checked is not None
    assert json.loads(checked[0]) == text
    assert json.loads(checked[2])["user"] == text


def test_a_line_that_was_too_long() -> None:
    with pytest.raises(Refused, match="longer than 8388608 bytes"):
        rules().check(None)


def test_bodies_hold_no_line_ends() -> None:
    checked = rules().check(raw("{\r" + MESSAGES + '\r,"user":"a\\r\\nb"}'))
    assert checked is not None
    assert b"\r" not in checked[2]
    assert json.loads(checked[2])["user"] == "a\r\nb"


def test_the_last_of_two_equal_keys_counts() -> None:
    """As in Python's json, so intake judges what the engine will see."""
    data = b'{"custom_id":"b","body":{"max_tokens":-1,"max_tokens":3,' + MESSAGES.encode() + b"}}"
    with pytest.raises(Refused, match="must be at least 1"):  # a wrong one is wrong wherever it stands
        rules().check(data)
    checked = rules().check(data.replace(b"-1", b"9"))
    assert checked is not None
    assert checked[0] == b'"b"'
    assert json.loads(checked[2])["max_tokens"] == 3


def test_a_refused_line_keeps_its_custom_id() -> None:
    for data in (line(chat(stream=True), "keep"), line(chat(), "keep", url=5), b'{"custom_id":"keep"}'):
        with pytest.raises(Refused) as caught:
            rules().check(data)
        assert caught.value.custom_id == b'"keep"'
    for data in (line(chat(), ""), line(chat(), 5), line(chat(), "x" * 2000), b"[1]", b"{"):
        with pytest.raises(Refused) as caught:
            rules().check(data)
        assert caught.value.custom_id is None


def test_the_first_request_decides_the_model() -> None:
    by_body = rules()
    assert by_body.check(line(chat(model="other"))) is not None
    assert by_body.model == "other@1"
    assert by_body.check(line(chat())) is not None
    assert by_body.check(line(chat(model="other@1"))) is not None
    with pytest.raises(Refused, match="'tiny' is tiny@1, this batch runs on other@1"):
        by_body.check(line(chat(model="tiny")))
    by_default = rules()
    assert by_default.check(line(chat())) is not None
    assert by_default.model == "tiny@1"
    assert rules(default_model="other").decide_default() == "other@1"


def test_a_model_that_was_asked_for_binds_every_body() -> None:
    asked = rules("tiny@2")
    assert asked.check(line(chat())) is not None
    assert asked.check(line(chat(model="tiny@2"))) is not None
    for name in ("tiny", "tiny@1", "other", "gpt-9"):
        with pytest.raises(Refused) as caught:
            asked.check(line(chat(model=name)))
        assert caught.value.field == "body.model"
    with pytest.raises(UsageError, match="unknown model 'nope'"):
        rules("nope")


def test_without_any_model_the_caller_is_told() -> None:
    empty = Rules(Settings(), Registry({"a@1": ModelVersion(source="x")}, {}, None), None, None)
    with pytest.raises(UsageError, match="no model named"):
        empty.check(line(chat()))
    with pytest.raises(UsageError, match="no model named"):
        empty.decide_default()


def test_bounds_follow_the_model_and_the_settings() -> None:
    assert rules("tiny@2").check(line(chat(max_tokens=10**9))) is not None  # its context is not known here
    assert rules("tiny@1").check(line(chat(max_tokens=2048))) is not None
    with pytest.raises(Refused, match=r"inference\.max_output_tokens of 50"):
        rules("tiny@1", max_output_tokens=50).check(line(chat(max_tokens=51)))
    with pytest.raises(Refused, match="the context of tiny@2 of 512"):
        rules("tiny@2", max_seq_len=512).check(line(chat(max_tokens=513)))
    with pytest.raises(Refused, match="the context of other@1 of 100"):
        rules("other").check(line(chat(max_tokens=101)))
    with pytest.raises(UsageError, match="--max-tokens-default: 200 is more than the context of other@1"):
        rules("other", 200)


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/chat/completions", chat(), "max_tokens"),
        ("/v1/completions", {"prompt": "x"}, "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ("/v1/messages", chat(), "max_tokens"),
        ("/v1/chat/completions", chat(max_tokens=None), "max_tokens"),
    ],
)
def test_the_default_bound_is_put_in_where_none_is_given(url: str, body: dict[str, Any], field: str) -> None:
    checked = rules(default=77).check(line(body, url=url))
    assert checked is not None
    found = json.loads(checked[2])
    assert found[field] == 77
    if url == "/v1/messages":
        assert found.pop("model") == "tiny@1"  # the one endpoint that insists on it
    del found[field]
    assert found == {k: v for k, v in body.items() if v is not None}
    assert checked[4] >= 77


def test_the_default_bound_gives_way_to_a_given_one() -> None:
    for body in (chat(max_tokens=5), chat(max_completion_tokens=5)):
        checked = rules(default=77).check(line(body))
        assert checked is not None
        assert json.loads(checked[2]) == body
    embedding = rules(default=77).check(line({"input": "x"}))
    assert embedding is not None
    assert json.loads(embedding[2]) == {"input": "x"}


def test_keys_hold_what_the_engine_sees_first() -> None:
    def key(body: dict[str, Any]) -> bytes:
        checked = rules().check(line(body))
        assert checked is not None
        return checked[3]

    system = {"role": "system", "content": "s" * 50}
    one, two = (chat(messages=[system, {"role": "user", "content": c}]) for c in ("one", "two"))
    shared = json.dumps({"messages": [system]}).encode()[len('{"messages": ') : -2]
    assert key(one).startswith(b"\0" * 5 + shared)
    assert key(two).startswith(b"\0" * 5 + shared)
    # Sampling does not part them, tools do: templates put them before the messages.
    assert key({**one, "temperature": 0.5, "max_tokens": 7}) == key(one)
    assert not key({**one, "tools": [{"type": "function"}]}).startswith(b"\0" * 5 + shared)


def test_costs_count_prompt_and_answer() -> None:
    def cost(body: dict[str, Any], **more: Any) -> int:
        checked = rules().check(line(body, **more))
        assert checked is not None
        return checked[4]

    prompt = 4 * [{"role": "user", "content": "x" * 400}]
    assert cost({"messages": prompt, "max_tokens": 100, "n": 3}) == pytest.approx(300 + 440, abs=30)
    assert cost({"input": "x" * 400}) == pytest.approx(100, abs=5)
    assert cost({"prompt": "x" * 400}) == pytest.approx(116, abs=5)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["messages", "prompt", "input", "model", "stream", "max_tokens", "n", "query", "documents", "role", "tools", "x"]
)


@given(
    st.dictionaries(st.sampled_from(["custom_id", "url", "method", "body"]), values)
    | st.fixed_dictionaries(
        {"custom_id": st.text(min_size=1, max_size=5), "body": st.dictionaries(fields, values)},
        optional={"url": st.sampled_from(list(URL_CODE))},
    )
)
def test_anything_is_either_taken_as_the_engine_reads_it_or_refused(request: Any) -> None:
    data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode()
        utf8 = True
    except UnicodeDecodeError:
        utf8 = False
    try:
        checked = rules().check(data, utf8)
    except Refused:
        return
    assert checked is not None
    body = json.loads(checked[2])
    if checked[1] == URL_CODE["/v1/messages"]:
        body.pop("model")
        request["body"].pop("model", None)
    assert body == request["body"]
    assert json.loads(checked[0]) == request["custom_id"]


@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_noise_is_refused_or_blank(noise: bytes) -> None:
    try:
        assert rules().check(noise, utf8=False) is None
        assert not noise.strip()
    except Refused:
        pass


@given(st.text(alphabet='{}[]",:\\ud8eE0123456789.-+tfnaul \t', max_size=30))
def test_intake_takes_no_json_that_python_does_not(text: str) -> None:
    """Bodies go to Python engines untouched: whatever intake lets through there must parse."""
    data = b'{"custom_id":"a","body":{' + MESSAGES.encode() + b',"x":' + text.encode() + b"}}"
    try:
        checked = rules().check(data)
    except Refused:
        return
    assert checked is not None
    found = json.loads(checked[2])
    assert all(not isinstance(v, float) or math.isfinite(v) for v in found.values())
    assert msgspec.json.decode(checked[2]) == found
