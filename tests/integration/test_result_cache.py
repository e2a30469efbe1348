"""The result cache on real Redis servers: answers come back, nothing else changes, and its troubles are nobody's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.live import LiveState
from common.settings import load
from tests.conftest import ECHO_MODEL
from tests.support.brokers import RedisServer, redis_server
from tests.support.ports import wait_until
from tests.support.processes import ROOT, Processes
from workers.engine import echo_journal


@pytest.fixture
def cache_server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "cache-redis"
    folder.mkdir()
    with redis_server(folder) as server:
        yield server


def with_cache(env: dict[str, str], server: RedisServer, **more: str) -> dict[str, str]:
    own = {"BATCHMILL_CACHE_URL": f"redis://127.0.0.1:{server.port}/0", "BATCHMILL_CACHE_MODE": "on"}
    # Who counts hits gives Redis the time it needs on a busy machine.
    return env | own | {"BATCHMILL_CACHE_TIMEOUT_MS": "10000"} | more


def submit(processes: Processes, env: dict[str, str], source: Path, out: Path, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "producers", "submit", str(source), "--output", str(out), "--json", *options]
    run = processes.start("submit", argv, env)
    assert run.wait(90) == 0, run.text
    summary: dict[str, Any] = json.loads((out / "summary.json").read_bytes())
    return summary


def answers(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "output.jsonl").read_text().splitlines()]
    return {line["custom_id"]: line for line in lines}


def write(path: Path, temperatures: list[float]) -> Path:
    with path.open("w") as file:
        for number, temperature in enumerate(temperatures):
            body = {"prompt": f"p{number}", "max_tokens": 4, "temperature": temperature, "user": path.name}
            file.write(json.dumps({"custom_id": f"c{number}", "body": body}) + "\n")
    return path


@pytest.mark.parametrize("latency", ["0", "5"])
def test_the_second_time_it_answers_what_is_determined(
    tmp_path: Path, fleet_env: dict[str, str], processes: Processes, cache_server: RedisServer, latency: str
) -> None:
    """With no latency the engine answers in bulk, else one by one."""
    env = with_cache(fleet_env, cache_server, BATCHMILL_ECHO_LATENCY_MS=latency)
    processes.coordinator(env)
    processes.worker(env, ECHO_MODEL)
    temperatures = [0.0] * 40 + [1.0] * 10
    first = submit(processes, env, write(tmp_path / "a.jsonl", temperatures), tmp_path / "one")
    assert first["usage"]["cache_hits"] == 0
    client = cache_server.client(0)
    wait_until(lambda: len(list(client.scan_iter(match="bm:cache:*"))) == 40, 10, "the answers are written")
    live = LiveState(load(env=env))
    wait_until(
        lambda: any(w.cache and w.cache.capacity_bytes == 1 << 30 for w in live.workers()), 30, "its worker tells of it"
    )
    live.close()
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
    second = submit(processes, env, write(tmp_path / "b.jsonl", temperatures), tmp_path / "two")
    usage = first["usage"], second["usage"]
    assert [(used["cache_hits"], used["cache_misses"]) for used in usage] == [(0, 40), (40, 0)]
    one, two = answers(tmp_path / "one"), answers(tmp_path / "two")
    given = [line["response"]["body"] for line in two.values() if line["batchmill"].get("cached")]
    assert usage[1]["cache_bytes"] == sum(len(json.dumps(body, separators=(",", ":"))) for body in given) > 0
    assert list(one) == list(two) == [f"c{n}" for n in range(50)]
    for number in range(50):
        mine, again = one[f"c{number}"], two[f"c{number}"]
        assert (mine["batchmill"].get("cached"), again["batchmill"].get("cached")) == (
            (False, True) if number < 40 else (None, None)
        )
        if number < 40:
            assert mine["response"]["body"] == again["response"]["body"]
    off = submit(processes, env, tmp_path / "b.jsonl", tmp_path / "three", "--cache", "off")
    assert off["usage"]["cache_hits"] == 0
    client.close()


def test_equal_requests_in_flight_are_computed_once(
    tmp_path: Path, fleet_env: dict[str, str], processes: Processes
) -> None:
    """Without any cache: what has one answer is computed once at a time, what is sampled each time."""
    journal = tmp_path / "journal"
    env = fleet_env | {"BATCHMILL_ECHO_LATENCY_MS": "100", "BATCHMILL_ECHO_JOURNAL": str(journal)}
    processes.coordinator(env)
    processes.worker(env, ECHO_MODEL)
    source = tmp_path / "a.jsonl"
    with source.open("w") as file:
        for number in range(60):
            body = {"prompt": "same", "max_tokens": 4, "temperature": 0 if number % 3 else 1}
            file.write(json.dumps({"custom_id": f"c{number}", "body": body}) + "\n")
    summary = submit(processes, env, source, tmp_path / "one")
    assert (summary["completed"], summary["failed"]) == (60, 0)
    lines = answers(tmp_path / "one")
    shared = {name for name, line in lines.items() if line["batchmill"].get("shared")}
    assert summary["usage"]["shared"] == len(shared)
    assert shared <= {f"c{number}" for number in range(60) if number % 3}
    # Chunks may be small near the end of a batch; in each of them only the first is computed.
    assert len(shared) >= 20
    assert sum(event.kind == "+" for event in echo_journal.read(str(journal))) == 60 - len(shared)
    cold = {json.dumps(lines[f"c{number}"]["response"]["body"]["choices"]) for number in range(60) if number % 3}
    assert len(cold) == 1


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_finished_batch_warms_the_cache(
    tmp_path: Path, fleet_env: dict[str, str], processes: Processes, cache_server: RedisServer
) -> None:
    """Answers of a batch that knew of no cache are found by the next one, and only those that are determined."""
    env = with_cache(fleet_env, cache_server)
    processes.coordinator(env)
    processes.worker(env, ECHO_MODEL)
    source = write(tmp_path / "a.jsonl", [0.0] * 30 + [1.0] * 10)
    first = submit(processes, env, source, tmp_path / "one", "--cache", "off")
    argv = [sys.executable, "-m", "workers", "cache", "warm", "--from", first["id"], "--json"]
    warm = processes.start("warm", argv, env)
    assert warm.wait(60) == 0, warm.text
    said = json.loads(warm.lines[-1])
    assert said.pop("capacity_bytes") > 0
    assert said == {
        "batch": first["id"],
        "model": ECHO_MODEL,
        "lines": 40,
        "determined": 30,
        "written": 30,
        "too_large": 0,
        "pushed_out": 0,
        "unmarked": 0,
    }
    second = submit(processes, env, source, tmp_path / "two")
    assert second["usage"]["cache_hits"] == 30
    one, two = answers(tmp_path / "one"), answers(tmp_path / "two")
    assert [one[c]["response"]["body"] for c in one] == [two[c]["response"]["body"] for c in two]


def test_a_cache_that_hangs_or_dies_stops_nobody(
    tmp_path: Path, fleet_env: dict[str, str], processes: Processes, cache_server: RedisServer
) -> None:
    env = with_cache(fleet_env, cache_server, BATCHMILL_CACHE_TIMEOUT_MS="500")
    processes.coordinator(env)
    worker = processes.worker(env, ECHO_MODEL)
    source = write(tmp_path / "a.jsonl", [0.0] * 20)
    submit(processes, env, source, tmp_path / "one")
    cache_server.pause()
    submit(processes, env, source, tmp_path / "two")
    assert len(answers(tmp_path / "two")) == 20
    cache_server.resume()
    cache_server.kill()
    submit(processes, env, source, tmp_path / "three")
    assert len(answers(tmp_path / "three")) == 20
    assert "Traceback" not in worker.text


def test_a_cache_beside_the_broker_is_refused(
    fleet_env: dict[str, str], processes: Processes, cache_server: RedisServer
) -> None:
    env = fleet_env | {"BATCHMILL_CACHE_URL": fleet_env["BATCHMILL_STATE_URL"]}
    worker = processes.worker(env, ECHO_MODEL, "--no-supervisor")
    assert worker.wait(60) == 2
    assert "cache.url" in worker.text
    assert "Traceback" not in worker.text


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_tenants_and_changed_answers_share_nothing_and_a_rollback_finds_its_own(
    tmp_path: Path, fleet_env: dict[str, str], processes: Processes, cache_server: RedisServer
) -> None:
    """The same file again and again; what differs is who asks, or what the engine is."""
    env = with_cache(fleet_env, cache_server)
    processes.coordinator(env)
    source = write(tmp_path / "a.jsonl", [0.0] * 8)

    def hits_of(context: int, name: str, *options: str) -> tuple[int, str]:
        entries = Path(env["BATCHMILL_MODELS"]).read_text()
        changed = tmp_path / f"{name}.yaml"
        changed.write_text(entries.replace("max_model_len: 4096", f"max_model_len: {context}"))
        worker = processes.worker(env | {"BATCHMILL_MODELS": str(changed)}, ECHO_MODEL)
        summary = submit(processes, env, source, tmp_path / name, *options)
        worker.stop()
        # However short the batch is, and however new its worker.
        assert summary["cache"]["capacity_bytes"] == 1 << 30
        return summary["usage"]["cache_hits"], answers(tmp_path / name)["c0"]["batchmill"]["fingerprint"]

    first, before = hits_of(1000, "one")
    again, same = hits_of(1000, "two")
    other_tenant, _ = hits_of(1000, "three", "--tenant", "other")
    changed, after = hits_of(2000, "four")
    back, rolled = hits_of(1000, "five")
    assert (first, again, other_tenant, changed, back) == (0, 8, 0, 0, 8)
    assert before == same == rolled != after


def test_a_wish_for_a_cache_that_is_not_there_is_one_line(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    source = write(tmp_path / "a.jsonl", [0.0])
    argv = [sys.executable, "-m", "producers", "submit", str(source), "--cache", "on", "--detach"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)} | fleet_env
    run = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode in (2, 3)
    assert "Traceback" not in run.stderr
