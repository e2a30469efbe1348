"""The outputs of a batch that has ended: put into a folder, or read line by line in input order."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from blake3 import blake3

from common.errors import BatchmillError, Damaged, UsageError
from common.new_file import destination, replacing
from common.store import Store
from producers.batch import FINAL, folder, read_batch, read_status

OUTPUT, ERRORS, SUMMARY = "output.jsonl", "errors.jsonl", "summary.json"
#: In the order in which they are put: whoever finds the summary finds the rest.
FILES = (OUTPUT, ERRORS, SUMMARY)

_BLOCK = 1 << 20


class NoOutputs(BatchmillError):
    """The batch has no output files: it has not ended, or it failed as a whole."""


class DamagedOutputs(Damaged):
    """The store has lost outputs of a batch, or has others than were written; what is damaged is not handed out."""


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `summary.json` says of an output file."""

    lines: int
    bytes: int
    #: blake3, hex.
    digest: str


class _Facts(msgspec.Struct):
    output: FileFacts
    errors: FileFacts


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files were put (absolute paths). `summary` is null for what was taken in mid-run."""

    output: str
    errors: str
    summary: str | None


def check_folder(target: Path) -> None:
    """`UsageError` unless `target` is a folder that can be written, or can be made. Leaves nothing behind."""
    place = target.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"output folder {target}: {place} is not a folder; use --output")
    for name in FILES:
        destination(target / name)
    try:
        # Asking the system's permission bits is no proof (root, read-only mounts, quotas): write something.
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"\0")
    except OSError as exc:
        raise UsageError(f"output folder {target}: cannot be written: {exc.strerror}; use --output") from None


def deliver(store: Store, batch_id: str, target: Path) -> Outputs:
    """Copy the outputs of a batch that has ended into `target`: all of them, each whole, or none.

    Raises `UsageError` when the folder cannot be written, `NoOutputs` when there is nothing to put, `DamagedOutputs`
    when the store does not have what was written to it.
    """
    paths = {name: target.absolute() / name for name in FILES}
    with contextlib.ExitStack() as stack:
        sources = {name: stack.enter_context(_open(store, batch_id, name)) for name in FILES}
        facts = _facts(store, batch_id)
        with writing(batch_id, target), contextlib.ExitStack() as copies:
            target.mkdir(parents=True, exist_ok=True)
            # They take their names in the opposite order, once all are whole.
            for name in reversed(FILES):
                copy = copies.enter_context(replacing(paths[name]))
                _copy(sources[name], copy)
                if name in facts:
                    _check(batch_id, name, copy, facts[name])
    return Outputs(output=str(paths[OUTPUT]), errors=str(paths[ERRORS]), summary=str(paths[SUMMARY]))


class Line(NamedTuple):
    """A line of an output file, with its newline; `good`: of `output.jsonl`."""

    good: bool
    data: bytes


def lines(store: Store, batch_id: str) -> Iterator[bytes]:
    """The lines of both files, in the order of the input; `NoOutputs` when there are none.

    Each line ends with its newline. Memory is that of two lines. `DamagedOutputs` before the first line for a file of
    another size than was written, after the last one for other content.
    """
    return (line.data for line in tagged(store, batch_id))


def tagged(store: Store, batch_id: str) -> Iterator[Line]:
    """As `lines`, each with the file it is from."""
    with contextlib.ExitStack() as stack:
        sources = {name: stack.enter_context(_open(store, batch_id, name)) for name in (OUTPUT, ERRORS)}
        facts = _facts(store, batch_id)
        for name, source in sources.items():
            if source.seek(0, os.SEEK_END) != facts[name].bytes:
                raise _damaged(batch_id, name)
            source.seek(0)
        read = {True: blake3(), False: blake3()}
        try:
            for line in _merged(*sources.values()):
                read[line.good].update(line.data)
                yield line
        except ValueError:  # a line without an index
            raise DamagedOutputs(f"{batch_id}: its outputs in the store are not what was written") from None
        for name, good in ((OUTPUT, True), (ERRORS, False)):
            if read[good].hexdigest() != facts[name].digest:
                raise _damaged(batch_id, name)


def merge(output: BinaryIO, errors: BinaryIO) -> Iterator[bytes]:
    """Two files that are each in input order as one; the index is the last part of a line's `id`."""
    return (line.data for line in _merged(output, errors))


