"""Sources and lines: whatever the borders of blocks and the compression, the lines are those of the file."""

from __future__ import annotations

import gzip
import http.server
import io
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from common.errors import InvalidInput, Unreachable, UsageError
from producers.intake import source as source_module
from producers.intake.reader import ENDLESS, read_lines
from producers.intake.source import open_source, open_stream

text = st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\r", b"\xff", "é\u2028\u0085".encode(), b"bb"])).map(b"".join)


def cut(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    borders = sorted({c for c in cuts if c < len(data)} | {0, len(data)})
    return (data[a:b] for a, b in itertools.pairwise(borders))


def open_bytes(data: bytes, name: str) -> source_module.Source:
    return open_stream(io.BytesIO(data), name)


def lines_of(blocks: Iterator[bytes], longest: int) -> list[bytes | None]:
    return [line for lines in read_lines(blocks, longest) for line in lines.lines]


@given(text, st.lists(st.integers(1, 200)), st.integers(1, 30))
def test_lines_do_not_depend_on_blocks(data: bytes, cuts: list[int], longest: int) -> None:
    assume(len(data) <= ENDLESS * longest)
    naive: list[bytes | None] = [
        line if len(line.removesuffix(b"\r")) <= longest else None for line in data.split(b"\n")
    ]
    if (naive and data.endswith(b"\n")) or not data:
        naive.pop()
    assert lines_of(cut(data, cuts), longest) == naive


@given(text, st.lists(st.integers(1, 200)))
def test_what_is_not_utf8_is_never_missed(data: bytes, cuts: list[int]) -> None:
    for lines in read_lines(cut(data, cuts), 1000):
        for line in lines.lines:
            assert line is not None
            if lines.utf8:
                line.decode()


def test_only_line_feeds_end_lines() -> None:
    data = "a\u2028b\u2029c\u0085d\x0b\x0ce\x1c\x1d\x1ef\r\ng\rh".encode()
    assert lines_of(iter([data]), 1000) == [*data.split(b"\n")]


def test_a_long_line_is_let_go_as_it_is_read() -> None:
    held = 0

    def blocks() -> Iterator[bytes]:
        yield b"first\n"
        for _ in range(200):
            yield b"x" * 1000
        yield b"\nlast"

    for lines in read_lines(blocks(), 5000):
        held = max([held, *(len(line or b"") for line in lines.lines)])
    assert held <= 5000
    assert lines_of(blocks(), 5000) == [b"first", None, b"last"]


def test_a_line_without_an_end_is_given_up() -> None:
    read = 0

    def blocks() -> Iterator[bytes]:
        nonlocal read
        yield b"first\n"
        while True:
            read += 1000
            yield b"\0" * 1000

    found = list(read_lines(blocks(), 5000))
    assert [(lines.lines, lines.endless) for lines in found] == [([b"first"], False), ([None], True)]
    assert read <= (ENDLESS + 1) * 5000


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_a_device_is_no_file(path: str) -> None:
    with pytest.raises(UsageError, match="is a device; name a file"):
        open_source(path)
    with open_source("/dev/null") as empty:
        assert list(empty.blocks()) == []


DATA = b"".join(b'{"custom_id":"%d","body":{}}\n' % n for n in range(40_000))


def content(path: str) -> bytes:
    with open_source(path) as source:
        found = b"".join(source.blocks())
        assert source.broken is None
        source.verify()
        return found


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".2.gz", ".2.zst", ".long.zst", ".padded.gz"])
def test_all_packings_give_the_same(tmp_path: Path, suffix: str) -> None:
    half = len(DATA) // 2
    zstd = zstandard.ZstdCompressor()
    streamed = zstandard.ZstdCompressor().compressobj()
    packed = {
        "": DATA,
        ".gz": gzip.compress(DATA),
        ".zst": zstd.compress(DATA),
        # Members and frames one after the other, as `cat a.gz b.gz` and pzstd make them.
        ".2.gz": gzip.compress(DATA[:half]) + gzip.compress(DATA[half:]),
        ".2.zst": zstd.compress(DATA[:half]) + b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstd.compress(DATA[half:]),
        ".long.zst": streamed.compress(DATA) + streamed.flush(),
        ".padded.gz": gzip.compress(DATA) + b"\0" * 700_000,
    }[suffix]
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(packed)
    assert content(str(path)) == DATA
    # By its bytes, not its name.
    other = tmp_path / "other"
    other.write_bytes(packed)
    assert content(f"file://{other}") == DATA
    with open_source(str(path)) as source:
        for _ in source.blocks():
            pass
        facts = source.facts()
    assert (facts.bytes, facts.digest) == (len(packed), blake3(packed).hexdigest())


