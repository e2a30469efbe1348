"""Which segments a leader found when it took over: one that an earlier leader begins after that does not count.

A seal says how much of a segment counts; this says which segments do. Each leader writes one, `<epoch>.manifest`,
before its own first record, and the latest one holds.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.logs import get
from common.store import sync_folder
from producers.coordinator.segments import Name

log = get(__name__)

_SUFFIX = ".manifest"


class Manifest(msgspec.Struct, frozen=True):
    """The segments of leaders before `epoch` that count."""

    epoch: int
    segments: frozenset[str]
    crc: int

    def counts(self, name: Name) -> bool:
        """Whether a segment counts, as far as this says."""
        return name.epoch >= self.epoch or str(name) in self.segments


def latest(folder: Path, before: int) -> Manifest | None:
    """The manifest of the last leader before epoch `before` that wrote one which can be read."""
    for epoch in sorted((e for e in epochs(folder) if e < before), reverse=True):
        try:
            found = msgspec.json.decode(path_of(folder, epoch).read_bytes(), type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError):
            found = None
        if found is not None and (found.epoch, found.crc) == (epoch, _crc(epoch, sorted(found.segments))):
            return found
        log.error("manifest_damaged", epoch=epoch)
    return None


def write(folder: Path, epoch: int, names: Sequence[str]) -> None:
    """Write a leader's manifest, durable, and remove those of earlier ones."""
    target = path_of(folder, epoch)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(msgspec.json.encode(Manifest(epoch, frozenset(names), _crc(epoch, sorted(names)))))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    sync_folder(folder)
    for earlier in epochs(folder):
        if earlier < epoch:
            path_of(folder, earlier).unlink(missing_ok=True)


def epochs(folder: Path) -> list[int]:
    """The leaders that wrote one."""
    return [epoch for name in os.listdir(folder) if (epoch := epoch_of(name)) is not None]


def epoch_of(name: str) -> int | None:
    """Whose manifest a file is; None for other files."""
    stem = name.removesuffix(_SUFFIX)
    return int(stem) if stem != name and stem.isdigit() else None


def path_of(folder: Path, epoch: int) -> Path:
    """Where the manifest of a leader lies."""
    return folder / f"{epoch:08d}{_SUFFIX}"


def _crc(epoch: int, names: Sequence[str]) -> int:
    return zlib.crc32(" ".join([str(epoch), *names]).encode())
