"""What the path around the engine costs: `python -m benchmarks.pipeline` (`make bench-pipeline`).

A file of short requests (560 B a line) goes through real processes — `producers submit`, a coordinator, one worker with
the echo engine and no delay, a real broker — from `submit` to the closed output file. Printed per broker: requests/s of
each stage and end to end, CPU microseconds per request of each role, and each role's peak memory.

With `--stream N`, one client submits the file N times, one after the other, as N batches: then the intake of a batch
overlaps with the dispatch of the one before and the assembly of the one before that. With `--flame DIR`, py-spy
(`pip install py-spy`) samples each process; `DIR/<broker>-<role>.svg` are flame graphs; `--threads` prints the CPU time
of each thread.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sampling import Flames, Threads
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


def run(options: argparse.Namespace, kind: str, requests: int) -> dict[str, Any]:
    """One measured run on one broker; a dictionary of figures."""
    stream = options.stream
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name:
        folder = Path(name)
        source = folder / "input.jsonl"
        write_input(source, requests)
        with broker_of(kind, folder) as (broker, broker_pids):
            env = make_fleet_env(folder, broker.url, broker.state_url) | {
                "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": str(options.chunk),
                "BATCHMILL_SCHEDULER_CHUNK_BYTES": str(4 << 20),
                "BATCHMILL_SCHEDULER_QUEUE_SIZE": str(options.window),
                "BATCHMILL_TELEMETRY_LOG_LEVEL": "warning",
                "BATCHMILL_ECHO_MAX_NUM_SEQS": "1024",
                "BATCHMILL_INFERENCE_CHUNKS_IN_FLIGHT": str(options.in_flight),
            }
            (folder / "processes").mkdir()
            processes = Processes(folder / "processes")
            flame = Flames(options.flame, kind)
            try:
                coordinator = processes.coordinator(env)
                worker = processes.worker(env, ECHO_MODEL)
                live = LiveState(load(env=env))
                wait_until(lambda: any(w.state == "ready" for w in live.workers()), 60, "the worker is ready")
                flame.watch("coordinator", coordinator.pid)
                flame.watch("worker", worker.children()[0].pid)
                usages = {name: Usage(pid) for name, pid in broker_pids.items()}
                usages |= {"coordinator": Usage(coordinator.pid), "worker": Usage(worker.pid)}
                names = {"coordinator": coordinator.pid, "worker": worker.children()[0].pid} if options.threads else {}
                threads = {role: Threads(pid) for role, pid in names.items()}
                if stream:

                    def check() -> None:
                        _still_alive(coordinator, worker)

                    figures = _measure_stream(env, source, folder, requests, stream, usages, flame, check)
                else:
                    figures = _measure(env, source, folder, requests, usages, flame)
                _still_alive(coordinator, worker)
                total = figures["requests"]
                figures["thread_us"] = {
                    f"{role}: {name}": seconds / total * 1e6
                    for role, of in threads.items()
                    for name, seconds in of.used().items()
                }
                return figures
            finally:
                flame.close()
                processes.close()


def _measure(
    env: dict[str, str], source: Path, folder: Path, requests: int, usages: dict[str, Usage], flame: Flames
) -> dict[str, Any]:
    started = time.time()
    argv = [sys.executable, "-m", "producers", "submit", str(source), "--output", str(folder / "out"), "--json"]
    with open(folder / "answer.json", "wb") as out, open(folder / "progress", "wb") as progress:
        submit = subprocess.Popen(
            argv, env=_environment(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=progress
        )
    usages["submit"] = Usage(submit.pid)
    flame.watch("submit", submit.pid)
    times = _follow(submit, folder, usages)
    if submit.returncode != 0:
        raise SystemExit(f"submit ended with {submit.returncode}: {(folder / 'progress').read_text()[-2000:]}")
    for usage in usages.values():
        usage.read()
    lines = sum(block.count(b"\n") for block in _blocks(folder / "out" / "output.jsonl"))
    if lines != requests:
        raise SystemExit(f"{lines} answers for {requests} requests")
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


def _measure_stream(
    env: dict[str, str],
    source: Path,
    folder: Path,
    requests: int,
    batches: int,
    usages: dict[str, Usage],
    flame: Flames,
    check: Callable[[], None],
) -> dict[str, Any]:
    """`batches` times the same file, submitted one after the other by one client while the fleet works."""
    started = time.time()
    argv = [sys.executable, "-c", _CLIENT, str(source), str(batches)]
    submit = subprocess.Popen(argv, env=_environment(env), cwd=folder, stdin=subprocess.DEVNULL)
    usages["submit"] = Usage(submit.pid)
    flame.watch("submit", submit.pid)
    store = folder / "store"
    submitted = 0.0
    while True:
        if not submitted:
            usages["submit"].read()
            if submit.poll() is not None:
                submitted = time.time()
        # A marker goes when the outputs of its batch stand.
        elif not any((store / "active" / "0").glob("batch_*")):
            break
        check()
        time.sleep(0.02)
    finished = time.time()
    if submit.returncode != 0:
        raise SystemExit(f"the client ended with {submit.returncode}")
    for usage in usages.values():
        usage.read()
    outputs = list(store.glob("batches/*/output.jsonl"))
    lines = sum(block.count(b"\n") for path in outputs for block in _blocks(path))
    total = requests * batches
    if lines != total:
        raise SystemExit(f"{lines} answers for {total} requests")
    return {
        "requests": total,
        "batches": batches,
        "stages": {"submit": total / (submitted - started), "end to end": total / (finished - started)},
        "seconds": {"submitted": submitted - started, "finished": finished - started},
        "cpu_us": {k: u.cpu / total * 1e6 for k, u in usages.items()},
        "peak_mb": {k: u.peak_mb for k, u in usages.items()},
    }


#: Submits argv[1] argv[2] times.
_CLIENT = """
import sys
from producers.client import Client
with Client() as client:
    for _ in range(int(sys.argv[2])):
        client.submit(sys.argv[1])
