"""How full the engine is over a whole batch: `python -m benchmarks.occupancy` (`make bench-occupancy`).

Answers of 8 to 512 tokens. The batch goes through a fleet (Redis, coordinator, one worker), whose engine is looked at
every 50 ms, and then, chunk after chunk with a wait for the slowest answer of each, through the same engine alone.
Printed: requests running over `max_num_seqs`, until the last `max_num_seqs` requests, and the seconds of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers import files
from benchmarks.sampled_worker import Sample, occupancy, read
from benchmarks.warm_fleet import MODEL, Fleet
from common.interrupts import terminated_like_interrupted
from tests.support.brokers import redis_server
from tests.support.processes import Processes

#: The echo engine's pace: a token of one request takes as long as on a GPU that runs many.
ECHO = {
    "BATCHMILL_INFERENCE_ENGINE": "echo",
    "BATCHMILL_ECHO_TOKENS_PER_S": "100",
    "BATCHMILL_ECHO_LATENCY_MS": "20",
}


def measure(engine: str, seqs: int, chunk: int, requests: int) -> None:
    """Run both ways and print."""
    settings = (ECHO if engine == "echo" else {}) | {"BATCHMILL_SCHEDULER_CHUNK_REQUESTS": str(chunk)}
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "broker").mkdir()
        broker = stack.enter_context(redis_server(folder / "broker"))
        source = folder / "input.jsonl"
        kind = dataclasses.replace(files.MIXED, make=lambda r: _wordy(files.MIXED.make(r)))
        _, tokens = files.write(source, kind if engine == "echo" else files.MIXED, int(time.time()), MODEL, requests)
        print(f"\n{engine}: {requests} requests of 8 to 512 answer tokens ({tokens} in all), max_num_seqs {seqs}, "
              f"chunks of {chunk}", flush=True)  # fmt: skip

        samples = folder / "fleet.samples"
        fleet = Fleet(
            folder,
            f"redis://127.0.0.1:{broker.port}/0",
            engine={"max_num_seqs": seqs},
            settings=settings | {"BENCHMARK_SAMPLES": str(samples)},
            worker="benchmarks.sampled_worker",
        )
        with contextlib.closing(fleet.processes):
            fleet.submit(source)
        say("the fleet", read(samples), requests, seqs)

        samples = folder / "naive.samples"
        processes = Processes(folder)
        with contextlib.closing(processes):
            env = fleet.env | settings | {"BENCHMARK_SAMPLES": str(samples)}
            argv = ["-m", "benchmarks.naive_chunks", str(source), str(chunk), MODEL]
            processes.python("naive", *argv, env=env).wait_line("^DONE", 1800)
        say("chunk after chunk", read(samples), requests, seqs)


def _wordy(asked: Iterator[files.Asked]) -> Iterator[files.Asked]:
    """With prompts as long as their answers, since that is what the echo engine answers."""
    for prompt, system, tokens in asked:
        yield f"{prompt} {'word ' * tokens}", system, tokens


def say(who: str, samples: list[Sample], requests: int, seqs: int) -> None:
    """One line of figures, and one that shows the shape."""
    share, seconds = occupancy(samples, requests, seqs)
    begun = next(s.at for s in samples if s.running)
    whole = next(s.at for s in samples if s.finished >= requests) - begun
    print(f"  {who:<18} {share:6.1%} over {seconds:.1f} s; all answered after {whole:.1f} s", flush=True)
    part = [s.running for s in samples if begun <= s.at <= begun + whole]
    step = max(1, len(part) // 60)
    shape = "".join(" .:-=+*#"[min(7, round(7 * max(part[i : i + step]) / seqs))] for i in range(0, len(part), step))
    print(f"  {'':<18} |{shape}|", flush=True)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("echo", "vllm"), default=["echo", "vllm"])
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with terminated_like_interrupted():
        for engine in options.engines:
            measure(engine, options.seqs, options.chunk, options.requests)


if __name__ == "__main__":
    main()
