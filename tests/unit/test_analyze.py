"""`producers analyze`: the simulated cache, the counting of tokens, and whole files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput, UsageError
from common.registry import load as load_registry
from common.settings import load
from common.urls import URL_CODE
from producers.analyze.analysis import ASSUMED_KV_TOKENS, analyze
from producers.analyze.context import context_of, room
from producers.analyze.kv_cache import KvCache
from producers.analyze.prompts import asked
from producers.analyze.report import Analysis
from producers.analyze.tokens import ByBytes, counter
from producers.cli.app import app
from tests.support.processes import ROOT


class NaiveCache:
    """The same with a list."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held: OrderedDict[int, None] = OrderedDict()
        self.unique = -1

    def enter(self, chain: list[int], answer: int) -> int:
        found = 0
        while found < len(chain) and chain[found] in self.held:
            found += 1
        for _ in range(answer):
            self.held[self.unique] = None
            self.unique -= 1
        for block in reversed(chain):
            self.held.pop(block, None)
            self.held[block] = None
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)
        return found


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=5), st.integers(0, 1)), max_size=40),
)
def test_the_cache_agrees_with_a_naive_one(blocks: int, requests: list[tuple[list[int], int]]) -> None:
    cache, naive = KvCache(blocks), NaiveCache(blocks)
    for path, answer in requests:
        chain = [hash((1, *path[: n + 1])) & (2**62 - 1) for n in range(len(path))]
        assert cache.enter(chain, len(chain), answer) == naive.enter(chain, answer)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a registry of two models; the first is the default."""
    (tmp_path / "models.yaml").write_text(
        "default: m@1\n"
        "models:\n"
        "  m@1:\n"
        f"    source: {tmp_path}/model\n"
        "    engine: {max_model_len: 4096, num_gpu_blocks_override: 70, block-size: 128}\n"
        "    rates: {prompt_tokens_per_s: 1000, output_tokens_per_s: 100, cost_per_hour: 36}\n"
        "  big@1:\n"
        f"    source: {tmp_path}/elsewhere\n"
    )
    monkeypatch.setenv("BATCHMILL_MODELS", str(tmp_path / "models.yaml"))
    monkeypatch.setenv("BATCHMILL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, bodies: list[dict[str, Any]]) -> str:
    with path.open("w") as file:
        for number, body in enumerate(bodies):
            file.write(json.dumps({"custom_id": f"c{number}", "body": body}) + "\n")
    return str(path)


def look(source: str, **options: Any) -> Analysis:
    return analyze(source, load(), load_registry(), **options)


def prefixed(shuffled: bool) -> list[dict[str, Any]]:
    """240 requests with 48 prefixes of 420 tokens (four bytes each) and an ending of their own."""
    bodies = [
        {"prompt": f"{prefix:04d}".ljust(420 * 4, "x") + f"{ending:08d}", "max_tokens": 16}
        for prefix in range(48)
        for ending in range(5)
    ]
    if shuffled:
        random.Random(3).shuffle(bodies)
    return bodies


def test_the_planned_order_saves_what_it_saved_on_a_real_engine(fleet: Path) -> None:
    """vLLM had 73,728 cached tokens of such a file in planned order, and 29,696 of it shuffled another way."""
    found = look(write(fleet / "a.jsonl", prefixed(shuffled=True)))
    assert found.planned.cached_tokens == 192 * 3 * 128 == 73_728
    assert 0.15 < found.arrival.cached_tokens / found.planned.cached_tokens < 0.6
    assert found.shared_prefix_tokens == 73_728
    assert found.prompt_tokens == 240 * 422
    assert found.output_tokens == 240 * 16
    assert (found.kv_tokens, found.block_tokens) == (70 * 128, 128)
    assert found.planned.computed_tokens + found.planned.cached_tokens == found.prompt_tokens


def test_a_large_cache_needs_no_order(fleet: Path) -> None:
    found = look(write(fleet / "a.jsonl", prefixed(shuffled=True)), kv_tokens=1_000_000, block_tokens=16)
    assert found.arrival.cached_tokens == found.planned.cached_tokens == found.shared_prefix_tokens == 192 * 416


def test_duplicates_are_those_that_ask_the_same(fleet: Path) -> None:
    same = {"prompt": "x" * 40, "max_tokens": 10}
    bodies = [
        same | {"temperature": 0},
        {"max_tokens": 10, "temperature": 0.0, "prompt": "x" * 40, "user": "somebody"},
        same | {"temperature": 0, "seed": 1},
        same | {"temperature": 1},
        same | {"temperature": 1},
    ]
    found = look(write(fleet / "a.jsonl", bodies))
    assert (found.duplicates.requests, found.duplicates.determined) == (2, 1)
    assert (found.duplicates.prompt_tokens, found.duplicates.output_tokens) == (10, 10)


def test_the_last_token_of_a_prompt_is_always_computed(fleet: Path) -> None:
    """Of two equal prompts of three full blocks the second finds two, as in vLLM."""
    bodies = [{"prompt": "x" * 4 * 3 * 128, "max_tokens": 1}] * 2
    assert look(write(fleet / "a.jsonl", bodies)).planned.cached_tokens == 2 * 128


def test_the_same_body_for_another_endpoint_asks_something_else(fleet: Path) -> None:
    file = fleet / "a.jsonl"
    body = {"input": "x" * 40, "temperature": 0}
    lines = [{"custom_id": url, "url": url, "body": body} for url in ("/v1/embeddings", "/v1/responses")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert look(str(file)).duplicates.requests == 0


def test_what_a_duplicate_saves_of_its_prompt_the_kv_cache_has_not_saved_already(fleet: Path) -> None:
    body = {"prompt": "x" * 4 * 1280, "max_tokens": 10, "temperature": 0}
    found = look(write(fleet / "a.jsonl", [body] * 2), kv_tokens=1_000_000)
    # 1,280 tokens and 128 at 1,000 a second, two answers of 10 at 100 a second.
    seconds = found.forecasts[0].seconds
    assert (found.planned.computed_tokens, seconds.planned) == (1408, 1.608)
    assert seconds.deduplicated == pytest.approx(1.608 - 0.1 - 1280 / 2560 * 1.408)


def test_the_size_of_a_cache_on_a_cpu_follows_from_the_model(fleet: Path) -> None:
    (fleet / "model").mkdir()
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 4}
    (fleet / "model" / "config.json").write_text(json.dumps(shape))
    (fleet / "models.yaml").write_text(
        f"models: {{m@1: {{source: {fleet}/model, hardware: {{gpus: 0, cpu_kv_gb: 0.5}}}}}}\ndefault: m@1\n"
    )
    found = look(write(fleet / "a.jsonl", [{"prompt": "x", "max_tokens": 1}]))
    # Keys and values of four layers, two heads of 64 numbers of two bytes.
    assert found.kv_tokens == 2**29 // (2 * 4 * 2 * 64 * 2)
    assert (found.block_tokens, "cpu_kv_gb" in found.kv_said) == (128, True)


def test_time_and_money_follow_from_the_rates(fleet: Path) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 100, "temperature": 0}
    found = look(write(fleet / "a.jsonl", [body] * 4))
    (forecast,) = found.forecasts
    assert forecast.model == "m@1"
    assert forecast.seconds.arrival == forecast.seconds.planned == 4.4
    assert forecast.seconds.deduplicated == 1.1
    assert forecast.cost is not None
    assert forecast.cost.arrival == 0.044


def test_where_nothing_is_shared_nothing_is_saved(fleet: Path) -> None:
    """`cache: off` of a model turns off the sharing of requests in flight too."""
    models = fleet / "models.yaml"
    models.write_text(models.read_text().replace("    rates:", "    cache: off\n    rates:"))
    source = write(fleet / "a.jsonl", [{"prompt": "x" * 400, "max_tokens": 100, "temperature": 0}] * 4)
    found = look(source)
    assert (found.cache, found.duplicates.determined) == ("off", 3)
    assert found.forecasts[0].seconds.deduplicated == found.forecasts[0].seconds.planned == 4.4
    said = CliRunner().invoke(app, ["analyze", source]).output
    assert "each is computed" in said
    assert "computed once is enough" not in said
    assert "computed each by m@1" in said


@pytest.mark.parametrize("length", ["2048", "2k", "2K"])
def test_what_the_context_has_no_room_for_is_counted_apart(fleet: Path, length: str) -> None:
    models = fleet / "models.yaml"
    models.write_text(models.read_text().replace("max_model_len: 4096", f"max_model_len: {length}"))
    context = {"2048": 2048, "2k": 2000, "2K": 2048}[length]
    bodies: list[dict[str, Any]] = [
        {"prompt": "x" * 4 * 600_000, "max_tokens": 10, "temperature": 0},
        {"prompt": "x" * 4 * 600_000, "max_tokens": 10, "temperature": 0},
        # Not a token left for an answer, which only an endpoint without one can do without.
        {"prompt": "x" * 4 * context, "max_tokens": 10},
        {"input": "x" * 4 * context},
        {"prompt": "x" * 4 * 5000, "max_tokens": 10, "truncate_prompt_tokens": 100},
        # The answer is cut to what is left.
        {"prompt": "x" * 4 * (context - 40), "max_tokens": 100},
    ]
    source = write(fleet / "a.jsonl", bodies)
    found = look(source)
    assert (found.requests, found.too_long, found.context) == (6, 3, context)
    assert found.prompt_tokens == context + 5000 + context - 40
    assert found.output_tokens == 10 + 40
    assert found.duplicates.requests == 0
    assert found.planned.cached_tokens + found.planned.computed_tokens == found.prompt_tokens
    said = " ".join(CliRunner().invoke(app, ["analyze", source], env={"COLUMNS": "200"}).output.split())
    assert f"too long 3 for the context of {context:,} tokens by this estimate: the engine will refuse them" in said
    # Nothing else in the file is no reason to stop.
    found = look(write(fleet / "long.jsonl", bodies[:2]))
    assert (found.requests, found.too_long, found.prompt_tokens) == (2, 2, 0)
    assert CliRunner().invoke(app, ["analyze", str(fleet / "long.jsonl")]).exit_code == 0


def test_several_answers_each_have_the_room_that_is_left() -> None:
    chat = URL_CODE["/v1/chat/completions"]
    assert room(100, chat, {}, [90], 60) == 10
    assert room(100, chat, {"n": 3}, [90], 60) == 30
    assert room(100, chat, {"n": 3}, [90], 20) == 20


@pytest.mark.parametrize(("config", "context"), [({}, 300), ({"rope_scaling": {"factor": 4}}, None)])
def test_the_context_is_the_models_own_unless_its_positions_are_scaled(
    fleet: Path, config: dict[str, Any], context: int | None
) -> None:
    (fleet / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    assert context_of(load_registry().get("big@1"), load(), fleet) == context


def test_windows_share_what_the_cache_holds(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than a window has: the file is never held, and nothing is counted twice or left out."""
    monkeypatch.setattr("producers.intake.reading.WINDOW_ROWS", 2500)
    count = 3000
    found = look(write(fleet / "a.jsonl", [{"prompt": "y" * 1100, "max_tokens": 1}] * count))
    assert found.requests == count
    assert found.duplicates.requests == count - 1
    assert found.shared_prefix_tokens == (count - 1) * 256
    assert found.arrival.cached_tokens == found.planned.cached_tokens == (count - 1) * 256


