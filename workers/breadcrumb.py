"""The breadcrumb: a file that names, at every moment, the requests inside the engine.

It is mapped into memory, so a request costs two small copies and no call of the kernel, and what was written stands in
the file when the process is killed: the pages are the kernel's. The supervisor reads it then and reports it, so that
only requests that were inside are suspects. It holds ids and positions, never a prompt; a worker that ends as it should
removes it. It is made when the engine is ready, so an end that leaves none is a failed start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common import places
from common.messages import Chunk

#: Set by the supervisor for its children: where theirs lies.
BREADCRUMB = "BATCHMILL_BREADCRUMB"

#: Chunks that may be held at a time (`workers.pool.MAX_THREADS`).
_CHUNKS = 64
_MAGIC = b"BMCRUMB1"
#: Magic, length of the JSON that follows, chunks, slots.
_HEAD = struct.Struct("<8sIII")
_HEAD_SIZE = 1024
#: `used` stands last, so that it is written last: chunk id, reply_to, used.
_CHUNK = struct.Struct("<32s16sI")
#: Batch id, index of the chunk, position, used.
_SLOT = struct.Struct("<32sIII")
_USED = struct.Struct("<I")


def path_of(settings_url: str, node: str, env: Mapping[str, str] = os.environ) -> Path:
    """Where the breadcrumb of a worker lies; `settings_url` is its broker's, since a machine may serve two fleets."""
    tag = hashlib.blake2s(settings_url.encode(), digest_size=4).hexdigest()
    return places.run_dir(env) / f"{node}.{tag}.crumb"


class Breadcrumb:
    """Written by one worker. `enter` and `leave` on the engine's loop; `hold` and `release` from any thread."""

    def __init__(self, path: Path, *, node: str, model: str, life: str, slots: int) -> None:
        """Make the file, its size fixed: `slots` requests inside at a time. Raises `OSError`."""
        facts = json.dumps({"node": node, "model": model, "life": life}).encode()
        size = _HEAD_SIZE + _CHUNKS * _CHUNK.size + slots * _SLOT.size
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._slots_at = _HEAD_SIZE + _CHUNKS * _CHUNK.size
        self._free_slots = list(range(slots))
        self._free_chunks = list(range(_CHUNKS))
        self._lock = threading.Lock()
        # Never what an earlier life left there: its file may be on its way to the coordinator.
        temporary = path.with_suffix(".new")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Its blocks too: a write into a hole of a full disk would end the process with SIGBUS.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        _HEAD.pack_into(self._map, 0, _MAGIC, len(facts), _CHUNKS, slots)
        self._map[_HEAD.size : _HEAD.size + len(facts)] = facts
        os.replace(temporary, path)

    def hold(self, chunk: Chunk) -> int:
        """A chunk is taken up; returns its number for `enter` and `release`, -1 when there is no room."""
        with self._lock:
            if not self._free_chunks:
                return -1
            number = self._free_chunks.pop()
        _CHUNK.pack_into(
            self._map, _HEAD_SIZE + number * _CHUNK.size, chunk.id.encode()[:32], chunk.reply_to.encode()[:16], 1
        )
        return number

    def release(self, number: int) -> None:
        """A chunk is settled or given back."""
        if number < 0:
            return
        _USED.pack_into(self._map, _HEAD_SIZE + (number + 1) * _CHUNK.size - _USED.size, 0)
        with self._lock:
            self._free_chunks.append(number)

    def enter(self, chunk: int, batch: bytes, position: int) -> int:
        """A request goes into the engine; returns its slot for `leave`, -1 when there is no room."""
        if chunk < 0 or not self._free_slots:
            return -1
        slot = self._free_slots.pop()
        _SLOT.pack_into(self._map, self._slots_at + slot * _SLOT.size, batch, chunk, position, 1)
        return slot

    def rename(self, slot: int, chunk: int, batch: bytes, position: int) -> None:
        """What is inside is another request's now: the one that it was begun for is given up."""
        if slot >= 0 and chunk >= 0:
            _SLOT.pack_into(self._map, self._slots_at + slot * _SLOT.size, batch, chunk, position, 1)

    def leave(self, slot: int) -> None:
        """A request is answered, aborted or failed."""
        if slot >= 0:
            _USED.pack_into(self._map, self._slots_at + (slot + 1) * _SLOT.size - _USED.size, 0)
            self._free_slots.append(slot)

    def remove(self) -> None:
        """The worker ends as it should."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


@dataclass
class HeldChunk:
    """A chunk that a worker held when it ended. `inside`: batch → positions that were in its engine."""

    id: str
    reply_to: str
    inside: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Crumb:
    """What a breadcrumb says."""

    node: str
    model: str
    #: Which process it was.
    life: str
    chunks: list[HeldChunk]


def read(path: Path) -> Crumb | None:
    """What the file says; None when there is none, or it is not one of ours."""
    try:
        raw = path.read_bytes()
        magic, length, chunks, slots = _HEAD.unpack_from(raw)
        if magic != _MAGIC:
            return None
        facts = json.loads(raw[_HEAD.size : _HEAD.size + length])
        held: dict[int, HeldChunk] = {}
        for number in range(chunks):
            name, reply_to, used = _CHUNK.unpack_from(raw, _HEAD_SIZE + number * _CHUNK.size)
            if used:
                held[number] = HeldChunk(_text(name), _text(reply_to))
        for slot in range(slots):
            at = _HEAD_SIZE + chunks * _CHUNK.size + slot * _SLOT.size
            batch, number, position, used = _SLOT.unpack_from(raw, at)
            if used and number in held:
                held[number].inside.setdefault(_text(batch), []).append(position)
        return Crumb(facts["node"], facts["model"], facts["life"], list(held.values()))
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii")
