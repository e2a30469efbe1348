"""A process with a busy real engine, for the test that kills it: `python -m tests.engine.victim`.

Prints `busy` once every request runs, and goes on until it is killed.
"""

from __future__ import annotations

import asyncio

from common import logs, registry, settings
from tests.engine.bodies import GENERATE, body
from workers.engine.vllm import VllmEngine


async def main() -> None:
    config = settings.load()
    logs.configure(config.telemetry, "victim")
    models = registry.load()
    name = models.resolve(None)
    engine = VllmEngine(name, models.get(name), config)
    await engine.start()

    async def ask(url: str) -> None:
        while True:
            await engine.infer(url, body(url, "Count from one to a thousand.", 900, ignore_eos=True))

    requests = [asyncio.create_task(ask(url)) for url in GENERATE]
    while engine.stats().running < len(requests):
        await asyncio.sleep(0.05)
    print("busy", flush=True)
    await asyncio.gather(*requests)


if __name__ == "__main__":
    asyncio.run(main())