"""


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
    batches = f" in {figures['batches']} batches" if "batches" in figures else ""
    print(f"\n{kind}: {figures['requests']:,} requests of {LINE_BYTES} B{batches}")
    print(f"  {'stage':<24}{'requests/s':>14}")
    for name, rate in figures["stages"].items():
        print(f"  {name:<24}{rate:>14,.0f}")
    print(f"  {'role':<24}{'CPU µs/request':>14}{'peak MB':>12}")
    for name, cost in figures["cpu_us"].items():
        print(f"  {name:<24}{cost:>14.1f}{figures['peak_mb'][name]:>12.0f}")
    print(f"  {'all roles':<24}{sum(figures['cpu_us'].values()):>14.1f}")
    for name, cost in figures["thread_us"].items():
        if cost >= 0.05:
            print(f"    {name:<38}{cost:>8.2f}")


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[200_000])
    parser.add_argument("--brokers", nargs="+", default=["redis", "rabbitmq"], choices=["redis", "rabbitmq"])
    parser.add_argument("--chunk", type=int, default=1024, help="requests a chunk (scheduler.chunk_requests)")
    parser.add_argument("--window", type=int, default=32768, help="scheduler.queue_size")
    parser.add_argument("--in-flight", type=int, default=3, help="inference.chunks_in_flight")
    parser.add_argument("--stream", type=int, default=0, metavar="N", help="N batches of that size, one after another")
    parser.add_argument("--threads", action="store_true", help="CPU of each thread too (with py-spy)")
    parser.add_argument("--flame", type=Path, metavar="DIR", help="sample each process with py-spy")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    print(
        f"{psutil.cpu_count()} cores, {options.chunk} requests a chunk, {options.in_flight} in flight, "
        f"window {options.window}"
    )
    collected = []
    for requests in options.requests:
        for kind in options.brokers:
            figures = run(options, kind, requests)
            show(kind, figures)
            collected.append({"broker": kind, **figures})
    if options.json:
        options.json.write_text(json.dumps(collected, indent=2))


if __name__ == "__main__":
    main()
