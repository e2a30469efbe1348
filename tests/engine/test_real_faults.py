"""The faults of the suite that are an engine's own (tests/fault, cases 6, 8, 9 and 22), on a real one.

Case 7, an engine told to end, is `test_answers_are_those_of_vllm_though_the_engine_ends_in_mid_batch`; that a killed
worker leaves no process of the engine is also in `test_worker_killed_leaves_no_process`.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from common.registry import ModelVersion
from tests.conftest import make_fleet_env
from tests.engine.conftest import ANSWER_TOKENS, PROMPTS
from tests.engine.test_real_fleet import engine_process, producers
from tests.fault.fleet import injected
from tests.support import oracle
from tests.support.brokers import RedisBroker
from tests.support.ports import wait_until
from tests.support.processes import Processes

#: Every crash is a start of the engine, half a minute on two cores.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_real_engine_killed_poisoned_hung_and_orphaned(
    redis_broker: RedisBroker,
    processes: Processes,
    tmp_path: Path,
    demo_name: str,
    demo_entry: ModelVersion,
    direct_answers: dict[str, str],
) -> None:
    env = make_fleet_env(tmp_path, redis_broker.url, redis_broker.state_url)
    entry = {"source": demo_entry.source, "engine": demo_entry.engine | {"max_num_seqs": 4}}
    models = {demo_name: entry | {"hardware": {"gpus": 0, "cpu_kv_gb": 0.25}}}
    Path(env["BATCHMILL_MODELS"]).write_text(json.dumps({"default": demo_name, "models": models}))
    env |= {"BATCHMILL_INFERENCE_ENGINE": "vllm", "BATCHMILL_SCHEDULER_RETRY_TIMES": "1"}
    if folder := os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR"):
        env["BATCHMILL_INFERENCE_MODELS_DIR"] = folder
    else:
        del env["BATCHMILL_HOME"]
    ids, lines = [], []
    for copy in range(3):
        for n, prompt in enumerate(PROMPTS):
            ids.append(f"{copy}-{n}")
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": ANSWER_TOKENS, "temperature": 0}
            lines.append({"custom_id": ids[-1], "body": chat})
    for name in ("POISON", "HANG"):
        ids.insert(len(ids) // 2, name)
        chat = {"messages": [{"role": "user", "content": name}], "max_tokens": 8, "temperature": 0}
        lines.insert(len(lines) // 2, {"custom_id": name, "body": chat})
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    processes.coordinator(env)
    faulty = env | injected("deadly_requests", tmp_path)
    first = processes.worker(faulty, demo_name)
    batch = producers(env, "submit", str(file), "--detach", "--timeout", "20")["id"]
    first.wait_line("engine is ready", 200)

    def some_done(more_than: int) -> bool:
        return int(producers(env, "status", batch)["request_counts"]["completed"]) > more_than

    wait_until(lambda: some_done(0), 200, "some are answered", 0.5)
    # 6: the engine's core is killed.
    seen = len(first.lines)
    engine_process(first).send_signal(signal.SIGKILL)
    first.wait_line("exit 70", 60, after=seen)
    first.wait_line("engine is ready", 200, after=seen)
    # 22: the parent is killed; nothing of its engine is left.
    family = first.children()
    assert any(p.name().startswith("VLLM") for p in family)
    first.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    second = processes.worker(faulty, demo_name)
    out = tmp_path / "out"
    wait_until(lambda: producers(env, "status", batch)["status"] == "completed", 600, "the batch ends", 1)
    producers(env, "results", batch, "--output", str(out), status=1)
    # 8 and 9: each costs its own result, and nobody else's.
    checked = oracle.check(out, batch, ids, failed=["HANG", "POISON"])
    assert (checked.code("POISON"), checked.code("HANG")) == ("engine_crash", "timeout")
    assert second.text.count("exit 70") <= 3
    for copy in range(3):
        for n, prompt in enumerate(PROMPTS):
            assert checked.content(f"{copy}-{n}") == direct_answers[prompt], prompt
