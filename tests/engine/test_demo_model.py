"""The real engine with the demo model: every endpoint, what it must refuse, and what it must survive."""

from __future__ import annotations

import io
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from common.messages import Kind
from common.urls import URL_CODE
from tests.engine.bodies import GENERATE, POOLING, body
from tests.engine.conftest import ANSWER_TOKENS, ENGINE, PROMPTS, Running
from tests.support.chunks import make_chunk
from tests.support.lane_runs import LaneFleet
from tests.support.ports import wait_until
from workers.abort import Abort
from workers.engine.base import Answer, EngineDead
from workers.outcome import judge

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

CHAT, TEXT, RESPONSES, MESSAGES = GENERATE


def text_of(url: str, answer: Answer) -> str:
    found: Any = json.loads(answer.body)
    if url == CHAT:
        return str(found["choices"][0]["message"]["content"])
    if url == TEXT:
        return str(found["choices"][0]["text"])
    if url == RESPONSES:
        return str(found["output"][-1]["content"][0]["text"])
    return str(found["content"][0]["text"])


def kind(url: str, answer: Answer) -> Kind:
    return judge(URL_CODE[url], answer.status, answer.body).kind


@pytest.mark.parametrize("url", GENERATE)
def test_every_endpoint_of_a_text_model(demo: Running, url: str) -> None:
    prompt = "The capital of France is" if url == TEXT else "What is the capital of France?"
    answer = demo.infer(url, body(url, prompt))
    assert answer.status == 200, answer.body
    assert "Paris" in text_of(url, answer)
    assert b"\n" not in answer.body
    assert json.loads(answer.body)["model"] == demo.model
    outcome = judge(URL_CODE[url], answer.status, answer.body)
    assert outcome.kind is Kind.OUTPUT
    assert outcome.prompt_tokens > 0
    assert outcome.completion_tokens > 0


@pytest.mark.parametrize("model", ["smollm2-135m", "smollm2-135m@1"])
def test_model_goes_by_name_and_by_version(demo: Running, model: str) -> None:
    for url in GENERATE:
        assert demo.infer(url, body(url, "Hello", 2, model)).status == 200


def test_another_model_is_refused_in_words(demo: Running) -> None:
    for url in GENERATE:
        answer = demo.infer(url, body(url, "Hello", 2, "gpt-4"))
        assert (answer.status, kind(url, answer)) == (404, Kind.ERROR)
        assert b"gpt-4" in answer.body


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def test_structured_output(demo: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = demo.infer(CHAT, body(CHAT, "Name a city and its size as JSON.", 60, response_format=wanted))
    found = json.loads(text_of(CHAT, answer))
    assert found.keys() == {"city", "size"}
    assert len(found["city"]) <= 12
    assert found["size"] <= 99
    choice = demo.infer(CHAT, body(CHAT, "Is fire cold?", 8, structured_outputs={"choice": ["maybe so", "no"]}))
    assert text_of(CHAT, choice) in ("maybe so", "no")


def test_greedy_answers_are_those_of_vllm_asked_directly(demo: Running, direct_answers: dict[str, str]) -> None:
    asked = [(CHAT, body(CHAT, prompt, ANSWER_TOKENS)) for prompt in PROMPTS]
    assert [text_of(CHAT, answer) for answer in demo.infer_all(asked)] == list(direct_answers.values())


@pytest.mark.parametrize("url", POOLING)
def test_what_a_text_model_cannot_do_is_said(demo: Running, url: str) -> None:
    answer = demo.infer(url, body(url, "Hello"))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["type"]) == (400, 400, "unsupported")
    assert f"model {demo.model} cannot serve {url}: " in error["message"]
    assert kind(url, answer) is Kind.ERROR


@pytest.mark.parametrize("url", ["/metrics", "/v1/models", "/tokenize", "/v1/chat/completions/batch", "/v1/../metrics"])
def test_only_the_allowed_endpoints_can_be_reached(demo: Running, url: str) -> None:
    answer = demo.infer(url, b"{}")
    assert answer.status == 404
    assert "no endpoint" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("url", GENERATE)
def test_prompt_beyond_the_context_is_refused(demo: Running, url: str) -> None:
    answer = demo.infer(url, body(url, "word " * 3000))
    assert (answer.status, kind(url, answer)) == (400, Kind.ERROR)
    assert b"maximum context length is 1024 tokens" in answer.body