def test_memory_is_that_of_a_window_and_a_cache_not_of_the_file(fleet: Path) -> None:
    """Peak memory of a whole process, at two windows and at ten."""
    code = """
import re, sys
from common.registry import load as load_registry
from common.settings import load
from producers.analyze.analysis import analyze
from producers.intake import reading
reading.WINDOW_ROWS = 2000
analyze(sys.argv[1], load(), load_registry(), kv_tokens=20_000, block_tokens=16)
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    peaks = []
    for count in (4000, 20_000):
        source = write(fleet / "a.jsonl", [{"prompt": f"{n} " + "x" * 3000, "max_tokens": 1} for n in range(count)])
        argv = [sys.executable, "-c", code, source]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=120, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] * 1.15


def test_bad_lines_are_left_out_and_counted(fleet: Path) -> None:
    file = fleet / "a.jsonl"
    write(file, [{"prompt": "x", "max_tokens": 1}] * 3)
    file.write_text(file.read_text() + "not json\n" + '{"custom_id": "c0", "body": {"prompt": "x"}}\n')
    found = look(str(file))
    assert (found.requests, found.invalid) == (3, 2)
    # Token ids that no model has are bad lines.
    write(file, [{"prompt": [7]}, {"prompt": [-1]}, {"prompt": [2**64 - 1]}])
    found = look(str(file))
    assert (found.requests, found.invalid) == (1, 2)
    file.write_text("not json\n")
    with pytest.raises(InvalidInput, match="none of its 1 requests is valid"):
        look(str(file))
    with pytest.raises(InvalidInput, match="has no requests"):
        look(write(fleet / "empty.jsonl", []))
    with pytest.raises(UsageError, match="less than one block"):
        look(write(file, [{"prompt": "x"}]), kv_tokens=5)


def test_what_is_not_known_is_said(fleet: Path) -> None:
    found = look(write(fleet / "a.jsonl", [{"prompt": "x" * 9, "max_tokens": 1}]), model="big@1")
    assert not found.exact
    assert "estimated" in found.counted
    assert (found.kv_tokens, found.block_tokens, found.prompt_tokens) == (ASSUMED_KV_TOKENS, 16, 3)
    assert "assumed" in found.kv_said


@pytest.fixture
def model_folder(fleet: Path) -> Path:
    """A model with a tokenizer of one token a word, and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = fleet / "model"
    folder.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(4)
    words.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }} {% for m in messages %}[ {{ m.role }} ] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[ assistant ]{% endif %}"
    )
    return folder


