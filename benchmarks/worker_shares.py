"""What a fleet with vLLM spends CPU time on: `python -m benchmarks.worker_shares` (`make bench-worker-shares`).

A batch goes through a fleet whose engine is up. Printed: CPU milliseconds a request of every process. With `--flame
DIR`, py-spy (`pip install py-spy`) samples worker and coordinator meanwhile: `DIR/vllm-<role>.svg` are flame graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.peers import files
from benchmarks.sampling import Flames
from benchmarks.warm_fleet import MODEL, Fleet
from tests.support.brokers import redis_server


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--flame", type=Path, metavar="DIR", help="sample worker and coordinator with py-spy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "broker").mkdir()
        broker = stack.enter_context(redis_server(folder / "broker"))
        fleet = Fleet(folder, f"redis://127.0.0.1:{broker.port}/0")
        stack.callback(fleet.processes.close)
        source = folder / "input.jsonl"
        files.write(source, files.KINDS["unique"], -1, MODEL, 16)
        fleet.submit(source)
        requests, tokens = files.write(source, files.KINDS["unique"], int(time.time()), MODEL, options.requests)
        before = _cpu(fleet, broker.port)
        children = _children_s()
        flames = Flames(options.flame, "vllm")
        flames.watch("coordinator", fleet.coordinator.pid)
        flames.watch("worker", psutil.Process(fleet.worker.pid).children()[0].pid)
        took, _ = fleet.submit(source)
        after = _cpu(fleet, broker.port) | {"submit": _children_s() - children}
        flames.close()
        print(f"{requests} requests, {tokens} answer tokens, {took:.1f} s")
        print("CPU milliseconds a request:")
        for who, seconds in sorted(after.items(), key=lambda item: -item[1] + before.get(item[0], 0.0)):
            print(f"  {who:<28}{(seconds - before.get(who, 0.0)) / requests * 1000:>8.2f}")


def _children_s() -> float:
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def _cpu(fleet: Fleet, redis_port: int) -> dict[str, float]:
    """CPU seconds so far of every process of the fleet, by what it is."""
    found: dict[str, float] = {}
    named = [("coordinator", fleet.coordinator.pid), ("supervisor", fleet.worker.pid)]
    named += [("worker", p.pid) for p in psutil.Process(fleet.worker.pid).children()]
    for worker in psutil.Process(fleet.worker.pid).children():
        named += [(_title(p), p.pid) for p in worker.children(recursive=True)]
    named += [("redis", p.pid) for p in psutil.process_iter() if f":{redis_port}" in " ".join(_words(p))]
    for who, pid in named:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            found[who] = found.get(who, 0.0) + times.user + times.system
    return found


def _title(process: psutil.Process) -> str:
    words = " ".join(_words(process))
    return next((f"engine: {name}" for name in ("EngineCore", "Worker") if name in words), "engine: other")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
