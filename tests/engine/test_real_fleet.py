"""A whole fleet with a real engine, which loses that engine in the middle of a batch."""

from __future__ import annotations

import json
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from common.registry import ModelVersion
from common.store import open_store
from producers.batch_view import look
from tests.engine.conftest import ANSWER_TOKENS, PROMPTS
from tests.engine.fleet import engine_process, producers, real_env
from tests.support.brokers import RedisBroker
from tests.support.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STORY_TOKENS = 150
#: Seconds that a part of the batch may take; the engine is ended after them in any case, in the middle of its work.
PART_S = 12


def test_answers_are_those_of_vllm_though_the_engine_ends_in_mid_batch(
    redis_broker: RedisBroker,
    processes: Processes,
    tmp_path: Path,
    demo_name: str,
    demo_entry: ModelVersion,
    direct_answers: dict[str, str],
) -> None:
    """Half of the requests are of /v1/responses, where an answer that was cut short calls itself completed."""
    warm_up = ["Story", [{"role": "user", "content": "Hello"}]]
    env = real_env(tmp_path, redis_broker, demo_name, demo_entry, warm_up=warm_up)
    lines: list[dict[str, Any]] = []
    for n, prompt in enumerate(PROMPTS):
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": ANSWER_TOKENS, "temperature": 0}
        lines.append({"custom_id": f"chat-{n}", "body": chat})
        response = {"input": prompt, "max_output_tokens": ANSWER_TOKENS, "temperature": 0}
        lines.append({"custom_id": f"resp-{n}", "url": "/v1/responses", "body": response})
    # Long answers go first, four at a time: half a minute's work and more on a machine of two cores, of which the first
    # part is done within seconds.
    for n in range(24):
        story = {"prompt": f"Story {n}:", "max_tokens": STORY_TOKENS, "temperature": 0, "ignore_eos": True}
        lines.append({"custom_id": f"story-{n}", "body": story})
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    processes.coordinator(env)
    worker = processes.worker(env, demo_name)
    batch = producers(env, "submit", str(file), "--detach")["id"]
    worker.wait_line("engine is ready", 200)
    worker.wait_line(r"warmed up.*failed=0", 60)
    ended = engine_process(worker)

    store = open_store(env["BATCHMILL_STORE_URL"])
    history = []
    began = time.monotonic()
    while time.monotonic() - began < PART_S:
        # Looked at from here: a command for each look would take from the engine the cores that it works with.
        counts = look(store, batch).request_counts
        if counts.completed:
            break
        history.append(f"{time.monotonic() - began:.1f}: {counts.completed}")
        time.sleep(0.1)
    else:
        warnings.warn(f"nothing seen done in {PART_S} s, looks: {history[::20]}", stacklevel=1)
    assert look(store, batch).answered < len(lines), "the batch was over before its engine could be ended"
    seen = len(worker.lines)
    ended.send_signal(signal.SIGTERM)
    worker.wait_line("exit 70", 60, after=seen)
    worker.wait_line("engine is ready", 200, after=seen)
    assert engine_process(worker).pid != ended.pid
    done = producers(env, "watch", batch, "--output", str(tmp_path / "out"))
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", len(lines))

    found = {}
    for line in (tmp_path / "out" / "output.jsonl").read_text().splitlines():
        result = json.loads(line)
        answer = result["response"]["body"]
        if result["custom_id"].startswith("story-"):
            assert answer["usage"]["completion_tokens"] == STORY_TOKENS
            continue
        chat = result["custom_id"].startswith("chat-")
        found[result["custom_id"]] = (
            answer["choices"][0]["message"]["content"] if chat else answer["output"][-1]["content"][0]["text"]
        )
    wanted = {f"{kind}-{n}": direct_answers[p] for n, p in enumerate(PROMPTS) for kind in ("chat", "resp")}
    assert found == wanted
    assert list(found) == [line["custom_id"] for line in lines if not line["custom_id"].startswith("story-")]