def test_the_models_own_tokenizer_and_template_count(fleet: Path, model_folder: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a b a"}], "max_tokens": 1},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b a"}]}], "max_tokens": 1},
        {"prompt": "a b c d e f g h", "max_tokens": 1},
        {"prompt": ["a b", [5, 6, 7]], "max_tokens": 1},
    ]
    found = look(write(fleet / "a.jsonl", bodies))
    assert found.exact
    assert found.counted == "by the tokenizer of m@1"
    # <s> [ user ] a b a [ assistant ]
    assert found.prompt_tokens == 10 + 10 + 8 + 5


def test_a_template_is_given_what_the_request_gives_it_and_a_plain_prompt_the_tokens_that_templates_write(
    fleet: Path, model_folder: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (model_folder / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}a {% endfor %}{% if deep %}a a {% endif %}{{ messages[0].content }}"
    )
    file = str(model_folder / "tokenizer.json")
    words = tokenizers.Tokenizer.from_file(file)
    words.post_processor = tokenizers.processors.TemplateProcessing("b $A", "b $A b $B", [("b", 2)])
    words.save(file)
    messages = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def tokens(**body: Any) -> int:
        return look(write(fleet / "a.jsonl", [body | {"max_tokens": 1}])).prompt_tokens

    assert tokens(messages=messages) == 1
    assert tokens(messages=messages, tools=[tool] * 3) == 4
    assert tokens(messages=messages, chat_template_kwargs={"deep": True}) == 3
    assert tokens(prompt="a") == 2


