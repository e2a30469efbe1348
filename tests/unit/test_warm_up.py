"""Warm-up prompts: what models.yaml may say, and what becomes of it when an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import BatchmillError, UsageError
from common.registry import ModelVersion
from common.registry import load as load_registry
from common.settings import Settings
from workers.engine import echo, refusal, warm_up
from workers.engine.base import Answer, EngineDead
from workers.engine_thread import EngineThread
from workers.preflight.checks import check_warm_up

MESSAGES = [{"role": "system", "content": "Be brief."}]


def prompts(*given: Any, where: str = "models.yaml") -> list[warm_up.Prompt]:
    return warm_up.prompts("m@1", ModelVersion(source="/m", warm_up=list(given)), where)


def test_whatever_a_request_may_be() -> None:
    tools = {"messages": MESSAGES, "tools": [{"type": "function"}], "max_completion_tokens": 900}
    asked = prompts("a text", MESSAGES, tools, {"url": "/v1/rerank", "body": {"query": "q", "documents": ["d"]}})
    assert [[ask.url for ask in prompt] for prompt in asked] == [
        ["/v1/completions", "/v1/embeddings"],
        ["/v1/chat/completions"],
        ["/v1/chat/completions"],
        ["/v1/rerank"],
    ]
    bodies = [msgspec.json.decode(prompt[0].body) for prompt in asked]
    assert [body.get("max_tokens") for body in bodies] == [1, 1, 1, None]
    assert bodies[2]["tools"] == tools["tools"]
    assert "max_completion_tokens" not in bodies[2]


def test_a_file_lies_beside_models_yaml(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"one"\n\n[{"role":"user","content":"two"}]\n')
    models = tmp_path / "models.yaml"
    models.write_text("models: {m@1: {source: /m, warm_up: [{file: prompts.jsonl}, three]}}")
    registry = load_registry(models)
    found = warm_up.prompts("m@1", registry.get("m@1"), registry.where)
    assert [prompt[0].url for prompt in found] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    assert check_warm_up("m@1", registry.get("m@1"), registry.where).text == "3 prompts"


def test_what_contradicts_one_token_is_left_out() -> None:
    more = {"min_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "n": 3, "temperature": 0}
    for url, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        ((ask,),) = prompts({"url": url, "body": body | more | {"best_of": 3}})
        assert msgspec.json.decode(ask.body) == body | {"temperature": 0, "max_tokens": 1}
    ((ask,),) = prompts({"url": "/v1/embeddings", "body": {"input": "x", "dimensions": 8}})
    assert msgspec.json.decode(ask.body) == {"input": "x", "dimensions": 8}


@pytest.mark.parametrize(
    ("body", "message", "shown"),
    [
        (
            {"min_tokens": 5},
            "min_tokens must be at most max_tokens=1, got 5.",
            "min_tokens must be at most max_tokens=1, got 5.",
        ),
        ({"prompt": "Tell of Alice"}, "bad value 'Tell of Alice' in the prompt", "bad value … of … in the prompt"),
        ({"prompt": [40123, 7]}, "token 40123 is unknown", "token … is unknown"),
        ({"prompt": "caf\u00e9"}, "bad 'caf\\xe9' or caf\u00e9", "bad … or …"),
        (
            {"prompt": "Alice"},
            "[{'type': 'value_error', 'msg': 'Value error, no `Alice` when streaming.', 'input': {'prompt': 'Alice'}}]",
            "Value error, no … when streaming.",
        ),
        ({"prompt": "x"}, "1 validation error [type=x, input_value={'prompt': 'x'}]", ""),
        ({"prompt": "x"}, "y" * 1000, "y" * 199 + "…"),
    ],
)
def test_a_reason_has_no_word_of_the_prompt(body: Any, message: str, shown: str) -> None:
    assert refusal.reason(msgspec.json.encode(body), msgspec.json.encode({"error": {"message": message}})) == shown
    assert refusal.reason(msgspec.json.encode(body), b"no JSON") == ""


def test_a_reason_names_the_field() -> None:
    error = {"message": "[{'msg': 'Input should be a number', 'input': 'hot'}]", "param": "body.temperature"}
    said = refusal.reason(b'{"temperature":"hot"}', msgspec.json.encode({"error": error}))
    assert said == "temperature: Input should be a number"


@pytest.mark.parametrize(
    "bad",
    [
        *("", [], {}, {"role": "user"}, {"url": "/admin", "body": {}}, {"url": ["a"], "body": {"prompt": "x"}}),
        *({"url": "/v1/completions", "body": ["x"]}, {"prompt": {None: "x"}}, {"messages": [{(1, 2): 3}]}),
        *({"file": "none.jsonl"}, {"file": ["a"]}, {"file": "."}, {"file": "a\0b"}, {"file": "~nobody-here/a"}),
    ],
)
def test_what_is_no_prompt_is_told_with_its_place(bad: Any, tmp_path: Path) -> None:
    where = str(tmp_path / "models.yaml")
    with pytest.raises(UsageError, match=r"models\.m@1\.warm_up, entry 2") as told:
        prompts("fine", bad, where=where)
    assert "\n" not in str(told.value)
    found = check_warm_up("m@1", ModelVersion(source="/m", warm_up=["fine", bad]), where)
    assert (found.level, found.text) == ("problem", str(told.value))


def test_a_line_that_is_no_json_is_told_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "p").write_text('"fine"\nnot\n')
    with pytest.raises(UsageError, match="line 2"):
        prompts({"file": "p"}, where=str(tmp_path / "models.yaml"))


class Watched(echo.EchoEngine):
    """Notes what it was asked; refuses what says BAD, dies of what says DIE."""

    def __init__(self) -> None:
        super().__init__("m@1", ModelVersion(source="none", engine={"max_num_seqs": 2}), Settings(), {})
        self.asked: list[tuple[str, bytes]] = []
        self.stopped = False

    async def infer(self, url: str, body: bytes) -> Answer:
        self.asked.append((url, body))
        if b"DIE" in body:
            raise EngineDead("it ended")
        if b"BAD" in body or (b"POOL" in body and url != "/v1/embeddings"):
            return Answer(400, b'{"error":{"message":"the prompt BAD is not to be seen"}}')
        return await super().infer(url, body)

    async def stop(self) -> None:
        self.stopped = True


def start(*given: Any) -> tuple[Watched, EngineThread]:
    engine = Watched()
    asked = prompts(*given)
    thread = EngineThread(lambda: engine, lambda _: None, lambda made: warm_up.run(made, "m@1", asked, 5.0))
    thread.start()
    return engine, thread


def test_all_are_asked_before_the_engine_is_ready_and_a_failure_is_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine, thread = start("one", MESSAGES, "BAD", "POOL")
    assert thread.ready
    assert sorted(url for url, _ in engine.asked) == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/embeddings",
    ]
    assert thread.stop(5)
    told = "".join(capfd.readouterr())
    assert told.count("a warm-up prompt got no answer") == 1
    assert "status 400 on /v1/completions: the prompt … is not to be seen" in told
    assert "BAD" not in told


@pytest.mark.parametrize(("given", "kind"), [(["BAD", "BAD"], UsageError), (["one", "DIE"], BatchmillError)])
def test_a_model_that_answers_none_does_not_start(given: list[str], kind: type[Exception]) -> None:
    engine = Watched()
    asked = prompts(*given)
    thread = EngineThread(lambda: engine, lambda _: None, lambda made: warm_up.run(made, "m@1", asked, 5.0))
    with pytest.raises(kind) as told:
        thread.start()
    assert not thread.ready
    assert engine.stopped, "nobody else would end it"
    assert "BAD" not in str(told.value)
    assert thread.stop(5)
