"""`workers cache …` against a real Redis server."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common import places
from common.errors import Unreachable, UsageError
from common.settings import load
from tests.support.brokers import RedisServer, redis_server
from workers.cache.finished import Tally
from workers.cache.key import Space
from workers.cache.server import COUNTS, CacheServer
from workers.cache.value import values
from workers.cli import app

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("cache-redis")) as server:
        yield server


@pytest.fixture
def server(redis_of_module: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheServer]:
    """An empty cache, which the commands see too."""
    (tmp_path / "models.yaml").write_text("models: {m@1: {source: /m}, m@2: {source: /m}, n@1: {source: /m}}\n")
    for name, value in {
        "MODELS": str(tmp_path / "models.yaml"),
        "HOME": str(tmp_path / "home"),
        "CACHE_URL": f"redis://:secret@127.0.0.1:{redis_of_module.port}/0",
        "SECURITY_RESULTS_KEY": "ab" * 32,
    }.items():
        monkeypatch.setenv(f"BATCHMILL_{name}", value)
    monkeypatch.chdir(tmp_path)
    with redis_of_module.client(0) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.execute_command("ACL", "SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")
    found = CacheServer(load(), 5)
    found.configure()
    yield found
    found.close()


@pytest.fixture
def run() -> Run:
    """Runs `workers cache …`: its text (`err`: on stderr), its JSON with `--json`, or the error it ends in."""

    def command(*argv: str, err: bool = False) -> Any:
        result = CliRunner().invoke(app, ["cache", *argv])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in argv else result.stderr if err else result.stdout

    return command


def fill(server: CacheServer, count: int, model: str = "m@1", size: int = 300) -> dict[bytes, bytes]:
    """Puts answers into the cache; what it holds then, by key."""
    sealed, space = values(load()), Space(model, "f")
    made: dict[bytes, bytes] = {}
    for number in range(count):
        key = space.key("default", 0, b'{"messages":[],"temperature":0,"seed":%d}' % number)
        assert key is not None
        made[key] = random.randbytes(size)
    entries = [(key, sealed.pack(key, body)) for key, body in made.items()]
    for at in range(0, count, 64):
        server.put(entries[at : at + 64])
    return made


def held(server: CacheServer, keys: list[bytes]) -> dict[bytes, bytes | None]:
    sealed = values(load())
    found = server.get(keys)[1]
    return {k: sealed.unpack(k, v) if v is not None else None for k, v in zip(keys, found, strict=True)}


def finished(monkeypatch: pytest.MonkeyPatch, answers: Iterable[tuple[bytes, bytes]], tally: Tally) -> list[bool]:
    """Let `warm` find a batch that has these answers; whether it asked for sampled ones too, each time."""
    asked: list[bool] = []

    class Ended:
        model = "m@1"

        def __init__(self, *_: object) -> None:
            self.tally = tally

        def answers(self, *, everything: bool) -> Iterator[tuple[bytes, bytes]]:
            asked.append(everything)
            yield from answers

    monkeypatch.setattr("workers.cache.commands.FinishedBatch", Ended)
    monkeypatch.setattr("workers.cache.commands.open_store", lambda *_, **__: None)
    return asked


def test_what_is_exported_comes_back_elsewhere(
    server: CacheServer, run: Run, tmp_path: Path, redis_of_module: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fill(server, 700) | fill(server, 5, "n@1")
    with redis_of_module.client(0) as client:
        client.set(b"bm:cache:" + b"x" * 48, "not ours")
    found = run("export", "all.bin", "--json")
    assert (found["entries"], found["unreadable"]) == (705, 1)
    assert "1 could not be read: signed with another key" in run("export", "all.bin", err=True)
    assert run("export", "n.bin", "--model", "n@1", "--json") == {
        "file": "n.bin",
        "entries": 5,
        "unreadable": 0,
        "bytes": (tmp_path / "n.bin").stat().st_size,
    }
    assert (tmp_path / "all.bin").stat().st_mode & 0o777 == 0o600
    # Into another fleet, whose key is another.
    monkeypatch.setenv("BATCHMILL_SECURITY_RESULTS_KEY", "cd" * 32)
    with pytest.raises(UsageError, match=r"none of the 706 entries.*security\.results_key"):
        run("export", "other.bin")
    assert not (tmp_path / "other.bin").exists()
    for name, count in (("n.bin", 5), ("all.bin", 705)):
        with redis_of_module.client(0) as client:
            client.flushall()
        assert run("import", name, "--json")["entries"] == count
        assert server.facts().entries == count
    assert held(server, list(made)) == made
    assert not list(tmp_path.glob(".*"))


def test_entries_go_out_by_stdout_and_in_by_stdin(
    server: CacheServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they must where the command runs in a container; what is cut off on its way changes nothing."""
    made = fill(server, 300, size=9000)
    result = CliRunner().invoke(app, ["cache", "export", "-"])
    assert result.exit_code == 0
    data = result.stdout_bytes
    assert f"-: 300 entries, {len(data):,} bytes" in result.stderr
    run("clear", "--all")
    cut = CliRunner().invoke(app, ["cache", "import", "-"], input=data[:-100])
    assert isinstance(cut.exception, UsageError)
    assert str(cut.exception).startswith("stdin: ends in the middle")
    assert server.facts().entries == 0
    assert CliRunner().invoke(app, ["cache", "import", "-", "--json"], input=data).exit_code == 0
    assert held(server, list(made)) == made
    with pytest.raises(UsageError, match="choose one"):
        run("export", "-", "--json")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    nowhere = CliRunner().invoke(app, ["cache", "import", "-"], input=data)
    assert "gone: No such file" in str(nowhere.exception)