@pytest.mark.parametrize("share", [0.2, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_data_that_is_cut_off_is_noticed(kind: str, share: float) -> None:
    packed = gzip.compress(DATA) if kind == "gz" else zstandard.ZstdCompressor().compress(DATA)
    with open_bytes(packed[: int(len(packed) * share)], "x") as source:
        found = b"".join(source.blocks())
    assert DATA.startswith(found)
    assert source.broken is not None
    assert "ends in the middle" in source.broken


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_is_noticed(kind: str) -> None:
    packed = bytearray(
        gzip.compress(DATA) if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
    )
    packed[len(packed) // 2] ^= 0xFF
    with open_bytes(bytes(packed), "x") as source:
        for _ in source.blocks():
            pass
    assert source.broken is not None


def test_rubbish_after_the_data_is_noticed() -> None:
    for packed in (gzip.compress(DATA), zstandard.ZstdCompressor().compress(DATA)):
        with open_bytes(packed + b"rubbish", "x") as source:
            assert b"".join(source.blocks()) == DATA
        assert source.broken is not None


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_bomb_is_unpacked_in_bounded_pieces(kind: str) -> None:
    zeros = bytes(64 << 20)
    packed = gzip.compress(zeros) if kind == "gz" else zstandard.ZstdCompressor().compress(zeros)
    with open_bytes(packed, "x") as source:
        sizes = [len(block) for block in source.blocks()]
    assert sum(sizes) == len(zeros)
    assert max(sizes) <= 33 << 20


def test_a_bom_is_dropped_only_at_the_start() -> None:
    bom = b"\xef\xbb\xbf"
    with open_bytes(bom + b"a\n" + bom + b"b", "x") as source:
        assert b"".join(source.blocks()) == b"a\n" + bom + b"b"
    with open_bytes(bom, "x") as source:
        assert list(source.blocks()) == []


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("hi".encode("utf-16"), "UTF-16"),
        (b"BZh9", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1....", "Parquet"),
    ],
)
def test_foreign_files_are_named(data: bytes, what: str) -> None:
    with open_bytes(data, "x.jsonl") as source, pytest.raises(UsageError, match=rf"x\.jsonl: is .*{what}"):
        list(source.blocks())


def test_standard_input(tmp_path: Path) -> None:
    code = (
        "import sys; from producers.intake.source import open_source\n"
        "with open_source('-') as s: sys.stdout.buffer.write(b''.join(s.blocks()))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=DATA, capture_output=True, timeout=60, check=True)
    assert done.stdout == DATA
    closed = subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "{code}" <&-'], capture_output=True, timeout=60, check=False
    )
    assert b"standard input: cannot be read" in closed.stderr


def test_a_pipe_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(DATA))
    writer.start()
    assert content(str(path)) == DATA
    writer.join()


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"

    def append() -> None:
        with open(path, "ab") as file:
            file.write(b"more\n")

    def replace() -> None:
        (tmp_path / "new").write_bytes(DATA)
        (tmp_path / "new").replace(path)

    def rewrite() -> None:
        with open(path, "r+b") as file:
            file.write(b"[")
        os.utime(path, ns=(0, 0))

    for change in (append, replace, rewrite, path.unlink):
        path.write_bytes(DATA)
        with open_source(str(path)) as source:
            blocks = source.blocks()
            next(blocks)
            change()
            for _ in blocks:
                pass
            with pytest.raises(InvalidInput, match=r"in\.jsonl: changed while it was read"):
                source.verify()


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="none: there is no such file"):
        open_source(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="is a folder; name a file"):
        open_source(str(tmp_path))
    with pytest.raises(UsageError, match="cannot be opened"):
        open_source("nosuchscheme://x/y")
    with pytest.raises(UsageError, match="there is no such file"):
        open_source("memory://none.jsonl")

    # Tests may run as root, whom no mode keeps out.
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("producers.intake.source.io.FileIO", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        open_source(str(tmp_path / "secret"))


def test_a_disk_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def read(self, size: int) -> bytes:
            raise OSError(5, "Input/output error")

        def close(self) -> None:
            pass

    source = source_module.Source("bad.jsonl", Failing())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"bad\.jsonl: cannot be read: Input/output error"):
        list(source.blocks())


def test_a_stream_stays_open_and_speaks_for_itself() -> None:
    class Broken:
        def read(self, size: int) -> bytes:
            raise LookupError("the caller's own")

    stream = io.BytesIO(DATA)
    with open_stream(stream, "s") as source:
        assert b"".join(source.blocks()) == DATA
        source.verify()
    assert not stream.closed
    with pytest.raises(LookupError, match="the caller's own"):
        list(open_stream(Broken(), "s").blocks())  # type: ignore[arg-type]


def test_urls_are_read_through_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/intake/in.jsonl.gz", gzip.compress(DATA))
    assert content("memory://intake/in.jsonl.gz") == DATA
    with pytest.raises(UsageError, match="is a folder"):
        open_source("memory://intake")
    with open_source("memory://intake/in.jsonl.gz") as source:
        for _ in source.blocks():
            pass
        fs.pipe_file("/intake/in.jsonl.gz", b"other")
        with pytest.raises(InvalidInput, match="changed while it was read"):
            source.verify()

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the service is down")

    monkeypatch.setattr(type(fs), "info", fail)
    with pytest.raises(Unreachable, match="the service is down"):
        open_source("memory://intake/in.jsonl.gz")


class _Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request by the status that its path names."""

    def do_GET(self) -> None:
        self.send_error(int(self.path.strip("/")))

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_server_that_does_not_answer_is_no_missing_file() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UsageError, match="there is no such file"):
            open_source(f"{base}/404")
        for status in ("503", "403"):
            with pytest.raises(Unreachable, match=status):
                open_source(f"{base}/{status}")
        server.shutdown()
    with pytest.raises(Unreachable, match="cannot be opened"):
        open_source(f"{base}/404")
