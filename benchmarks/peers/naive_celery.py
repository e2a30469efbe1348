"""Batch inference as people first write it with Celery: a task is a chunk, and a chunk is one call of `LLM.chat`.

The worker (`celery -A benchmarks.peers.naive_celery worker -P solo`) loads the engine before it takes tasks;
`answer_file` sends the chunks of a file and writes their results. Broker and results: the Redis of `PEER_REDIS_URL`;
the engine's arguments: `PEER_ENGINE`, as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init

from benchmarks.peers import lines

_URL = os.environ.get("PEER_REDIS_URL", "redis://127.0.0.1:6379/0")
app = Celery("naive", broker=_URL, backend=_URL)
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)

_engine: list[Any] = []


@worker_init.connect  # type: ignore[untyped-decorator]
def _load(**_: Any) -> None:
    from vllm import LLM

    _engine.append(LLM(**json.loads(os.environ["PEER_ENGINE"])))


@app.task(name="answer_chunk")  # type: ignore[untyped-decorator]
def answer_chunk(chunk: list[dict[str, Any]]) -> list[str]:
    """The answer lines of a chunk of request lines."""
    from vllm import SamplingParams

    params = [SamplingParams(**lines.sampling(line["body"])) for line in chunk]
    outputs = _engine[0].chat([line["body"]["messages"] for line in chunk], params, use_tqdm=False)
    return [
        lines.answer(line["custom_id"], output.outputs[0].text, len(output.outputs[0].token_ids))
        for line, output in zip(chunk, outputs, strict=True)
    ]


def answer_file(celery: Celery, source: Path, target: Path, chunk: int, timeout: float) -> None:
    """Send all chunks, wait for their results, write them in the order of the file."""
    asked = lines.read(source)
    sent = [celery.send_task("answer_chunk", (asked[at : at + chunk],)) for at in range(0, len(asked), chunk)]
    with open(target, "w", encoding="utf-8") as file:
        for result in sent:
            file.writelines(result.get(timeout=timeout))
