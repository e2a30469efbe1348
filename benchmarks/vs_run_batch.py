"""The warm fleet against vLLM's own batch command: `python -m benchmarks.vs_run_batch` (`make bench-vs-run-batch`).

The same file, model folder and engine arguments go, in turn and in one run, through a fleet whose engine is up and
through `python -m vllm.entrypoints.openai.run_batch`: once as shipped, once with the fleet's scheduler numbers. Each
round has prompts of its own, so that no engine meets a prompt twice. Printed: requests/s, and the ratio to each peer
without its start-up (from reading the file to having all answers) and with it (the whole command).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import registry
from common.live import LiveState
from common.settings import load
from tests.conftest import make_fleet_env
from tests.support.brokers import redis_server
from tests.support.ports import wait_until
from tests.support.processes import ROOT, Processes

MODEL = "smollm2-135m@1"
TOPICS = ("rivers", "bridges", "bread", "lighthouses", "glaciers", "violins", "maps", "bees")


def write_input(path: Path, requests: int, tokens: int, round_: int) -> None:
    """Chat requests at temperature 0 of exactly `tokens` answer tokens; no two prompts of any round are the same."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(requests):
            prompt = f"Note {round_}-{number}: write a short paragraph about {TOPICS[number % len(TOPICS)]}."
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "min_tokens": tokens,
                "temperature": 0,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def answered(path: Path) -> int:
    """Lines of an output file that hold a 200."""
    with open(path, encoding="utf-8") as file:
        return sum(1 for line in file if json.loads(line)["response"]["status_code"] == 200)


def line_count(path: Path) -> int:
    """Lines of a file."""
    return path.read_bytes().count(b"\n")


def engine_arguments(entry: registry.ModelVersion, ours: bool) -> list[str]:
    """The entry's engine arguments as flags; without the scheduler's numbers for the command as shipped."""
    flags = []
    for name, value in entry.engine.items():
        if not ours and name in ("max_num_seqs", "max_num_batched_tokens"):
            continue
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def run_peer(folder: Path, source: Path, model: Path, entry: registry.ModelVersion, ours: bool) -> tuple[float, float]:
    """Seconds of the whole command, and of it from reading the file to having all answers."""
    output = folder / "peer.jsonl"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o", str(output)]
    argv += ["--model", str(model), "--served-model-name", MODEL, *engine_arguments(entry, ours)]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(int(entry.hardware.cpu_kv_gb)),
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    started = time.monotonic()
    marks: dict[str, float] = {}
    log = []
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            for name, pattern in (("read", "Reading batch from"), ("written", "Writing outputs to local file")):
                if re.search(pattern, line):
                    marks.setdefault(name, time.monotonic())
    whole = time.monotonic() - started
    if process.returncode != 0 or len(marks) != 2:
        raise SystemExit(f"run_batch ended with {process.returncode}:\n{''.join(log[-30:])}")
    count = answered(output)
    expected = line_count(source)
    if count != expected:
        raise SystemExit(f"run_batch answered {count} of {expected}")
    return whole, marks["written"] - marks["read"]


class Fleet:
    """A coordinator and one worker with the real engine on a private Redis; up until closed."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self.folder = folder
        url = f"redis://127.0.0.1:{redis_port}/0"
        self.env = make_fleet_env(folder, url, url) | {
            "BATCHMILL_INFERENCE_ENGINE": "vllm",
            "BATCHMILL_MODELS": str(ROOT / "config" / "models.yaml"),
        }
        models = os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR")
        if models:
            self.env["BATCHMILL_INFERENCE_MODELS_DIR"] = models
        else:
            # The test's home is empty; pulled models lie in the user's.
            self.env["BATCHMILL_HOME"] = str(Path("~/.local/share/batchmill").expanduser())
        (folder / "processes").mkdir()
        self.processes = Processes(folder / "processes")
        self.processes.coordinator(self.env)
        self.worker = self.processes.worker(self.env, MODEL)

    def wait_ready(self) -> None:
        """Wait until the engine is up."""
        live = LiveState(load(env=self.env))
        wait_until(lambda: any(w.state == "ready" for w in live.workers()), 300, "the engine is up", every=0.1)

    def submit(self, source: Path) -> float:
        """Seconds of `producers submit`, from start to exit."""
        out = self.folder / f"out-{time.monotonic_ns()}"
        argv = [sys.executable, "-m", "producers", "submit", str(source), "--model", MODEL, "--output", str(out)]
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        started = time.monotonic()
        run = subprocess.run(
            argv,
            env=base | {"PYTHONPATH": str(ROOT)} | self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        took = time.monotonic() - started
        if run.returncode != 0:
            raise SystemExit(f"submit ended with {run.returncode}:\n{run.stderr[-3000:]}\n{self.worker.text[-3000:]}")
        assert answered(out / "output.jsonl") == line_count(source)
        return took


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="answer tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    entry = registry.load(ROOT / "config" / "models.yaml", env={}).get(MODEL)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "redis").mkdir()
        redis = stack.enter_context(redis_server(folder / "redis"))
        started = time.monotonic()
        fleet = Fleet(folder, redis.port)
        stack.callback(fleet.processes.close)
        fleet.wait_ready()
        start_up = time.monotonic() - started
        model = Path(_model_folder(fleet.env))
        warm = folder / "warm.jsonl"
        write_input(warm, 32, 8, -1)
        fleet.submit(warm)
        for round_ in range(options.rounds):
            source = folder / f"round-{round_}.jsonl"
            write_input(source, options.requests, options.tokens, round_)
            shipped = run_peer(folder, source, model, entry, ours=False)
            took = fleet.submit(source)
            same = run_peer(folder, source, model, entry, ours=True)
            rows.append({"fleet": took, "as shipped": shipped, "our numbers": same})
            print(f"round {round_}: fleet {took:.1f} s; run_batch as shipped {shipped[1]:.1f} s of {shipped[0]:.1f} s; "
                  f"with our numbers {same[1]:.1f} s of {same[0]:.1f} s", flush=True)  # fmt: skip
    show(rows, options.requests, options.tokens, start_up)
    if options.json:
        options.json.write_text(json.dumps({"start_up_s": start_up, "rounds": rows}, indent=2))


def _model_folder(env: dict[str, str]) -> str:
    home = env["BATCHMILL_HOME"]
    models = env.get("BATCHMILL_INFERENCE_MODELS_DIR", f"{home}/models")
    name, _, version = MODEL.partition("@")
    return f"{models}/{name}/{version}"


def show(rows: list[dict[str, Any]], requests: int, tokens: int, start_up: float) -> None:
    """Print the table: medians of times, medians of the rounds' ratios."""
    print(f"\n{requests} chat requests of {tokens} answer tokens, {len(rows)} rounds")
    print(f"fleet start-up, once: {start_up:.0f} s")
    print(f"  {'':<42}{'seconds':>9}{'requests/s':>12}{'fleet is':>11}")
    mine = statistics.median(r["fleet"] for r in rows)
    print(f"  {'fleet, submit to closed output':<42}{mine:>9.1f}{requests / mine:>12.2f}")
    for peer in ("as shipped", "our numbers"):
        for which, label in ((1, "without start-up"), (0, "with start-up")):
            seconds = statistics.median(r[peer][which] for r in rows)
            ratio = statistics.median(r[peer][which] / r["fleet"] for r in rows)
            name = f"run_batch {peer}, {label}"
            print(f"  {name:<42}{seconds:>9.1f}{requests / seconds:>12.2f}{ratio:>9.2f} x")


if __name__ == "__main__":
    main()
