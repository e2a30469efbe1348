"""What the engine's loop in a worker does, by function: `python -m benchmarks.engine_loop` (`make bench-engine-loop`).

128 chat requests of 64 answer tokens go, all at once, through a real engine as a worker has it (vLLM's application in
process, in a thread of its own), several times; nothing else of a worker runs. Printed for each run: its seconds, the
process's CPU time, when the first and the last request had reached the engine's core, and when it gave the first
tokens. The last run is profiled, which costs it some: CPU time of the loop's thread by function.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import files
from benchmarks.warm_fleet import MODEL, demo_entry
from common.settings import load
from tests.support.processes import ROOT
from workers.engine.vllm import VllmEngine
from workers.engine_thread import EngineThread

URL = "/v1/chat/completions"


def bodies(folder: Path, round_: int) -> list[bytes]:
    """The bodies of one round's requests."""
    source = folder / f"{round_}.jsonl"
    files.write(source, files.KINDS["start"], round_, MODEL)
    return [json.dumps(json.loads(line)["body"]).encode() for line in source.read_text("utf-8").splitlines()]


async def run(engine: VllmEngine, asked: list[bytes], profile: cProfile.Profile | None) -> str:
    """Ask for all at once; a line of what it took."""
    core: Any = engine._llm.engine_core
    added: list[float] = []
    given: list[float] = []
    add, get = core.add_request_async, core.get_output_async

    async def adding(request: Any) -> None:
        added.append(time.monotonic())
        await add(request)

    async def getting() -> Any:
        outputs = await get()
        if outputs.outputs:
            given.append(time.monotonic())
        return outputs

    core.add_request_async, core.get_output_async = adding, getting
    began, cpu = time.monotonic(), time.process_time()
    if profile is not None:
        profile.enable()
    try:
        answers = await asyncio.gather(*(engine.infer(URL, body) for body in asked))
    finally:
        if profile is not None:
            profile.disable()
        core.add_request_async, core.get_output_async = add, get
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    if any(answer.status != 200 for answer in answers):
        raise SystemExit(f"not all were answered: {answers[0]}")
    # The loop already waits for an output when this begins, so the first may have gone to it unseen.
    return (
        f"{took:.2f} s, CPU {cpu * 1000 / len(asked):.1f} ms a request; in the core after {added[0] - began:.3f} to "
        f"{added[-1] - began:.3f} s, first tokens seen after {given[0] - began:.3f} s, {len(given)} steps"
    )


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="before the one that is profiled")
    parser.add_argument("--lines", type=int, default=40, help="functions to print")
    options = parser.parse_args()
    engine = VllmEngine(MODEL, demo_entry(), load(ROOT / "config" / "fleet.yaml"))
    thread = EngineThread(lambda: engine, lambda reason: print(reason, file=sys.stderr))
    thread.start()
    first = int(time.time())
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name:
        for number in range(options.runs + 1):
            last = number == options.runs
            asked = bodies(Path(name), first + number)
            print(thread.submit(run(engine, asked, profile if last else None)).result(600), flush=True)
    thread.stop(30)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(options.lines)


if __name__ == "__main__":
    main()
