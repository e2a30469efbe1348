"""A process with a real engine that is kept busy, for tests that kill parts of it: `python -m tests.engine.victim`.

Prints one JSON object a line, each with `event`: `busy` (with the process ids, once every request runs), `outcome` (one
a request), `dead` (`check` says so), `stopped`. Ends with exit status 70, as a worker does.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from typing import Any

from common import logs, registry, settings
from tests.engine.bodies import GENERATE, body
from workers.engine.base import EngineDead
from workers.engine.vllm import VllmEngine


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


async def ask(engine: VllmEngine, url: str) -> None:
    try:
        answer = await engine.infer(url, body(url, "Count from one to a thousand.", 900, ignore_eos=True))
    except EngineDead as exc:
        say("outcome", url=url, kind="dead", text=str(exc), at=time.monotonic())
    else:
        say("outcome", url=url, kind="answer", status=answer.status, body=answer.body.decode(), at=time.monotonic())


async def main() -> int:
    config = settings.load()
    logs.configure(config.telemetry, "victim")
    models = registry.load()
    name = models.resolve(None)
    engine = VllmEngine(name, models.get(name), config)
    await engine.start()
    requests = [asyncio.create_task(ask(engine, url)) for url in GENERATE]
    while engine.stats().running < len(requests):
        if any(request.done() for request in requests):
            return 1
        await asyncio.sleep(0.05)
    engine_process = next(p for p in multiprocessing.active_children() if p.name.startswith("EngineCore"))
    say("busy", pid=os.getpid(), engine=engine_process.pid)
    await asyncio.gather(*requests)
    while True:
        try:
            await engine.check()
        except EngineDead:
            say("dead", at=time.monotonic())
            break
        await asyncio.sleep(0.05)
    await engine.stop()
    say("stopped")
    return 70


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
