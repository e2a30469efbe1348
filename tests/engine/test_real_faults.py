"""The faults of the suite that are an engine's own (tests/fault, cases 6, 8, 9 and 22), on a real one.

Case 7, an engine told to end, is `test_answers_are_those_of_vllm_though_the_engine_ends_in_mid_batch`; that a killed
worker leaves no process of the engine is also in `test_worker_killed_leaves_no_process`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from common.registry import ModelVersion
from tests.engine.conftest import ANSWER_TOKENS, PROMPTS
from tests.engine.fleet import engine_process, producers, real_env
from tests.fault.fleet import injected
from tests.support import oracle
from tests.support.brokers import RedisBroker
from tests.support.ports import wait_until
from tests.support.processes import Processes

#: Every crash is a start of the engine, half a minute on two cores.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]


def submit(env: dict[str, str], file: Path, prompts: dict[str, str]) -> str:
    """A batch of greedy chats; its id."""
    lines = []
    for name, prompt in prompts.items():
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": ANSWER_TOKENS, "temperature": 0}
        lines.append(json.dumps({"custom_id": name, "body": chat}) + "\n")
    file.write_text("".join(lines))
    return str(producers(env, "submit", str(file), "--detach", "--timeout", "40")["id"])


def outputs(env: dict[str, str], batch: str, folder: Path, ids: list[str], failed: list[str]) -> oracle.Checked:
    """The outputs of a batch once it has ended."""
    wait_until(lambda: producers(env, "status", batch)["status"] == "completed", 900, "the batch ends", 1)
    producers(env, "results", batch, "--output", str(folder), status=1 if failed else 0)
    return oracle.check(folder, batch, ids, failed=failed)


def test_a_real_engine_killed_poisoned_hung_and_orphaned(
    redis_broker: RedisBroker,
    processes: Processes,
    tmp_path: Path,
    demo_name: str,
    demo_entry: ModelVersion,
    direct_answers: dict[str, str],
) -> None:
    env = real_env(tmp_path, redis_broker, demo_name, demo_entry) | {"BATCHMILL_SCHEDULER_RETRY_TIMES": "1"}
    sound = {f"{copy}-{n}": prompt for copy in range(3) for n, prompt in enumerate(PROMPTS)}
    mixed = {**{f"0-{n}": prompt for n, prompt in enumerate(PROMPTS[:8])}, "POISON": "POISON", "HANG": "HANG"}

    processes.coordinator(env)
    faulty = env | injected("deadly_requests", tmp_path)
    first = processes.worker(faulty, demo_name)
    batch = submit(env, tmp_path / "sound.jsonl", sound)
    first.wait_line("engine is ready", 200)

    def some_done() -> bool:
        return int(producers(env, "status", batch)["request_counts"]["completed"]) > 0

    wait_until(some_done, 200, "some are answered", 0.5)
    # 6: the engine's core is killed.
    seen = len(first.lines)
    engine_process(first).send_signal(signal.SIGKILL)
    first.wait_line("exit 70", 60, after=seen)
    first.wait_line("engine is ready", 200, after=seen)
    # 22: the parent is killed; nothing of its engine is left.
    family = first.children()
    assert any(p.name().startswith("VLLM") for p in family)
    first.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    second = processes.worker(faulty, demo_name)
    checked = outputs(env, batch, tmp_path / "sound", list(sound), [])
    assert {name: checked.content(name) for name in sound} == {name: direct_answers[p] for name, p in sound.items()}
    # 8 and 9: each costs its own result, and nobody else's.
    seen = len(second.lines)
    batch = submit(env, tmp_path / "mixed.jsonl", mixed)
    checked = outputs(env, batch, tmp_path / "mixed", list(mixed), ["POISON", "HANG"])
    assert (checked.code("POISON"), checked.code("HANG")) == ("engine_crash", "timeout")
    assert "\n".join(second.lines[seen:]).count("exit 70") == 5
    for name, prompt in mixed.items():
        assert name in ("POISON", "HANG") or checked.content(name) == direct_answers[prompt], prompt
