"""The outputs of a batch and of its retries as one: every request of the first, in its order, with its latest outcome.

A retry holds exactly the requests that its forerunner left unanswered, in the same order, so both are read side by
side and nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from blake3 import blake3

from common.errors import BatchmillError, UsageError
from common.new_file import replacing
from common.store import Store
from producers import outputs
from producers.batch import Batch, folder, read_batch
from producers.invalid_file import INVALID_DTYPE
from producers.outputs import ERRORS, OUTPUT, SUMMARY, FileFacts, Line, Outputs


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json` of merged outputs."""

    #: The batch that was submitted first, its retry, the retry of that, …
    merged: list[str]
    model: str
    total: int
    completed: int
    failed: int
    output: FileFacts
    errors: FileFacts


class _Head(msgspec.Struct):
    custom_id: str | None


_head = msgspec.json.Decoder(_Head).decode


class _Counted:
    """Writes lines and knows what it wrote."""

    def __init__(self, file: BinaryIO) -> None:
        self._write = file.write
        self._hash = blake3()
        self.lines = self.bytes = 0

    def write(self, line: bytes) -> None:
        self._write(line)
        self._hash.update(line)
        self.lines += 1
        self.bytes += len(line)

    def facts(self) -> FileFacts:
        return FileFacts(lines=self.lines, bytes=self.bytes, digest=self._hash.hexdigest())


def chain_of(store: Store, batch_id: str) -> list[Batch]:
    """The batch that was submitted first, its retries, and last this one; `UsageError` when it retries none."""
    found = [read_batch(store, batch_id)]
    while (earlier := found[0].retry_of) is not None:
        found.insert(0, read_batch(store, earlier))
    if len(found) == 1:
        raise UsageError(f"{batch_id} retries no other batch: leave --merged out")
    return found


def lines(store: Store, batch_id: str) -> Iterator[Line]:
    """All requests of the first batch in the order of its input, each with its latest outcome.

    Memory is that of a line a batch. `NoOutputs` when one of them has none, `BatchmillError` when they do not fit.
    """
    first, *retries = chain_of(store, batch_id)
    woven = _first(store, first)
    for retry in retries:
        woven = _weave(woven, outputs.tagged(store, retry.id), retry)
    return (line for line, _ in woven)


def deliver(store: Store, batch_id: str, target: Path) -> tuple[Outputs, Summary]:
    """Put the merged outputs into `target`, each file whole or not at all; errors as `outputs.deliver`."""
    batches = chain_of(store, batch_id)
    paths = {name: target.absolute() / name for name in (OUTPUT, ERRORS, SUMMARY)}
    woven = lines(store, batch_id)
    with outputs.writing(batch_id, target):
        target.mkdir(parents=True, exist_ok=True)
        with replacing(paths[OUTPUT]) as output, replacing(paths[ERRORS]) as errors:
            good, bad = _Counted(output), _Counted(errors)
            for line in woven:
                (good if line.good else bad).write(line.data)
        told = Summary(
            merged=[b.id for b in batches],
            model=batches[-1].model,
            total=good.lines + bad.lines,
            completed=good.lines,
            failed=bad.lines,
            output=good.facts(),
            errors=bad.facts(),
        )
        with replacing(paths[SUMMARY]) as file:
            file.write(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    return Outputs(output=str(paths[OUTPUT]), errors=str(paths[ERRORS]), summary=str(paths[SUMMARY])), told


def _first(store: Store, batch: Batch) -> Iterator[tuple[Line, bool]]:
    """The lines of a batch that retries none, and whether its retry has another for them."""
    refused = chain(_refused(store, batch), [-1])
    ahead = next(refused)
    for line in outputs.tagged(store, batch.id):
        again = not line.good
        if again and outputs.index_of(line.data) == ahead:
            again, ahead = False, next(refused)
        yield line, again


def _weave(older: Iterator[tuple[Line, bool]], newer: Iterator[Line], retry: Batch) -> Iterator[tuple[Line, bool]]:
    misfit = BatchmillError(f"{retry.id}: its outputs are not those of what {retry.retry_of} left unanswered")
    for line, again in older:
        if not again:
            yield line, False
            continue
        later = next(newer, None)
        if later is None or _head(later.data).custom_id != _head(line.data).custom_id:
            raise misfit
        yield later, not later.good
    if next(newer, None) is not None:
        raise misfit


def _refused(store: Store, batch: Batch) -> Iterator[int]:
    """Indexes of the requests that intake refused, ascending: no retry has them."""
    size = INVALID_DTYPE.itemsize
    for start in range(0, batch.invalid, 4096):
        count = min(4096, batch.invalid - start)
        try:
            raw = store.read_range(f"{folder(batch.id)}/invalid.idx", start * size, count * size)
        except FileNotFoundError:
            raise BatchmillError(f"{batch.id}: {folder(batch.id)}/invalid.idx is missing from the store") from None
        yield from np.frombuffer(raw, INVALID_DTYPE)["index"].tolist()