def test_stream_is_refused_in_words(demo: Running) -> None:
    answer = demo.infer(CHAT, body(CHAT, "Hello", 2, stream=True))
    assert answer.status == 400
    assert b"a result line holds JSON" in answer.body


#: Fields that no chat request may have.
BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"max_tokens": 10**12},
    {"n": 0},
    {"n": 10_000},
    {"top_logprobs": 100_000, "logprobs": True},
    {"stop": [""]},
    {"seed": 2**70},
    {"top_p": 7},
    {"min_tokens": 9},
    {"logit_bias": {"99999999": 5}},
    {"allowed_token_ids": [-1]},
    {"stop_token_ids": [-7]},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "%%%"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}},
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
    {"chat_template": "{{ 1/0 }}"},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"repetition_penalty": 0},
)

#: Each must cost its own result and nothing else: a 4xx, never a 5xx, never the engine.
BAD: list[tuple[str, bytes]] = [
    *((url, raw) for url in GENERATE for raw in (b"", b"{", b"[1]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000)),
    *((url, body(url, "\ud800", 2)) for url in GENERATE),
    *((CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":%s}' % n) for n in (b"NaN", b"1e999", b"-1")),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    *((CHAT, body(CHAT, "Hello", 2, **extra)) for extra in BAD_FIELDS),
    *((TEXT, body(TEXT, "", 2, prompt=prompt)) for prompt in ("", [], None, [99_999_999], [-1], "a" * 200_000)),
    (RESPONSES, body(RESPONSES, "Hello", 2, background=True)),
    (RESPONSES, body(RESPONSES, "Hello", 2, previous_response_id="resp_1")),
]


def test_bad_bodies_cost_one_result_each(demo: Running) -> None:
    good = [(CHAT, body(CHAT, f"What is {n} + 1?", 4)) for n in range(len(BAD))]
    mixed = [pair for both in zip(BAD, good, strict=True) for pair in both]
    answers = demo.infer_all(mixed)
    for (url, raw), answer in zip(BAD, answers[::2], strict=True):
        assert 400 <= answer.status < 500, (url, raw[:200], answer)
        assert kind(url, answer) is Kind.ERROR
        assert b"\n" not in answer.body
        json.loads(answer.body)
    assert [a.status for a in answers[1::2]] == [200] * len(good)


def test_no_prompt_reaches_the_log(demo: Running) -> None:
    handler = next(h for h in logging.getLogger("vllm").handlers if isinstance(h, logging.StreamHandler))
    buffer = io.StringIO()
    old = handler.setStream(buffer)
    try:
        for url, raw in [*BAD, (CHAT, body(CHAT, "Hello", 2))]:
            demo.infer(url, raw.replace(b"Hello", b"SECRETPROMPT"))
    finally:
        handler.setStream(old)
    assert "SECRETPROMPT" not in buffer.getvalue()


def test_cancelling_frees_the_engine(demo: Running) -> None:
    engine = demo.engine
    futures = [demo.thread.submit(engine.infer(url, body(url, "Count.", 900, ignore_eos=True))) for url in GENERATE]
    wait_until(lambda: engine.stats().running == len(futures), 60, "all requests run")
    assert engine.stats().kv_usage > 0
    for future in futures:
        assert future.cancel()
    wait_until(lambda: engine.stats().running == 0, 10, "the engine is free")
    assert not engine._llm.output_processor.has_unfinished_requests()
    assert demo.infer(CHAT, body(CHAT, "Hello", 2)).status == 200
    wait_until(lambda: not engine._caller._tasks, 10, "no call of the application is left")  # type: ignore[union-attr]


def test_many_at_once_fill_the_engine_and_get_their_own_answers(demo: Running) -> None:
    engine = demo.engine
    count = 3 * ENGINE["max_num_seqs"]
    # `echo` gives the prompt back, so each answer names its request.
    requests = [(TEXT, body(TEXT, f"Number {n}:", 24, echo=True, ignore_eos=True)) for n in range(count)]

    async def most() -> int:
        import asyncio

        tasks = [asyncio.create_task(engine.infer(*request)) for request in requests]
        seen = 0
        while not all(task.done() for task in tasks):
            seen = max(seen, engine.stats().running)
            await asyncio.sleep(0.01)
        for n, task in enumerate(tasks):
            assert text_of(TEXT, task.result()).startswith(f"Number {n}:")
        return seen

    assert demo.thread.submit(most()).result(240) == ENGINE["max_num_seqs"]


def test_equal_requests_are_computed_once(demo: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lane, over two chunks, the first of which is cancelled while the engine computes for both."""
    asked: list[bytes] = []
    infer = demo.engine.infer

    async def counted(url: str, raw: bytes) -> Answer:
        asked.append(raw)
        return await infer(url, raw)

    greedy = body(CHAT, "Tell me one fact about the number 7.", 150, ignore_eos=True)
    wanted = text_of(CHAT, demo.infer(CHAT, greedy))
    monkeypatch.setattr(demo.engine, "infer", counted)
    fleet = LaneFleet(demo.thread, tmp_path / "crumb", demo.model)
    sampled = body(CHAT, "Tell me one fact about the number 7.", 60, temperature=1.0, ignore_eos=True)
    first, second = fleet.together(
        make_chunk([greedy] * 3, demo.model, cache="on"),
        make_chunk([greedy] * 3 + [sampled] * 3, demo.model, cache="on"),
    )
    wait_until(lambda: demo.engine.stats().running > 0, 60, "the engine computes")
    first.work.abort(Abort.USER)
    assert first.join() == []
    assert {batch: sorted(rows) for batch, rows in fleet.inside().items()} == {second.batch: [0, 3, 4, 5]}
    assert second.shared() == [False, True, True, False, False, False]
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for _, line in second.join()]
    assert texts[:3] == [wanted] * 3
    assert len(set(texts[3:])) == 3, "each was sampled for itself"
    assert [json.loads(raw)["temperature"] for raw in asked] == [0, 1.0, 1.0, 1.0]


def test_cached_prompt_tokens_are_counted(demo: Running) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    first, second = (demo.infer(CHAT, body(CHAT, prompt, 2)) for _ in range(2))
    counts = [judge(URL_CODE[CHAT], a.status, a.body).cached_tokens for a in (first, second)]
    assert counts[0] == 0
    assert counts[1] >= 256


def test_facts(demo: Running) -> None:
    facts = demo.engine.facts()
    assert (facts.model, facts.max_num_seqs, facts.max_model_len) == (demo.model, 8, 1024)
    assert facts.engine.startswith("vllm ")
    assert int(facts.detail["kv_cache_tokens"]) > 1024
    assert str(facts.detail["digest"]).startswith("blake3:")


def test_aborted_by_a_living_engine_is_a_failed_attempt(demo: Running) -> None:
    """As a pause or a lost transfer does it: no cut answer, and the engine is not taken for dead."""
    engine, llm = demo.engine, demo.engine._llm
    futures = [demo.thread.submit(engine.infer(url, body(url, "Count.", 900, ignore_eos=True))) for url in GENERATE]
    wait_until(lambda: engine.stats().running == len(futures), 60, "all requests run")
    demo.thread.submit(llm.abort(list(llm.output_processor.request_states), internal=True)).result(60)
    for url, future in zip(GENERATE, futures, strict=True):
        answer = future.result(60)
        assert (answer.status, kind(url, answer)) == (503, Kind.RETRY)
    assert demo.infer(CHAT, body(CHAT, "Hello", 2)).status == 200


def test_told_to_end_it_gives_no_cut_answers(demo: Running) -> None:
    """Last, since it ends the engine.

    vLLM answers 200 with what it has; /v1/responses even says `completed`. None of it may come out as an answer.
    """
    engine = demo.engine
    futures = [demo.thread.submit(engine.infer(url, body(url, "Count.", 900, ignore_eos=True))) for url in GENERATE]
    wait_until(lambda: engine.stats().running == len(futures), 60, "all requests run")
    killed_at = demo.kill(signal.SIGTERM)
    for future in futures:
        with pytest.raises(EngineDead):
            future.result(60)
    # As long as the engine's process takes to end.
    assert time.monotonic() - killed_at < 55
    with pytest.raises(EngineDead):
        demo.infer(CHAT, body(CHAT, "Hello", 2))
    wait_until(lambda: demo.deaths != [], 10, "the watch of the engine's thread reports it")
