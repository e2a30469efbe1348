"""Many small batches against one large one: `python -m benchmarks.small_batches` (`make bench-small-batches`).

The same requests are submitted once as one batch and once as many of five (`--size`), each time with no coordinator
running; then one starts, and the time from its first dispatch until the last output file is closed is measured, with
one worker whose echo engine answers at once (`bulk`) or about 2,000 requests/s (`paced`). What a submission costs is
printed beside it: it happens in the submitter's process, and there may be many of those.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pipeline import Usage, broker_of
from common import registry as registry_module
from common.live import LiveState
from common.settings import Settings, load
from common.store import open_store
from producers.intake import Options
from producers.intake.bulk import submit_many
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.support.ports import wait_until
from tests.support.processes import Processes

#: Echo engines: 64 requests at once, each for 32 ms, is 2,000 requests/s.
ENGINES = {
    "bulk": {"BATCHMILL_ECHO_MAX_NUM_SEQS": "1024"},
    "paced": {"BATCHMILL_ECHO_MAX_NUM_SEQS": "64", "BATCHMILL_ECHO_LATENCY_MS": "32"},
}


def lines(first: int, count: int) -> bytes:
    """So many short chat requests."""
    made = io.BytesIO()
    for n in range(first, first + count):
        body = {
            "model": "echo-test",
            "max_tokens": 16,
            "messages": [{"role": "user", "content": f"{n:09d} " + "x" * 300}],
        }
        made.write(json.dumps({"custom_id": f"request-{n:09d}", "body": body}).encode() + b"\n")
    return made.getvalue()


def submit(settings: Settings, env: dict[str, str], requests: int, size: int) -> float:
    """Submit the requests in batches of `size`; seconds."""
    assert settings.store.url is not None
    store = open_store(settings.store.url)
    registry = registry_module.load(Path(env["BATCHMILL_MODELS"]))
    options = Options(model=ECHO_MODEL)
    inputs = [lines(at, size) for at in range(0, requests, size)]
    began = time.monotonic()
    for _ in submit_many(inputs, store, settings, registry, options):
        pass
    return time.monotonic() - began


def run(kind: str, engine: str, requests: int, size: int) -> dict[str, Any]:
    """One measured run; a dictionary of figures."""
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name:
        folder = Path(name)
        with broker_of(kind, folder) as (broker, pids):
            env = make_fleet_env(folder, broker.url, broker.state_url) | ENGINES[engine]
            env |= {
                "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "1024" if engine == "bulk" else "256",
                "BATCHMILL_SCHEDULER_QUEUE_SIZE": "32768",
                "BATCHMILL_TELEMETRY_LOG_LEVEL": "warning",
            }
            settings = load(env=env)
            (folder / "processes").mkdir()
            processes = Processes(folder / "processes")
            try:
                submitted = submit(settings, env, requests, size)
                worker = processes.worker(env, ECHO_MODEL)
                live = LiveState(settings)
                wait_until(lambda: any(w.state == "ready" for w in live.workers()), 60, "the worker is ready")
                usages = {role: Usage(pid) for role, pid in pids.items()} | {"worker": Usage(worker.pid)}
                coordinator = processes.coordinator(env)
                usages["coordinator"] = Usage(coordinator.pid)
                seconds = follow(folder / "store", usages)
                for usage in usages.values():
                    usage.read()
            finally:
                processes.close()
    return {
        "broker": kind,
        "engine": engine,
        "batches": requests // size,
        "requests": requests,
        "submit_s": submitted,
        "run_s": seconds,
        "cpu_us": {role: usage.cpu / requests * 1e6 for role, usage in usages.items()},
        "coordinator_mb": usages["coordinator"].peak_mb,
    }


def follow(store: Path, usages: dict[str, Usage]) -> float:
    """Seconds from the first dispatch until every batch has ended (its marker is gone)."""
    active, first = store / "active" / "0", 0.0
    while True:
        # A dispatch shows in the ledger's folder, beside the store: the coordinator's first segment.
        if not first and any((store.parent / "wal").rglob("0*-000000")):
            first = time.monotonic()
        left = sum(1 for _ in active.iterdir())
        if first and not left:
            return time.monotonic() - first
        usages["coordinator"].read()
        time.sleep(0.1)


def show(one: dict[str, Any], many: dict[str, Any]) -> None:
    """Print the two runs of one broker and engine."""
    print(f"\n{one['broker']}, {one['engine']} engine, {one['requests']:,} requests")
    print(
        f"  {'batches':>10}{'submit s':>12}{'ms a batch':>12}{'run s':>10}"
        f"{'requests/s':>12}{'coord. MB':>11}  CPU µs a request"
    )
    for figures in (one, many):
        cpu = ", ".join(f"{role} {cost:.0f}" for role, cost in figures["cpu_us"].items())
        print(
            f"  {figures['batches']:>10,}{figures['submit_s']:>12.1f}"
            f"{figures['submit_s'] / figures['batches'] * 1e3:>12.2f}{figures['run_s']:>10.1f}"
            f"{figures['requests'] / figures['run_s']:>12,.0f}{figures['coordinator_mb']:>11.0f}  {cpu}"
        )
    print(f"  the many take {many['run_s'] / one['run_s']:.2f} × the time of the one", flush=True)


def _runs(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for kind in options.brokers:
        for engine in options.engines:
            one = run(kind, engine, options.requests, options.requests)
            yield one, run(kind, engine, options.requests, options.size)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=5, help="requests of a small batch")
    parser.add_argument("--brokers", nargs="+", default=["redis", "rabbitmq"], choices=["redis", "rabbitmq"])
    parser.add_argument("--engines", nargs="+", default=["bulk", "paced"], choices=list(ENGINES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    print(f"{psutil.cpu_count()} cores")
    collected = []
    for one, many in _runs(options):
        show(one, many)
        collected.append({"one": one, "many": many})
    if options.json:
        options.json.write_text(json.dumps(collected, indent=2))


if __name__ == "__main__":
    main()
