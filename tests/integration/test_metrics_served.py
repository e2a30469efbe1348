"""What operators scrape: each role of a running fleet serves its numbers, and they fit the batch that ran."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.conftest import ECHO_MODEL
from tests.support.ports import free_port, wait_until
from tests.support.processes import ROOT, Processes


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(batchmill_\S+) (\S+)", line)
        if match:
            found[match[1]] = float(match[2])
    return found


def test_numbers_fit_the_batch(tmp_path: Path, fleet_env: dict[str, str], processes: Processes) -> None:
    base = free_port(100)
    env = fleet_env | {"BATCHMILL_TELEMETRY_METRICS_PORT": str(base)}
    processes.coordinator(env)
    processes.worker(env, ECHO_MODEL)
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(300):
            prompt = f"secret-prompt-{number}"
            file.write(json.dumps({"custom_id": f"c{number}", "body": {"prompt": prompt, "max_tokens": 4}}) + "\n")
    argv = [sys.executable, "-m", "producers", "submit", str(source), "--output", str(tmp_path / "out")]
    submit = processes.start("submit", argv, env | {"PYTHONPATH": str(ROOT)})
    assert submit.wait(90) == 0
    model = f'{{model="{ECHO_MODEL}"}}'
    # A worker counts what it has sent, and its gauges are set every few seconds.
    sent = f'batchmill_results_sent_total{{kind="output",model="{ECHO_MODEL}"}}'
    wait_until(lambda: scrape(base + 100).get(sent) == 300, 60, "the worker has counted its results")
    wait_until(lambda: f"batchmill_draining{model}" in scrape(base + 100), 60, "the worker's gauges are set")
    coordinator, worker = scrape(base), scrape(base + 100)
    assert coordinator['batchmill_results_logged_total{kind="output"}'] == 300
    assert coordinator[f"batchmill_chunks_sent_total{model}"] >= 1
    assert coordinator["batchmill_ledger_bytes_total"] > 300 * 100
    assert coordinator["batchmill_ledger_sync_seconds_count"] >= 1
    assert coordinator['batchmill_leader_epoch{shard="0"}'] >= 1
    assert worker[sent] == 300
    assert worker[f'batchmill_tokens_total{{model="{ECHO_MODEL}",type="completion"}}'] > 0
    assert worker[f"batchmill_draining{model}"] == 0
    wait_until(lambda: scrape(base)["batchmill_batches_active"] == 0, 10, "the batch is no longer active")
    for port in (base, base + 100):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"secret-prompt" not in answer.read()


def test_a_taken_port_is_one_line(fleet_env: dict[str, str], processes: Processes) -> None:
    port = free_port()
    env = fleet_env | {"BATCHMILL_TELEMETRY_METRICS_PORT": str(port)}
    first = processes.coordinator(env)
    wait_until(lambda: _serves(port), 30, "the coordinator serves metrics")
    argv = [sys.executable, "-m", "producers", "coordinate"]
    second = subprocess.run(
        argv,
        env=processes_env(env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 2
    assert "telemetry.metrics_port" in second.stderr
    assert "Traceback" not in second.stderr
    assert first.alive


def _serves(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False


def processes_env(env: dict[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": env["BATCHMILL_HOME"]} | env
