"""The parts of the result cache that need no server: the small cache in front, the breaker, values, fingerprints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from common.errors import UsageError
from common.registry import ModelVersion
from common.settings import load
from tests.support.chunks import make_chunk
from workers import cli
from workers.cache import commands
from workers.cache.breaker import Breaker
from workers.cache.fingerprint import fingerprint
from workers.cache.key import Space
from workers.cache.local import OVERHEAD, LocalCache
from workers.cache.server import CacheServer
from workers.cache.uncached import Uncached
from workers.cache.value import MAX_BODY, Values
from workers.engine.base import EngineFacts
from workers.models.digest import combine, digest_files


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_recently_used_goes_first() -> None:
    cache = LocalCache(3 * (OVERHEAD + 10))
    for name in (b"a", b"b", b"c"):
        cache.put(name, name * 10)
    assert cache.get(b"a") == b"a" * 10
    cache.put(b"d", b"d" * 10)
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name) is not None] == [b"a", b"c", b"d"]


def test_a_wish_for_a_cache_that_is_not_there_is_said_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Log:
        def warning(self, _: str, *, batch: str, cache: str) -> None:
            said.append(batch)

    monkeypatch.setattr("workers.cache.uncached.log", Log())
    uncached = Uncached()
    first, second = (make_chunk([b"{}"], "m@1", batch=batch, cache="on") for batch in ("batch_a", "batch_b"))
    for chunk in (first, first, second, first):
        uncached.note(chunk)
    assert said == ["batch_a", "batch_b"]


def test_it_never_holds_more_than_it_may() -> None:
    cache = LocalCache(5000)
    for number in range(500):
        cache.put(b"%d" % (number % 40), b"x" * (number * 37 % 1500))
        assert cache.bytes <= 5000
    assert cache.bytes == sum(len(cache.get(b"%d" % n) or b"") + OVERHEAD for n in range(40) if cache.get(b"%d" % n))
    cache.put(b"huge", b"x" * 5000)
    assert cache.get(b"huge") is None
    cache.clear()
    assert (cache.bytes, len(cache)) == (0, 0)


def test_an_entry_does_not_outlive_its_time() -> None:
    clock = Clock()
    cache = LocalCache(1 << 20, ttl_s=10, clock=clock)
    cache.put(b"a", b"x")
    clock.now = 9.0
    assert cache.get(b"a") == b"x"
    clock.now = 10.0
    assert cache.get(b"a") is None
    cache.put(b"b", b"x", left_s=2.0)
    clock.now = 12.0
    assert cache.get(b"b") is None, "it was there a while before it came here"
    assert cache.bytes == 0


def test_a_breaker_asks_rarely_and_only_one_asks() -> None:
    clock = Clock()
    breaker = Breaker(5.0, clock)
    assert breaker.closed
    assert not breaker.due()
    assert breaker.open()
    assert not breaker.open()
    assert not breaker.closed
    assert not breaker.due()
    clock.now = 5.0
    assert [breaker.due(), breaker.due()] == [True, False]
    clock.now = 10.0
    assert breaker.due()
    breaker.close()
    assert breaker.closed


KEY, OTHER = b"k" * 48, b"o" * 48


def test_only_what_the_fleet_wrote_for_this_key_is_an_answer() -> None:
    values = Values([b"1" * 32])
    value = values.pack(KEY, b'{"a":1}')
    assert values.unpack(KEY, value) == b'{"a":1}'
    assert values.unpack(OTHER, value) is None
    assert Values([b"2" * 32]).unpack(KEY, value) is None
    for at in range(len(value)):
        assert values.unpack(KEY, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]) is None
        assert values.unpack(KEY, value[:at]) is None


def test_values_are_compressed() -> None:
    body = msgspec.json.encode({"choices": [{"text": f"answer {n} to a question"} for n in range(200)]})
    assert len(Values([b"1" * 32]).pack(KEY, body)) < len(body) / 5


def test_a_key_that_is_being_replaced_still_counts() -> None:
    value = Values([b"1" * 32]).pack(KEY, b"{}")
    assert Values([b"2" * 32, b"1" * 32]).unpack(KEY, value) == b"{}"


def test_a_frame_that_unpacks_to_too_much_is_left_alone() -> None:
    values = Values([b"1" * 32])
    assert values.unpack(KEY, values.seal(KEY, zstandard.compress(bytes(MAX_BODY + 1)))) is None
    assert values.unpack(KEY, values.seal(KEY, b"no frame at all")) is None


def entry(**engine: Any) -> ModelVersion:
    return ModelVersion(source="/m", engine=engine)


def facts(
    digest: str = "blake3:1", engine: str = "vllm 0.32.0", *, seqs: int = 8, length: int = 100, **more: Any
) -> EngineFacts:
    return EngineFacts(
        engine=engine,
        model="m@1",
        device="gpu 0",
        max_num_seqs=seqs,
        max_model_len=length,
        detail={"digest": digest} | more,
    )


@pytest.mark.parametrize(
    "argument",
    [
        "async-scheduling",
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "gpu-memory-utilization",
        "kv_cache_memory_bytes",
        "kv_offloading_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "scheduling_policy",
        "swap_space",
    ],
)
def test_what_does_not_change_answers_keeps_the_fingerprint(argument: str) -> None:
    """How much an engine holds and how fast it goes: `workers tune` changes these, and the entries stay."""
    first = fingerprint("m@1", entry(), facts())
    assert fingerprint("m@1", entry(**{argument: 8}), facts(seqs=64, start_s=3.5)) == first
    assert len(first) == 16


def test_the_context_counts_as_the_engine_has_it() -> None:
    """However it came to it: an answer that one cuts short another one goes on with."""
    said = [fingerprint("m@1", entry(max_model_len=text), facts(length=4000)) for text in ("4k", 4000, "auto")]
    assert len(set(said)) == 1
    assert fingerprint("m@1", entry(), facts(length=2000)) != said[0]


@pytest.mark.parametrize(
    ("version", "changed", "said"),
    [
        ("m@2", {}, facts()),
        ("m@1", {}, facts("blake3:2")),
        ("m@1", {}, facts(engine="vllm 0.33.0")),
        ("m@1", {}, facts(dtype="float16")),
        ("m@1", {}, facts(tensor_parallel=2)),
        *(
            ("m@1", {argument: "x"}, facts())
            for argument in (
                "attention_config",
                "chat_template_content_format",
                "compilation_config",
                "default_chat_template_kwargs",
                "dtype",
                "enable_auto_tool_choice",
                "enforce_eager",
                "generation_config",
                "hf_overrides",
                "kv_cache_dtype",
                "limit_mm_per_prompt",
                "logits_processors",
                "lora_modules",
                "mm_processor_kwargs",
                "override_generation_config",
                "quantization",
                "reasoning_parser",
                "rope_scaling",
                "seed",
                "speculative_config",
                "structured_outputs_config",
                "tokenizer",
                "tokenizer_mode",
                "tool_call_parser",
            )
        ),
        ("m@1", {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, facts()),
        ("m@1", {"some_argument_of_tomorrow": 1}, facts()),
    ],
)
def test_what_changes_answers_changes_the_fingerprint(version: str, changed: dict[str, Any], said: EngineFacts) -> None:
    assert fingerprint(version, entry(**changed), said) != fingerprint("m@1", entry(), facts())


@pytest.mark.parametrize(
    "argument",
    [
        {"chat_template": "FOLDER/t.jinja"},
        {"tokenizer": "FOLDER"},
        {"lora_modules": [{"name": "a", "path": "FOLDER"}]},
        {"lora-modules": ["a=FOLDER"]},
        {"speculative_config": {"model": "FOLDER"}},
        {"speculative_config": '{"model": "FOLDER"}'},
    ],
)
def test_what_an_argument_names_counts_by_its_content(tmp_path: Path, argument: dict[str, Any]) -> None:
    """A chat template, a tokenizer, an adapter; a rollback has the old fingerprint again."""
    with_it = entry(**msgspec.json.decode(msgspec.json.encode(argument).replace(b"FOLDER", bytes(tmp_path))))
    made = []
    for content in ("{{ a }}", "{{ b }}", "{{ a }}"):
        (tmp_path / "t.jinja").write_text(content)
        made.append(fingerprint("m@1", with_it, facts()))
    assert made[0] != made[1]
    assert made[0] == made[2]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_changed_model_folder_is_a_new_space_and_a_rollback_the_old_one(tmp_path: Path, name: str) -> None:
    """The digest of the folder is how weights, tokenizer and template come into every key."""

    def key() -> bytes | None:
        said = facts(combine(digest_files(tmp_path)))
        return Space("m@1", fingerprint("m@1", entry(), said)).key("t", 0, b'{"messages":[],"temperature":0}')

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / name).write_text("one")
    first = key()
    (tmp_path / name).write_text("two")
    second = key()
    (tmp_path / name).write_text("one")
    assert first is not None
    assert second is not None
    assert first != second
    assert key() == first


def test_a_cache_gets_at_most_seven_tenths_of_its_machine() -> None:
    def check(capacity: str) -> None:
        env = {"BATCHMILL_CACHE_URL": "redis://cache.internal/0", "BATCHMILL_CACHE_CAPACITY_GB": capacity}
        CacheServer(load(env=env), 1).check_capacity(10 << 30)

    check("7.0")
    with pytest.raises(UsageError, match=r"7\.1 is more than 70% of the 10\.0 GB"):
        check("7.1")


def test_export_replaces_no_fifo_and_fills_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with pytest.raises(UsageError, match=f"{name}: is a FIFO, not a regular file"):
            commands.export(Path(name), None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(UsageError, match="a terminal shows no entries"):
        commands.export(Path("-"), None)
    assert sorted(os.listdir()) == ["fifo", "link"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["cache", "export"], "missing argument"),
        (["cache", "import", "."], "is a directory"),
        (["cache", "warm"], "missing option"),
        (["start", "--nonsense"], "no such option"),
    ],
)
def test_wrong_usage_of_workers_is_two_and_one_line(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["workers", *argv])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert says in shown.err
    assert shown.err.startswith("workers: error: ")


def test_a_defect_of_workers_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a traceback is for who asks for one."""

    def fail() -> None:
        raise KeyError("counts")

    monkeypatch.setattr("workers.cache.commands.stats", fail)
    monkeypatch.setattr("sys.argv", ["workers", "cache", "stats"])
    for debug, traceback in (("0", False), ("1", True)):
        monkeypatch.setenv("BATCHMILL_DEBUG", debug)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        err = capsys.readouterr().err
        assert caught.value.code == 70
        assert "workers: error: unexpected KeyError: 'counts'; this is a bug" in err
        assert ("Traceback" in err) is traceback
