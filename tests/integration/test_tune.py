"""`workers tune` with the echo engine: a sweep whose first engine is killed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ports import wait_until
from tests.support.processes import Processes

MODELS = """\
# Ours.
models:
  echo-test@1:
    source: /no-weights  # none needed
    engine: { max_num_seqs: 4, max_model_len: 4096 }
    hardware: { gpus: 0 }
"""


def test_a_point_that_takes_too_long_is_a_row_and_a_sweep_that_is_killed_leaves_nothing(
    tmp_path: Path, processes: Processes
) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    sample = tmp_path / "sample.jsonl"
    sample.write_text('{"body":{"prompt":"x","max_tokens":1}}\n')
    env = {
        "BATCHMILL_MODELS": str(tmp_path / "models.yaml"),
        "BATCHMILL_INFERENCE_ENGINE": "echo",
        # It never answers in the time of a test.
        "BATCHMILL_ECHO_LATENCY_MS": "3600000",
    }
    argv = ["-m", "workers", "tune", "--sample", str(sample), "--model", "echo-test"]
    argv += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    slow = processes.python("slow", *argv, "--timeout", "1", env=env)
    assert slow.wait() == 2
    assert "no engine of the sweep answered the sample; the first said: took longer than 1 s" in slow.lines[-1]
    killed = processes.python("killed", *argv, env=env)
    wait_until(lambda: bool(killed.children()), 60, "a point runs")
    killed.kill()
    processes.wait_gone()
    assert (tmp_path / "models.yaml").read_text() == MODELS


def test_a_point_that_dies_is_a_row_and_the_best_of_the_others_is_found(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    (tmp_path / "turns").mkdir()
    body = {"messages": [{"role": "user", "content": "one of many"}], "max_tokens": 8}
    sample = tmp_path / "sample.jsonl"
    sample.write_text("".join(json.dumps({"custom_id": str(n), "body": body}) + "\n" for n in range(64)))
    env = {
        "BATCHMILL_MODELS": str(tmp_path / "models.yaml"),
        "BATCHMILL_INFERENCE_ENGINE": "echo",
        "BATCHMILL_ECHO_LATENCY_MS": "400",
        # The first process that meets it is killed, as when memory runs out.
        "BATCHMILL_ECHO_FAULTS": "many=kill*1",
        "BATCHMILL_ECHO_FAULTS_DIR": str(tmp_path / "turns"),
    }
    argv = ["-m", "workers", "tune", "--sample", str(sample), "--model", "echo-test", "--max-num-seqs", "64,16"]
    argv += ["--max-num-batched-tokens", "4096", "--json"]
    dry = processes.python("dry", *argv, "--dry-run", env=env)
    assert dry.wait() == 0
    assert (tmp_path / "models.yaml").read_text() == MODELS
    killed = [line for line in dry.lines if line.lstrip().startswith("64 ")]
    assert len(killed) == 1
    assert "its process was killed" in killed[0]

    # All turns of the fault are taken: now every engine runs.
    run = processes.python("tune", *argv, env=env)
    assert run.wait() == 0
    found = json.loads(run.lines[-1])
    assert [p["max_num_seqs"] for p in found["points"]] == [64, 16]
    assert all(p["answered"] == 64 and p["problem"] is None for p in found["points"])
    assert found["best"]["max_num_seqs"] == 64
    # What an engine that computes nothing was best at is nobody's number.
    assert found["written"] is None
    assert (tmp_path / "models.yaml").read_text() == MODELS
    processes.wait_gone()