@pytest.mark.parametrize("harm", ["cut", "flip", "other"])
def test_a_damaged_file_changes_nothing(server: CacheServer, run: Run, tmp_path: Path, harm: str) -> None:
    fill(server, 2000, size=2000)
    run("export", "all.bin")
    run("clear", "--all")
    file = tmp_path / "all.bin"
    data = file.read_bytes()
    at = len(data) - 200
    harmed = {"cut": data[:at], "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "other": b"{}\n"}[harm]
    file.write_bytes(harmed)
    with pytest.raises(UsageError, match=r"all\.bin: "):
        run("import", "all.bin")
    assert server.facts().entries == 0


def test_export_and_import_hold_little_memory(server: CacheServer, run: Run) -> None:
    """40 MB of answers go through less than a quarter of it."""
    fill(server, 2000, size=20_000)
    run("stats")
    tracemalloc.start()
    try:
        run("export", "all.bin")
        run("import", "all.bin")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_clear_removes_a_model_and_nothing_else(server: CacheServer, run: Run) -> None:
    one, two, other = fill(server, 30, "m@1"), fill(server, 20, "m@2"), fill(server, 10, "n@1")
    epoch = server.get([])[0]
    assert run("clear", "--model", "m@1", "--json") == {"model": "m@1", "removed": 30}
    assert server.get([])[0] != epoch
    assert set(held(server, list(one)).values()) == {None}
    assert held(server, list(two)) == two
    assert "20 entries removed" in run("clear", "--model", "m")
    assert held(server, list(other)) == other
    assert run("clear", "--all", "--json")["removed"] == 10
    with pytest.raises(UsageError, match="no model 'x'"):
        run("clear", "--model", "x")
    for wrong in ((), ("--all", "--model", "m@1")):
        with pytest.raises(UsageError, match="--model"):
            run("clear", *wrong)


def test_clear_tells_workers_before_and_after(server: CacheServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, so that none gives what is about to go; after, for what one put back from its own memory meanwhile."""
    fill(server, 100)
    seen: list[tuple[bytes, int]] = []
    drop = CacheServer.drop

    def dropped(self: CacheServer, keys: Sequence[bytes]) -> int:
        seen.append((self.get([])[0], len(keys)))
        return drop(self, keys)

    monkeypatch.setattr(CacheServer, "drop", dropped)
    before = server.get([])[0]
    run("clear", "--all")
    assert sum(count for _, count in seen) >= 100
    during = {epoch for epoch, _ in seen}
    assert len(during) == 1
    assert len({before, *during, server.get([])[0]}) == 3


def test_stats_tell_what_is_there(server: CacheServer, run: Run) -> None:
    fill(server, 12)
    server.count("m@1", {"hits": 3, "misses": 1, "written": 12})
    found = run("stats", "--json")
    assert found["models"] == {"m@1": {"hits": 3, "misses": 1, "written": 12}}
    assert (found["entries"], found["policy"], found["capacity_bytes"]) == (12, "evicts", 1 << 30)
    text = run("stats")
    assert "75.0%" in text
    assert "secret" not in text + found["url"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_command_changes_nothing_of_how_the_workers_set_the_server_up(
    server: CacheServer, run: Run, redis_of_module: RedisServer, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The shell of whoever types it may know another capacity."""
    monkeypatch.setenv("BATCHMILL_CACHE_CAPACITY_GB", "0.25")
    with redis_of_module.client(0) as client:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        if shared:
            client.set("somebody's", "own")
    workers = CacheServer(load(), 5)
    workers.configure()
    fill(workers, 40, size=5000)
    workers.close()
    monkeypatch.setenv("BATCHMILL_CACHE_CAPACITY_GB", "0.01")
    run("export", "all.bin")
    run("import", "all.bin")
    found = run("stats", "--json")
    assert (found["capacity_bytes"], found["entries"]) == (1 << 28, 40)
    assert found["policy"] == ("counts" if shared else "evicts")
    with redis_of_module.client(0) as client:
        assert client.config_get("maxmemory") == {"maxmemory": "0" if shared else str(1 << 28)}


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_written_and_pushed_out_again_is_not_said_to_be_there(
    server: CacheServer, run: Run, redis_of_module: RedisServer, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """On a server whose own bound is far below what the cache may have."""
    made = fill(server, 3000, size=2000)
    assert run("export", "all.bin", "--json")["entries"] == 3000
    bound = 4 << 20
    with redis_of_module.client(0) as client:
        client.flushall()
        if shared:
            client.set("somebody's", "own")
            client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", bound)

    finished(monkeypatch, made.items(), Tally(lines=3001, determined=3000))
    for argv, count in ((("import", "all.bin"), "entries"), (("warm", "--from", "batch_x"), "determined")):
        done = run(*argv, "--json")
        there = sum(
            value is not None for at in range(0, 3000, 500) for value in held(server, [*made][at : at + 500]).values()
        )
        assert done[count] == 3000
        assert done["written"] + done["pushed_out"] == 3000
        assert 0 < done["written"] == there < 2500
        assert done["capacity_bytes"] == bound
        said = run(*argv)
        assert f"{done[count]:,}" in said
        assert "all of them" not in said
        assert "pushed out again" in said
    found = run("stats", "--json")
    assert found["policy"] == ("counts" if shared else "evicts")
    assert found["capacity_bytes"] == found["server_limit_bytes"] == bound
    assert found["bytes"] <= found["server_bytes"]
    assert "of 4.0 MB" in run("stats")


def test_the_embedded_fleets_key_counts_for_a_cache_of_ones_own(
    server: CacheServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers sign with a key that the fleet made, which nobody has to know; on a server that one named too."""
    made = fill(server, 3)
    settings = places.fleet_dir() / "settings.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"{{cache: {{url: 'redis://127.0.0.1:1/0'}}, security: {{results_key: '{'ab' * 32}'}}}}")
    monkeypatch.delenv("BATCHMILL_SECURITY_RESULTS_KEY")
    assert run("export", "all.bin", "--json")["entries"] == 3
    run("clear", "--all")
    assert run("import", "all.bin", "--json")["written"] == 3
    monkeypatch.setenv("BATCHMILL_SECURITY_RESULTS_KEY", "ab" * 32)
    assert held(server, list(made)) == made


def test_warm_takes_what_the_model_keeps_and_says_what_it_left_out(
    server: CacheServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(b"a" * 48, b"{}"), (b"b" * 48, bytes((4 << 20) + 1))]
    asked = finished(monkeypatch, answers, Tally(lines=4, determined=2, unmarked=1))
    done = run("warm", "--from", "batch_x", "--json")
    assert [done[n] for n in ("lines", "determined", "written", "too_large", "pushed_out")] == [4, 2, 1, 1, 0]
    said = run("warm", "--from", "batch_x", err=True)
    assert "1 are larger than an entry may be" in said
    assert "1 lines carry no fingerprint" in said
    (tmp_path / "models.yaml").write_text("models: {m@1: {source: /m, cache: all}}\n")
    run("warm", "--from", "batch_x")
    assert asked == [False, False, True]
    (tmp_path / "models.yaml").write_text("models: {m@1: {source: /m, cache: off}}\n")
    with pytest.raises(UsageError, match="cache: off"):
        run("warm", "--from", "batch_x")
    (tmp_path / "models.yaml").write_text("models: {}\n")
    finished(monkeypatch, [], Tally(lines=4, unmarked=4))
    with pytest.raises(UsageError, match="no fingerprint"):
        run("warm", "--from", "batch_x")


def test_what_cannot_be_reached_or_is_not_there_is_one_line(
    server: CacheServer, run: Run, redis_of_module: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no-such-file: No such file"):
        run("import", "no-such-file")
    with pytest.raises(UsageError, match=r"/proc/x\.bin"):
        run("export", "/proc/x.bin")
    with pytest.raises(UsageError, match="is not a batch id"):
        run("warm", "--from", "x")
    monkeypatch.setenv("BATCHMILL_CACHE_URL", "redis://:secret@127.0.0.1:1/0")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1/0 does not answer") as caught:
        run("stats")
    assert "secret" not in str(caught.value)
    with redis_of_module.client(0) as client:
        client.acl_deluser("nobody")
    monkeypatch.setenv("BATCHMILL_CACHE_URL", f"redis://nobody:secret@127.0.0.1:{redis_of_module.port}/0")
    with pytest.raises(Unreachable, match="refuses to log us in"):
        run("stats")
    monkeypatch.delenv("BATCHMILL_CACHE_URL")
    with pytest.raises(UsageError, match=r"cache\.url is not set"):
        run("stats")
    # The settings of a fleet that is down.
    socket = places.fleet_dir() / "redis.sock"
    socket.parent.mkdir(parents=True, exist_ok=True)
    (socket.parent / "settings.yaml").write_text(f"cache: {{url: 'unix://{socket}?db=1'}}")
    with pytest.raises(Unreachable, match=r"the embedded fleet is not up.*producers fleet up"):
        run("stats")


def test_what_others_put_among_its_figures_is_no_defect(server: CacheServer, run: Run) -> None:
    server.count("m@1", {"hits": 2})
    server._redis.hset(COUNTS, mapping={"foo": "abc", "m@1:misses": "abc", "x": b"\xff"})
    assert run("stats", "--json")["models"] == {"m@1": {"hits": 2, "misses": 0, "written": 0}}
    server._redis.set(COUNTS, "abc")
    with pytest.raises(UsageError, match="something else under a name of the cache"):
        run("stats")
