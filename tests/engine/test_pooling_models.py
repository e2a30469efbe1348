"""Embedding and ranking models on the real engine."""

from __future__ import annotations

import json
import signal
import time

import pytest

from common.messages import Kind
from common.urls import URL_CODE
from tests.engine.bodies import GENERATE, body
from tests.engine.conftest import Running
from tests.support.ports import wait_until
from workers.engine.base import Answer, EngineDead
from workers.outcome import judge

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


def kind(url: str, answer: Answer) -> Kind:
    return judge(URL_CODE[url], answer.status, answer.body).kind


def check_refused(engine: Running, urls: list[str]) -> None:
    for url in urls:
        answer = engine.infer(url, body(url, "you"))
        assert (answer.status, kind(url, answer)) == (400, Kind.ERROR)
        assert f"model {engine.model} cannot serve {url}: " in json.loads(answer.body)["error"]["message"]


def test_embeddings(embedder: Running) -> None:
    url = "/v1/embeddings"
    answer = embedder.infer(url, body(url, "", input=["the one", "something else"]))
    data = json.loads(answer.body)["data"]
    assert (answer.status, [item["index"] for item in data]) == (200, [0, 1])
    assert [len(item["embedding"]) for item in data] == [64, 64]
    outcome = judge(URL_CODE[url], answer.status, answer.body)
    assert (outcome.kind, outcome.prompt_tokens > 0) == (Kind.OUTPUT, True)
    # The same text gives the same vector, base64 is JSON too, and raw bytes are refused.
    assert json.loads(embedder.infer(url, body(url, "the one")).body)["data"][0]["embedding"] == pytest.approx(
        data[0]["embedding"], abs=0.01
    )
    assert embedder.infer(url, body(url, "the one", encoding_format="base64")).status == 200
    raw = embedder.infer(url, body(url, "the one", encoding_format="bytes"))
    assert (raw.status, b"encoding_format float or base64" in raw.body) == (400, True)
    long = embedder.infer(url, body(url, "the one " * 500))
    assert (long.status, b"maximum context length" in long.body) == (400, True)


def test_embedding_model_scores_and_ranks_by_similarity(embedder: Running) -> None:
    scores = json.loads(embedder.infer("/v1/score", body("/v1/score", "the one")).body)["data"]
    assert scores[0]["score"] == pytest.approx(1.0, abs=0.01)
    assert scores[0]["score"] >= scores[1]["score"]
    ranked = json.loads(embedder.infer("/v1/rerank", body("/v1/rerank", "the one")).body)["results"]
    assert [r["document"]["text"] for r in ranked] == ["the one", "something else"]


def test_embedding_model_cannot_generate(embedder: Running) -> None:
    check_refused(embedder, list(GENERATE))


def test_cross_encoder(ranker: Running) -> None:
    score = ranker.infer("/v1/score", body("/v1/score", "the one"))
    assert (score.status, kind("/v1/score", score)) == (200, Kind.OUTPUT)
    assert all(0 <= item["score"] <= 1 for item in json.loads(score.body)["data"])
    rank = ranker.infer("/v1/rerank", body("/v1/rerank", "the one", top_n=1))
    assert (rank.status, kind("/v1/rerank", rank), len(json.loads(rank.body)["results"])) == (200, Kind.OUTPUT, 1)
    bad = ranker.infer("/v1/rerank", b'{"query":"x"}')
    assert (bad.status, kind("/v1/rerank", bad)) == (400, Kind.ERROR)
    check_refused(ranker, ["/v1/embeddings", *GENERATE])


def test_killed_engine_is_dead_at_once(embedder: Running) -> None:
    """Last, since it ends the engine."""
    engine, url = embedder.engine, "/v1/embeddings"
    many = body(url, "", input=["you that is one"] * 2000)
    future = embedder.thread.submit(engine.infer(url, many))
    wait_until(lambda: engine.stats().waiting > 0, 60, "the request runs")
    killed_at = embedder.kill(signal.SIGKILL)
    with pytest.raises(EngineDead):
        future.result(60)
    with pytest.raises(EngineDead):
        embedder.infer(url, body(url, "you"))
    with pytest.raises(EngineDead):
        embedder.thread.submit(engine.check()).result(60)
    # At once, and not when something else gives up.
    assert time.monotonic() - killed_at < 15
