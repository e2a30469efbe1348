"""The echo engine: deterministic answers that are answers, and trouble on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import UsageError
from common.messages import Kind
from common.registry import ModelVersion
from common.settings import Settings
from common.urls import URL_CODE, URLS
from workers.engine import echo
from workers.engine.base import Answer, EngineDead
from workers.engine.echo_bodies import Bodies
from workers.engine.echo_faults import Faults
from workers.outcome import judge

MODEL = "m@1"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 'hällo\u2028 "q" \\'}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 3}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/score", {"queries": "a", "documents": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50}),
]


def make(**env: str) -> echo.EchoEngine:
    entry = ModelVersion(source="none", engine={"max_num_seqs": 4, "max_model_len": 100})
    return echo.make(MODEL, entry, Settings(), {f"BATCHMILL_ECHO_{k}": v for k, v in env.items()})


@pytest.mark.parametrize(("url", "fields"), REQUESTS)
def test_answers_are_final_and_the_same_every_time(url: str, fields: dict[str, Any]) -> None:
    body = msgspec.json.encode(fields)
    first, second = Bodies(MODEL).answer(url, body), Bodies(MODEL).answer(url, body)
    assert first == second
    outcome = judge(URL_CODE[url], first.status, first.body)
    assert outcome.kind is Kind.OUTPUT
    assert outcome.prompt_tokens > 0
    assert msgspec.json.decode(first.body)["model"] == MODEL
    assert b"\n" not in first.body


def test_it_says_what_it_was_told() -> None:
    text = 'hällo\u2028 "q" \\'
    answer = Bodies(MODEL).answer(URLS[0], msgspec.json.encode({"messages": [{"role": "user", "content": text}]}))
    assert msgspec.json.decode(answer.body)["choices"][0]["message"]["content"] == f"echo: {text}"


def test_max_tokens_cut_it_short() -> None:
    request = {"messages": [{"role": "user", "content": "ü" * 400}], "max_tokens": 5}
    body = msgspec.json.decode(Bodies(MODEL).answer(URLS[0], msgspec.json.encode(request)).body)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URLS[0], b"{}"),
        (URLS[0], b"not json"),
        (URLS[0], b'{"messages":[{"role":"user","content":"a"}],"max_tokens":-1}'),
        (URLS[0], b'{"messages":[{"role":"user","content":"%s"}]}' % (b"a" * 1000)),
        (URLS[4], b'{"text_1":"a"}'),
    ],
)
def test_it_refuses_as_vllm_does(url: str, body: bytes) -> None:
    answer = Bodies(MODEL, max_model_len=100).answer(url, body)
    assert answer.status == 400
    assert msgspec.json.decode(answer.body)["error"]["code"] == 400


def test_unknown_urls_are_not_found() -> None:
    assert Bodies(MODEL).answer("/metrics", b"{}").status == 404


def test_in_bulk_and_singly_it_says_the_same() -> None:
    engine = make()
    assert isinstance(engine, echo.BulkEchoEngine)
    requests = [(url, msgspec.json.encode(fields)) for url, fields in REQUESTS]

    async def both() -> tuple[list[Answer], list[Answer]]:
        return await engine.infer_bulk(requests), [await engine.infer(url, body) for url, body in requests]

    bulk, singly = asyncio.run(both())
    assert bulk == singly


def test_only_max_num_seqs_run_at_once() -> None:
    engine = make(LATENCY_MS="50")
    assert not isinstance(engine, echo.BulkEchoEngine)

    async def run() -> tuple[int, int]:
        tasks = [asyncio.ensure_future(engine.infer(URLS[3], b'{"input":"a"}')) for _ in range(10)]
        while engine.stats().running + engine.stats().waiting < len(tasks):
            await asyncio.sleep(0)
        stats = engine.stats()
        await asyncio.gather(*tasks)
        assert engine.stats().running == 0
        return stats.running, stats.waiting

    assert asyncio.run(run()) == (4, 6)


def test_the_pace_follows_the_tokens() -> None:
    engine = make(TOKENS_PER_S="100")
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "a" * 60}]})

    async def run() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await engine.infer(URLS[0], body)
        return loop.time() - began

    # 14 tokens or so; a busy machine may take its time.
    assert 0.12 < asyncio.run(run()) < 10


def test_death_reaches_every_request() -> None:
    engine = make(FAULTS="HANG=hang,DIE=die")

    async def run() -> list[Any]:
        waiting = asyncio.ensure_future(engine.infer(URLS[3], b'{"input":"HANG"}'))
        await asyncio.sleep(0)
        found = await asyncio.gather(waiting, engine.infer(URLS[3], b'{"input":"DIE"}'), return_exceptions=True)
        with pytest.raises(EngineDead):
            await engine.check()
        return list(found)

    assert [type(f) for f in asyncio.run(run())] == [EngineDead, EngineDead]


def test_a_request_waits_for_its_file(tmp_path: Path) -> None:
    engine = make(FAULTS=f"GATE=until:{tmp_path}/open")

    async def run() -> Any:
        waiting = asyncio.ensure_future(engine.infer(URLS[3], b'{"input":"GATE"}'))
        await engine.infer(URLS[3], b'{"input":"x"}')
        assert not waiting.done()
        (tmp_path / "open").touch()
        return (await waiting).status

    assert asyncio.run(run()) == 200


def test_faults_count() -> None:
    faults = Faults("A=500*2, B=slow:1.5")
    assert [bool(faults.find(b"xAx")) for _ in range(3)] == [True, True, False]
    found = faults.find(b"B")
    assert found is not None
    assert (found.action, found.seconds) == ("slow", 1.5)
    assert faults.find(b"C") is None
    assert not Faults("")


@pytest.mark.parametrize("script", ["A", "A=nonsense", "=die", "A=slow:x", "A=500*x", "A=until"])
def test_a_script_that_cannot_be_read_is_a_usage_error(script: str) -> None:
    with pytest.raises(UsageError, match="BATCHMILL_ECHO_FAULTS"):
        Faults(script)


def test_a_knob_that_is_no_number_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="BATCHMILL_ECHO_LATENCY_MS: 'fast' is not a number"):
        make(LATENCY_MS="fast")
