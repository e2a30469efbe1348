"""The file of `workers cache export`: it comes back as it was, or one line says why not."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest

from common.errors import UsageError
from workers.cache.archive import MAGIC, Entry, Writer, read
from workers.cache.key import KEY_BYTES


def entries(count: int, size: int) -> list[Entry]:
    make = random.Random(7)
    return [(make.randbytes(KEY_BYTES), make.randbytes(make.randrange(size))) for _ in range(count)]


def archive(held: list[Entry]) -> bytes:
    file = io.BytesIO()
    writer = Writer(file)
    for key, frame in held:
        writer.add(key, frame)
    writer.close()
    assert writer.count == len(held)
    return file.getvalue()


def back(data: bytes) -> list[Entry]:
    return [entry for block in read(io.BytesIO(data), "f") for entry in block]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 100), (500, 20_000)])
def test_it_comes_back_as_it_was(count: int, size: int) -> None:
    held = entries(count, size)
    assert back(archive(held)) == held


def test_whatever_is_cut_off_or_flipped_is_noticed() -> None:
    data = archive(entries(3, 60))
    for at in range(len(data)):
        with pytest.raises(UsageError, match=r"^f: "):
            back(data[:at])
        with pytest.raises(UsageError, match=r"^f: "):
            back(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    with pytest.raises(UsageError, match="damaged"):
        back(data + b"\0")


def test_a_block_that_was_left_out_is_noticed() -> None:
    """Each block is whole by itself, so only the end can tell."""
    big = entries(300, 20_000)
    data = archive(big)
    first = len(MAGIC) + 4 + 32 + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    with pytest.raises(UsageError, match="its end is not what was written"):
        back(MAGIC + data[first:])


def test_a_length_that_cannot_be_is_not_read(tmp_path: Path) -> None:
    """Four flipped bytes must not have gigabytes read into memory."""
    path = tmp_path / "f"
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff" + bytes(32))
    # A hole: it takes no room on the disk.
    os.truncate(path, 5 << 30)
    with path.open("rb") as file:
        with pytest.raises(UsageError, match="block 1 is not what was written"):
            list(read(file, "f"))
        assert file.tell() < 1000


def test_another_file_is_named_as_such() -> None:
    with pytest.raises(UsageError, match="is no file of"):
        back(b'{"custom_id": 1}\n')


def test_keys_of_another_version_are_refused() -> None:
    with pytest.raises(UsageError, match="keys of another kind"):
        back(archive([(b"short", b"frame")]))
