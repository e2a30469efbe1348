"""What a worker with vLLM spends its CPU time on: `python -m benchmarks.worker_shares` (`make bench-worker-shares`).

A batch goes through a fleet whose engine is up. Printed: CPU milliseconds a request of every process, and, with
`--py-spy PROGRAM` (`pip install py-spy`), what the worker's own process does with its time on a CPU, by whose code.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.peers import files
from benchmarks.warm_fleet import MODEL, Fleet
from tests.support.brokers import redis_server

#: Whose code a frame is, by a part of its file's path; the innermost frame that is anybody's counts.
OWNERS = (
    ("/vllm/entrypoints/", "vLLM's application: validate, render, answer"),
    ("/fastapi/", "vLLM's application: validate, render, answer"),
    ("/starlette/", "vLLM's application: validate, render, answer"),
    ("/pydantic/", "vLLM's application: validate, render, answer"),
    ("/vllm/renderers/", "vLLM's application: validate, render, answer"),
    ("/jinja2/", "vLLM's application: validate, render, answer"),
    ("/transformers/", "tokenizer"),
    ("/tokenizers/", "tokenizer"),
    ("/vllm/tokenizers/", "tokenizer"),
    ("/vllm/v1/engine/detokenizer", "detokenizer"),
    ("/vllm/v1/metrics/", "vLLM's statistics"),
    ("/prometheus_client/", "vLLM's statistics"),
    ("/vllm/v1/serial_utils", "messages to and from the engine's process"),
    ("/vllm/v1/engine/core_client", "messages to and from the engine's process"),
    ("/zmq/", "messages to and from the engine's process"),
    ("/vllm/", "vLLM's engine client"),
    ("/workers/", "ours: lane, chunks, results, cache, leases"),
    ("/common/", "ours: lane, chunks, results, cache, leases"),
    ("/celery/", "Celery, kombu, Redis client"),
    ("/kombu/", "Celery, kombu, Redis client"),
    ("/redis/", "Celery, kombu, Redis client"),
    ("/amqp/", "Celery, kombu, Redis client"),
    ("/asyncio/", "event loop"),
    ("/selectors.py", "event loop"),
)


#: Innermost frames that wait; a thread is seen running for a moment when it begins and ends that.
WAITING = re.compile(r"^(poll|select|wait|acquire|_poll|get|_wait_for_tstate_lock) ")


def owner(stack: str) -> str:
    """Whose time a stack is (`frame (file:line);…`, the innermost last)."""
    for frame in reversed(stack.split(";")):
        for part, name in OWNERS:
            if part in frame:
                return name
    return "other"


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--py-spy", metavar="PROGRAM")
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
        worker = fleet.worker.children()[0]
        raw = folder / "stacks"
        spy = None
        if options.py_spy:
            argv = [options.py_spy, "record", "--pid", str(worker.pid), "--rate", "200", "--full-filenames"]
            spy = subprocess.Popen([*argv, "--format", "raw", "--output", str(raw)], stdout=subprocess.DEVNULL)
        before = _cpu(fleet, broker.port)
        children = _children_s()
        took, _ = fleet.submit(source)
        after = _cpu(fleet, broker.port) | {"submit": _children_s() - children}
        print(f"{requests} requests, {tokens} answer tokens, {took:.1f} s")
        print("CPU milliseconds a request:")
        for who, seconds in sorted(after.items(), key=lambda item: -item[1] + before.get(item[0], 0.0)):
            print(f"  {who:<28}{(seconds - before.get(who, 0.0)) / requests * 1000:>8.2f}")
        if spy is not None:
            spy.send_signal(signal.SIGINT)
            spy.wait(60)
            shares: Counter[str] = Counter()
            for line in raw.read_text("utf-8", "replace").splitlines():
                frames, _, times = line.rpartition(" ")
                if not WAITING.search(frames.rpartition(";")[2]):
                    shares[owner(frames)] += int(times)
            whole = sum(shares.values())
            print(f"the worker's process on a CPU ({whole / 200:.2f} s):")
            for who, count in shares.most_common():
                print(f"  {who:<46}{count / whole:>6.1%}")


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
