"""Input files of the fault suite, and the answers of a run without faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.messages import Row
from common.plan_reader import PlanReader
from common.store import LocalStore
from common.urls import URLS
from producers.batch import read_batch
from tests.conftest import ECHO_MODEL
from workers.engine.echo_bodies import Bodies


def write(path: Path, count: int, marks: Mapping[int, str]) -> list[str]:
    """A file of `count` chat requests, each other than all others; `marks`: number → a word in its prompt, by which
    the echo engine's fault script knows it. Returns the custom_ids.
    """
    ids = [f"r{number}" for number in range(count)]
    lines = []
    for number, name in enumerate(ids):
        content = f"{path.stem} {number} {marks.get(number, 'please')} {'tell me more ' * (number % 7)}"
        lines.append({"custom_id": name, "body": {"messages": [{"role": "user", "content": content}]}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ids


def answers(store: LocalStore, batch_id: str) -> dict[str, Any]:
    """custom_id → body of the answer that the echo engine gives to what the batch's chunks carry."""
    batch = read_batch(store, batch_id)
    reader = PlanReader(store, f"batches/{batch_id}", batch.planned)
    decode = msgspec.msgpack.Decoder(Row).decode
    bodies = Bodies(ECHO_MODEL, 4096)
    found = {}
    for raw in reader.rows(reader.plan(0, batch.planned)):
        row = decode(raw)
        answer = bodies.answer(URLS[row.url], row.body)
        assert answer.status == 200
        found[json.loads(row.custom_id)] = json.loads(answer.body)
    return found
