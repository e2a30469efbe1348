"""The digest of a model folder: which weights answered is part of every result's meaning.

It is blake3 over one line a file, `<64 hex of its content>  <name>`, in order of the names; hidden files do not count.
The same by hand, in the folder (with b3sum):

    find . -type f -not -path '*/.*' -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 b3sum | b3sum
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

_PREFIX = "blake3:"


class FileDigest(msgspec.Struct, frozen=True):
    """One file: its name below the folder, bytes, time of its last change, blake3 of its content in hex."""

    name: str
    size: int
    mtime_ns: int
    blake3: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What was found when a model came to this machine; kept beside its folder as JSON."""

    model: str
    source: str
    digest: str
    #: What a branch or tag meant when it was pulled.
    revision: str | None = None
    pulled_at: float = 0.0
    files: list[FileDigest] = []


def files_of(folder: Path) -> list[Path]:
    """The files that count, in order of their names' bytes. `FileNotFoundError` when the folder is not there."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix().encode())


def digest_files(folder: Path) -> list[FileDigest]:
    """Read every file of the folder."""
    found = []
    for path in files_of(folder):
        stat = path.stat()
        hasher = blake3(max_threads=blake3.AUTO)
        if stat.st_size:
            hasher.update_mmap(path)
        name = path.relative_to(folder).as_posix()
        found.append(FileDigest(name, stat.st_size, stat.st_mtime_ns, hasher.hexdigest()))
    return found


def combine(files: Sequence[FileDigest]) -> str:
    """The folder's digest, `blake3:<64 hex>`, out of its files'."""
    hasher = blake3()
    for file in files:
        hasher.update(f"{file.blake3}  {file.name}\n".encode())
    return _PREFIX + hasher.hexdigest()


def unchanged(folder: Path, record: Record) -> bool:
    """True when names, sizes and times of change are those of the record: then nothing has to be read again."""
    stats = [(p.relative_to(folder).as_posix(), p.stat()) for p in files_of(folder)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats] == [
        (file.name, file.size, file.mtime_ns) for file in record.files
    ]


def difference(found: Sequence[FileDigest], recorded: Sequence[FileDigest]) -> str:
    """The first file that differs, in words."""
    now = {file.name: file for file in found}
    then = {file.name: file for file in recorded}
    for name in sorted(now.keys() | then.keys()):
        if name not in now:
            return f"{name} is missing"
        if name not in then:
            return f"{name} was added"
        if now[name].size != then[name].size:
            return f"{name} has {now[name].size} bytes, {then[name].size} were recorded"
        if now[name].blake3 != then[name].blake3:
            return f"the content of {name} differs"
    return "no file differs"


def read_record(path: Path) -> Record | None:
    """The record in a file; None when there is none that can be read (it is made again then)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(path: Path, record: Record) -> None:
    """Write or replace a record, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    temporary.replace(path)