def test_without_a_template_it_says_so(fleet: Path, model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").unlink()
    found = look(write(fleet / "a.jsonl", [{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}]))
    assert not found.exact
    assert "without its chat template" in found.counted


def test_a_template_that_fails_is_said_in_words(fleet: Path, model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    bodies = [{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}] * 2 + [{"prompt": "a"}]
    source = write(fleet / "a.jsonl", bodies)
    said = " ".join(CliRunner().invoke(app, ["analyze", source], env={"COLUMNS": "300"}).output.split())
    assert (
        "but 2 of 2 conversations without its chat template, which failed on them (ValueError: no users here)" in said
    )
    assert not look(source).exact
    assert look(write(fleet / "b.jsonl", [{"prompt": "a"}])).exact


def test_a_broken_tokenizer_is_not_the_end(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{")
    assert isinstance(counter("m@1", model_folder), ByBytes)


@pytest.mark.parametrize(
    ("url", "body", "prompts"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, ["a", "b"]),
        ("/v1/embeddings", {"input": [1, 2]}, [[1, 2]]),
        ("/v1/embeddings", {"input": "a", "prompt": [-1, 2**40]}, ["a"]),
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}]}, ["qa", "qb"]),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b"]}, ["qa", "qb"]),
        ("/v1/completions", {"prompt_embeds": "…"}, [""]),
    ],
)
def test_every_endpoint_has_prompts(url: str, body: dict[str, Any], prompts: list[Any]) -> None:
    assert asked(URL_CODE[url], json.dumps(body).encode()).prompts == prompts


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"instructions": "s", "input": "x"}),
        (
            "/v1/responses",
            {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"text": "x"}]}]},
        ),
        ("/v1/messages", {"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}),
    ],
)
def test_conversations_are_one_whatever_the_endpoint(url: str, body: dict[str, Any]) -> None:
    wanted = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert asked(URL_CODE[url], json.dumps(body).encode()).messages == wanted


def test_the_command(fleet: Path) -> None:
    source = write(fleet / "a.jsonl", prefixed(shuffled=False))
    table = CliRunner().invoke(app, ["analyze", source])
    assert table.exit_code == 0, table.output
    for part in ("240", "101,280", "73,728", "in planned order", "one worker of", "estimated: 4 bytes a token"):
        assert part in table.output
    shown = CliRunner().invoke(app, ["analyze", source, "--json", "--kv-tokens", "20000"])
    assert json.loads(shown.stdout)["kv_tokens"] == 20_000
