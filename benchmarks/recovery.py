"""One of two workers is killed in the middle: `python -m benchmarks.recovery` (`make bench-recovery`).

20,000 requests run on two workers with the echo engine (64 at once, 250 ms each); when 32 % of them are answered, one
worker gets SIGKILL: its process alone, whose supervisor lives and starts another (`process`), or both, as when a
machine is gone (`machine`). All time limits are the defaults. Printed: seconds until the last request that was lost
with it is in an engine again, requests that were begun and answered twice, missing, duplicated.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from benchmarks.pipeline import broker_of
from common import registry as registry_module
from common.live import LiveState
from common.messages import decode_rows
from common.settings import Settings, load
from common.store import LocalStore
from producers import intake
from producers.batch import FINAL, Batch, read_status
from producers.coordinator import segments
from producers.coordinator.batch_files import BatchFiles
from producers.coordinator.records import Dispatch, Type, decode
from producers.coordinator.segments import Record
from producers.intake import Options
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.support.ports import wait_until
from tests.support.processes import Process, Processes
from workers.engine import echo_journal

SHARE = 0.32


def run(kind: str, what: str, requests: int) -> dict[str, Any]:
    """One measured run; a dictionary of figures."""
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name:
        folder = Path(name)
        with broker_of(kind, folder) as (broker, _):
            env = make_fleet_env(folder, broker.url, broker.state_url) | {
                "BATCHMILL_ECHO_LATENCY_MS": "250",
                "BATCHMILL_ECHO_MAX_NUM_SEQS": "64",
                "BATCHMILL_ECHO_JOURNAL": str(folder / "journal"),
                "BATCHMILL_TELEMETRY_LOG_LEVEL": "warning",
            }
            (folder / "processes").mkdir()
            processes = Processes(folder / "processes")
            try:
                return {"broker": kind, "killed": what} | _measure(processes, env, folder, what, requests)
            finally:
                processes.close()


def _measure(processes: Processes, env: dict[str, str], folder: Path, what: str, requests: int) -> dict[str, Any]:
    settings = load(env=env)
    processes.coordinator(env)
    workers = [processes.worker(env, ECHO_MODEL, "--name", name) for name in ("a", "b")]
    live = LiveState(settings)
    wait_until(lambda: sum(w.state == "ready" for w in live.workers()) == 2, 60, "the workers are ready")
    store = LocalStore(folder / "store")
    batch = _submit(store, settings, env, requests)
    journal = folder / "journal"
    wait_until(lambda: _answered(journal) >= SHARE * requests, 300, "a third is answered", 0.02)
    killed_at = time.monotonic()
    _kill(workers[0], what)
    wait_until(lambda: read_status(store, batch).status in FINAL, 300, "the batch ends", 0.1)
    ended_at = time.monotonic()
    events = echo_journal.read(str(journal))
    begun = Counter(e.request for e in events if e.kind == "+")
    answered = Counter(e.request for e in events if e.kind == "=")
    lost = _sent_again(folder / "wal" / "wal" / "0", store, batch)
    again = [e.at for e in events if e.kind == "+" and e.request in lost and e.at > killed_at]
    base = folder / "store" / "batches" / batch.id
    lines = Counter(
        json.loads(line)["custom_id"]
        for name in ("output.jsonl", "errors.jsonl")
        for line in (base / name).read_bytes().splitlines()
    )
    return {
        "recovery_s": max(again, default=killed_at) - killed_at,
        "lost": len(lost),
        "begun_twice": sum(n - 1 for n in begun.values()),
        "answered_twice": sum(n - 1 for n in answered.values()),
        "missing": requests - len(lines),
        "duplicated": sum(n - 1 for n in lines.values()),
        "failed": read_status(store, batch).request_counts.failed,
        "rest_s": ended_at - killed_at,
    }


def _submit(store: LocalStore, settings: Settings, env: dict[str, str], requests: int) -> Batch:
    data = b"".join(
        b'{"custom_id":"request-%d","body":{"max_tokens":8,"messages":[{"role":"user","content":"%d"}]}}\n' % (n, n)
        for n in range(requests)
    )
    registry = registry_module.load(Path(env["BATCHMILL_MODELS"]))
    return intake.submit_bytes(data, store, settings, registry, Options(model=ECHO_MODEL))


def _answered(journal: Path) -> int:
    # About: a line is 31 bytes or a little more, and half of them are answers.
    return journal.stat().st_size // 62 if journal.exists() else 0


def _kill(worker: Process, what: str) -> None:
    victims = [psutil.Process(worker.pid), *worker.children()]
    if what == "process":
        victims = victims[1:]
    for victim in victims:
        victim.kill()


def _sent_again(wal: Path, store: LocalStore, batch: Batch) -> set[str]:
    """The requests that went out more than once by the ledger, as the journal names them."""
    sent: Counter[int] = Counter()
    for path in wal.iterdir():
        if segments.parse_name(path.name):
            fd = os.open(path, os.O_RDONLY)
            for item in segments.scan(fd, path.stat().st_size):
                if isinstance(item, Record) and item.type is Type.DISPATCH:
                    record = decode(item.type, item.payload)
                    assert isinstance(record, Dispatch)
                    for piece in record.slices:
                        sent.update(piece.positions().tolist())
            os.close(fd)
    again = np.array(sorted(pos for pos, n in sent.items() if n > 1), dtype=np.uint32)
    if not len(again):
        return set()
    rows = decode_rows(BatchFiles(store, batch).rows(again))
    return {f"{xxhash.xxh3_64_intdigest(row.body):016x}" for row in rows}


def show(figures: dict[str, Any]) -> None:
    """One line of the table."""
    print(
        f"{figures['broker']:<10}{figures['killed']:<10}{figures['recovery_s']:>12.1f}{figures['lost']:>8}"
        f"{figures['begun_twice']:>14}{figures['answered_twice']:>16}{figures['missing']:>9}"
        f"{figures['duplicated']:>12}{figures['failed']:>8}{figures['rest_s']:>9.1f}",
        flush=True,
    )


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--brokers", nargs="+", default=["redis", "rabbitmq"], choices=["redis", "rabbitmq"])
    parser.add_argument("--killed", nargs="+", default=["process", "machine"], choices=["process", "machine"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    print(
        f"{'broker':<10}{'killed':<10}{'recovery s':>12}{'lost':>8}{'begun twice':>14}{'answered twice':>16}"
        f"{'missing':>9}{'duplicated':>12}{'failed':>8}{'rest s':>9}"
    )
    collected = []
    for kind in options.brokers:
        for what in options.killed:
            figures = run(kind, what, options.requests)
            show(figures)
            collected.append(figures)
    if options.json:
        options.json.write_text(json.dumps(collected, indent=2))


if __name__ == "__main__":
    main()
