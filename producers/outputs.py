"""The outputs of a batch that has ended: put into a folder, or read line by line in input order."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from common.errors import BatchmillError, Damaged, UsageError
from common.store import Store
from producers.batch import folder

OUTPUT, ERRORS, SUMMARY = "output.jsonl", "errors.jsonl", "summary.json"
#: In the order in which they are put: whoever finds the summary finds the rest.
FILES = (OUTPUT, ERRORS, SUMMARY)

_BLOCK = 1 << 20


class NoOutputs(BatchmillError):
    """The batch has no output files: it has not ended, or it failed as a whole."""


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
    try:
        # Asking the system's permission bits is no proof (root, read-only mounts, quotas): write something.
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"\0")
    except OSError as exc:
        raise UsageError(f"output folder {target}: cannot be written: {exc.strerror}; use --output") from None


def deliver(store: Store, batch_id: str, target: Path) -> Outputs:
    """Copy the outputs of a batch that has ended into `target`, each file whole or not at all.

    Raises `UsageError` when the folder cannot be written, `NoOutputs` when there is nothing to put.
    """
    paths = {name: target.absolute() / name for name in FILES}
    for name in FILES:
        with _open(store, batch_id, name) as source, writing(batch_id, target):
            target.mkdir(parents=True, exist_ok=True)
            with replacing(paths[name]) as copy:
                _copy(source, copy)
    return Outputs(output=str(paths[OUTPUT]), errors=str(paths[ERRORS]), summary=str(paths[SUMMARY]))


class Line(NamedTuple):
    """A line of an output file, with its newline; `good`: of `output.jsonl`."""

    good: bool
    data: bytes


def lines(store: Store, batch_id: str) -> Iterator[bytes]:
    """The lines of both files, in the order of the input; `NoOutputs` when there are none.

    Each line ends with its newline. Memory is that of two lines.
    """
    return (line.data for line in tagged(store, batch_id))


def tagged(store: Store, batch_id: str) -> Iterator[Line]:
    """As `lines`, each with the file it is from; `Damaged` for a line that answers no request."""
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_open(store, batch_id, name)) for name in (OUTPUT, ERRORS)]
        try:
            yield from _merged(*sources)
        except ValueError:
            raise Damaged(f"{store.url}/{folder(batch_id)}: a line of {OUTPUT} or {ERRORS} is damaged") from None


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


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes its name, durable, when the block ends without an exception."""
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open(store: Store, batch_id: str, name: str) -> BinaryIO:
    try:
        return store.open_read(f"{folder(batch_id)}/{name}")
    except FileNotFoundError:
        raise NoOutputs(f"{batch_id} has no {name}; 'producers status {batch_id}' says why") from None


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
