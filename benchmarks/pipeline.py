"""What the path around the engine costs: `python -m benchmarks.pipeline` (`make bench-pipeline`).

A file of short requests (560 B a line) goes through real processes — `producers submit`, a coordinator, one worker with
the echo engine and no delay, a real broker — from `submit` to the closed output file. Printed per broker: requests/s of
each stage and end to end, CPU microseconds per request of each role, and each role's peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from common.live import LiveState
from common.settings import load
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.support.brokers import Broker, RabbitBroker, RedisBroker, rabbit_server, redis_server
from tests.support.ports import wait_until
from tests.support.processes import ROOT, Process, Processes

LINE_BYTES = 560


def write_input(path: Path, requests: int) -> None:
    """`requests` chat requests, each of 560 bytes with its newline, every prompt different."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(requests):
            head = f'{{"custom_id":"request-{number:09d}","method":"POST","url":"/v1/chat/completions","body":'
            body = f'{{"model":"echo-test","max_tokens":16,"messages":[{{"role":"user","content":"{number:09d} '
            tail = '"}]}}\n'
            file.write(head + body + "x" * (LINE_BYTES - len(head) - len(body) - len(tail)) + tail)


class Usage:
    """CPU seconds and peak memory of one process and all below it, read while they live."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.cpu = 0.0
        self.peak_mb = 0.0
        self._start = self._cpu()

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _cpu(self) -> float:
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def read(self) -> None:
        """Take the numbers as they stand; the peak is of the largest single process."""
        self.cpu = max(self.cpu, self._cpu() - self._start)
        for process in self._tree():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text("ascii", "replace")
                high = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
                self.peak_mb = max(self.peak_mb, int(high.split()[1]) / 1024)


@contextlib.contextmanager
def broker_of(kind: str, folder: Path) -> Iterator[tuple[Broker, dict[str, int]]]:
    """A private broker, and the processes that it consists of (role → pid)."""
    (folder / "redis").mkdir()
    (folder / "rabbit").mkdir()
    with redis_server(folder / "redis") as state:
        assert state._process is not None
        if kind == "redis":
            yield RedisBroker(state), {"broker (redis)": state._process.pid}
            return
        with rabbit_server(folder / "rabbit") as rabbit:
            assert rabbit._process is not None
            yield (
                RabbitBroker(rabbit, state),
                {"broker (rabbitmq)": rabbit._process.pid, "state (redis)": state._process.pid},
            )


def run(kind: str, requests: int, chunk: int, window: int) -> dict[str, Any]:
    """One measured run on one broker; a dictionary of figures."""
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name:
        folder = Path(name)
        source = folder / "input.jsonl"
        write_input(source, requests)
        with broker_of(kind, folder) as (broker, broker_pids):
            env = make_fleet_env(folder, broker.url, broker.state_url) | {
                "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": str(chunk),
                "BATCHMILL_SCHEDULER_CHUNK_BYTES": str(4 << 20),
                "BATCHMILL_SCHEDULER_QUEUE_SIZE": str(window),
                "BATCHMILL_TELEMETRY_LOG_LEVEL": "warning",
                "BATCHMILL_ECHO_MAX_NUM_SEQS": "1024",
            }
            (folder / "processes").mkdir()
            processes = Processes(folder / "processes")
            try:
                return _measure(processes, env, source, folder, requests, broker_pids)
            finally:
                processes.close()


def _measure(
    processes: Processes, env: dict[str, str], source: Path, folder: Path, requests: int, broker_pids: dict[str, int]
) -> dict[str, Any]:
    coordinator = processes.coordinator(env)
    worker = processes.worker(env, ECHO_MODEL)
    live = LiveState(load(env=env))
    wait_until(lambda: any(w.state == "ready" for w in live.workers()), 60, "the worker is ready")
    usages = {name: Usage(pid) for name, pid in broker_pids.items()}
    usages |= {"coordinator": Usage(coordinator.pid), "worker": Usage(worker.pid)}
    started = time.time()
    argv = [sys.executable, "-m", "producers", "submit", str(source), "--output", str(folder / "out"), "--json"]
    with open(folder / "answer.json", "wb") as out, open(folder / "progress", "wb") as progress:
        submit = subprocess.Popen(
            argv, env=_environment(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=progress
        )
    usages["submit"] = Usage(submit.pid)
    times = _follow(submit, folder, usages)
    if submit.returncode != 0:
        raise SystemExit(f"submit ended with {submit.returncode}: {(folder / 'progress').read_text()[-2000:]}")
    for usage in usages.values():
        usage.read()
    lines = sum(block.count(b"\n") for block in _blocks(folder / "out" / "output.jsonl"))
    if lines != requests:
        raise SystemExit(f"{lines} answers for {requests} requests")
    _still_alive(coordinator, worker)
    summary = json.loads((folder / "answer.json").read_bytes())
    assert summary["status"] == "completed", summary
    return {
        "requests": requests,
        "stages": {
            "intake + plan": requests / (times["active"] - started),
            "dispatch, worker, log": requests / (times["finalizing"] - times["active"]),
            "assembly": requests / max(times["finished"] - times["finalizing"], 1e-9),
            "end to end": requests / (times["exit"] - started),
        },
        "seconds": {k: v - started for k, v in times.items()},
        "cpu_us": {k: u.cpu / requests * 1e6 for k, u in usages.items()},
        "peak_mb": {k: u.peak_mb for k, u in usages.items()},
    }


def _follow(submit: subprocess.Popen[bytes], folder: Path, usages: dict[str, Usage]) -> dict[str, float]:
    """Unix times at which the batch became active, was answered whole, was assembled, and the command ended."""
    times: dict[str, float] = {}
    store = folder / "store"
    while submit.poll() is None:
        if "active" not in times and any((store / "active" / "0").glob("batch_*")):
            times["active"] = time.time()
        if "finalizing" not in times:
            for path in store.glob("batches/*/status.json"):
                status = json.loads(path.read_bytes())
                if status["status"] in ("finalizing", "completed"):
                    times["finalizing"] = time.time()
        elif "finished" not in times and any(store.glob("batches/*/summary.json")):
            times["finished"] = time.time()
        usages["submit"].read()
        time.sleep(0.02)
    times["exit"] = time.time()
    times.setdefault("finalizing", times["exit"])
    times.setdefault("finished", times["exit"])
    return times


def _environment(env: dict[str, str]) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    return base | {"PYTHONPATH": str(ROOT)} | env


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


def _still_alive(*processes: Process) -> None:
    for process in processes:
        if not process.alive:
            raise SystemExit(f"{process.name} ended in the run:\n{process.text[-2000:]}")


def show(kind: str, figures: dict[str, Any]) -> None:
    """Print one run's table."""
    print(f"\n{kind}: {figures['requests']:,} requests of {LINE_BYTES} B")
    print(f"  {'stage':<24}{'requests/s':>14}")
    for name, rate in figures["stages"].items():
        print(f"  {name:<24}{rate:>14,.0f}")
    print(f"  {'role':<24}{'CPU µs/request':>14}{'peak MB':>12}")
    for name, cost in figures["cpu_us"].items():
        print(f"  {name:<24}{cost:>14.1f}{figures['peak_mb'][name]:>12.0f}")
    print(f"  {'all roles':<24}{sum(figures['cpu_us'].values()):>14.1f}")


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[200_000])
    parser.add_argument("--brokers", nargs="+", default=["redis", "rabbitmq"], choices=["redis", "rabbitmq"])
    parser.add_argument("--chunk", type=int, default=1024, help="requests a chunk (scheduler.chunk_requests)")
    parser.add_argument("--window", type=int, default=32768, help="scheduler.queue_size")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    print(f"{psutil.cpu_count()} cores, {options.chunk} requests a chunk, window {options.window}")
    collected = []
    for requests in options.requests:
        for kind in options.brokers:
            figures = run(kind, requests, options.chunk, options.window)
            show(kind, figures)
            collected.append({"broker": kind, **figures})
    if options.json:
        options.json.write_text(json.dumps(collected, indent=2))


if __name__ == "__main__":
    main()