def _merged(output: BinaryIO, errors: BinaryIO) -> Iterator[Line]:
    good, bad = output.readline(), errors.readline()
    while good and bad:
        if index_of(good) < index_of(bad):
            yield Line(True, good)
            good = output.readline()
        else:
            yield Line(False, bad)
            bad = errors.readline()
    for first, file, kind in ((good, output, True), (bad, errors, False)):
        if first:
            index_of(first)
            yield Line(kind, first)
            for line in file:
                index_of(line)
                yield Line(kind, line)


def index_of(line: bytes) -> int:
    """The index of the request that a result line answers (`{"id":"batch_req_<ulid>_<index>",…`)."""
    start = line.index(b'"batch_req_') + 11
    return int(line[line.index(b"_", start) + 1 : line.index(b'"', start)])


@contextlib.contextmanager
def writing(batch_id: str, target: Path) -> Iterator[None]:
    """Turns what goes wrong while writing into `target` into a `UsageError` that says how to get the answers still."""
    try:
        yield
    except OSError as exc:
        raise UsageError(
            f"output folder {target}: cannot be written: {exc.strerror}; the answers are safe in the store, "
            f"get them with: producers results {batch_id} --output DIR"
        ) from None


def _open(store: Store, batch_id: str, name: str) -> BinaryIO:
    try:
        return store.open_read(f"{folder(batch_id)}/{name}")
    except FileNotFoundError:
        raise _missing(store, batch_id, name) from None


def _missing(store: Store, batch_id: str, name: str) -> BatchmillError:
    if read_status(store, read_batch(store, batch_id)).status in FINAL - {"failed"}:
        return DamagedOutputs(
            f"{batch_id}: {folder(batch_id)}/{name} is missing from the store; nothing was handed out"
        )
    return NoOutputs(f"{batch_id} has no {name}; 'producers status {batch_id}' says why")


def _facts(store: Store, batch_id: str) -> dict[str, FileFacts]:
    """What was written, by the name of the file."""
    try:
        told = msgspec.json.decode(store.read(f"{folder(batch_id)}/{SUMMARY}"), type=_Facts)
    except FileNotFoundError:
        raise _missing(store, batch_id, SUMMARY) from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _damaged(batch_id, SUMMARY) from None
    return {OUTPUT: told.output, ERRORS: told.errors}


def _check(batch_id: str, name: str, copy: BinaryIO, facts: FileFacts) -> None:
    """`DamagedOutputs` unless a copy is what was written. It is read back: the copying itself is the kernel's."""
    copy.flush()
    if os.fstat(copy.fileno()).st_size == facts.bytes:
        found = blake3()
        copy.seek(0)
        while block := copy.read(_BLOCK):
            found.update(block)
        if found.hexdigest() == facts.digest:
            return
    raise _damaged(batch_id, name)


def _damaged(batch_id: str, name: str) -> DamagedOutputs:
    return DamagedOutputs(
        f"{batch_id}: {folder(batch_id)}/{name} in the store is damaged: it is not what was written; "
        "bring it back from a backup, or submit the batch again"
    )


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    try:
        here, there = source.fileno(), target.fileno()
        # Within the kernel, and without a second copy on the disk where the file system can share blocks.
        while os.copy_file_range(here, there, 1 << 30):
            pass
    except (OSError, AttributeError):
        # Another file system, or no file at all (an object store): go on from where the kernel stopped.
        while block := source.read(_BLOCK):
            target.write(block)
