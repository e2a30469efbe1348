"""One chunk, generate, next chunk: the same engine without our scheduling, `python -m benchmarks.naive_chunks`.

`FILE CHUNK MODEL`: the requests of FILE, CHUNK of them asked at once and the next when all are answered. Writes samples
as `benchmarks.sampled_worker` does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from benchmarks.sampled_worker import LOOK_S, Sampler
from common import registry, settings
from common.urls import URLS
from workers.engine import loader
from workers.engine_thread import EngineThread
from workers.tune import sample


def main() -> None:
    """See the module."""
    source, chunk, model = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rows = sample.read(source, 1 << 30)
    chosen = settings.load()
    thread = EngineThread(lambda: loader.load(chosen, registry.load(), model), sys.exit)
    thread.start()
    engine = thread.engine
    sampler = Sampler(Path(os.environ["BENCHMARK_SAMPLES"]), lambda: engine.stats().running, lambda: 0)
    sampler.start()

    async def ask(url: int, body: bytes) -> None:
        answer = await engine.infer(URLS[url], body)
        assert answer.status == 200, answer
        sampler.finished += 1

    async def run() -> None:
        for at in range(0, len(rows), chunk):
            await asyncio.gather(*(ask(url, body) for url, body in rows[at : at + chunk]))

    thread.submit(run()).result()
    # The last look is to see the last answer.
    time.sleep(3 * LOOK_S)
    print("DONE", flush=True)
    thread.stop(30)
    os._exit(0)


if __name__ == "__main__":
    main()
