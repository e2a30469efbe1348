"""Reads a file as intake does, plans it as the planner does, and counts what an engine would have to compute.

Memory is that of one window of requests, of the two simulated caches, and of the samples of an external sort.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from common.determined import canonical, determined, read
from common.engine_arguments import argument
from common.errors import InvalidInput, UsageError
from common.pieces import whole
from common.places import expanded, models_dir
from common.registry import ModelVersion, Registry
from common.settings import Settings
from producers.analyze.context import context_of, room
from producers.analyze.kv_cache import KvCache
from producers.analyze.prompts import asked
from producers.analyze.report import Analysis, Duplicates, Forecast, KvUse, forecasts
from producers.analyze.tokens import Blocks, Counter, counter
from producers.intake.external_sort import ExternalSort
from producers.intake.reading import Progress, Reading
from producers.intake.rules import Rules
from producers.intake.source import open_source
from producers.plan_file import WindowRow
from producers.planner import Planner

#: Tokens of KV cache that are assumed where nothing says how many there are.
ASSUMED_KV_TOKENS = 100_000
#: Tokens of a block where models.yaml does not say: vLLM's defaults on a GPU and on a CPU.
GPU_BLOCK, CPU_BLOCK = 16, 128

#: Requests whose prompts are counted at a time.
_AT_ONCE = 1024

_REQUESTS = np.dtype([("hash", "<u8"), ("prompt", "<u4"), ("output", "<u4"), ("determined", "<u4")])
_BLOCKS = np.dtype([("hash", "<u8")])

_encode = msgspec.json.Encoder().encode


class _Tally:
    """Counts, window by window."""

    def __init__(self, count: Counter, kv_tokens: int, block: int, context: int | None) -> None:
        self._counter = count
        self._context = context
        self._block = block
        self._arrival = KvCache(kv_tokens // block)
        self._planned = KvCache(kv_tokens // block)
        self._planner = Planner()
        self._requests = ExternalSort(_REQUESTS, "hash")
        self._blocks = ExternalSort(_BLOCKS, "hash")
        #: Valid ones, and those of them that the engine will refuse, which no other figure has.
        self.requests = self.too_long = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached = {"arrival": 0, "planned": 0}
        self._all_blocks = 0

    def add(self, rows: Sequence[WindowRow]) -> None:
        """Valid rows of a window, in the order of the file; at least one."""
        records = np.zeros(len(rows), _REQUESTS)
        prompts: list[list[Blocks]] = []
        for at in range(0, len(rows), _AT_ONCE):
            # Bodies as objects are many times their size.
            prompts += self._counter.count(
                [asked(row[3], whole(row[4])) for row in rows[at : at + _AT_ONCE]], self._block
            )
        fits = np.ones(len(rows), bool)
        for number, (_, _, _, url, body, _, _, output) in enumerate(rows):
            fields = read(whole(body))
            tokens = [prompt.tokens for prompt in prompts[number]]
            answer = output if self._context is None else room(self._context, url, fields, tokens, output)
            fits[number] = answer is not None
            records[number] = (
                xxh3_64_intdigest(_encode([url, canonical(url, fields)])),
                sum(tokens),
                answer or 0,
                determined(url, fields),
            )
        answers = records["output"].tolist()
        _, _, _, _, bodies, keys, costs, outputs = zip(*rows, strict=True)
        for name, cache, places in (
            ("arrival", self._arrival, range(len(rows))),
            ("planned", self._planned, self._planner.order(keys, bodies, costs, outputs).places),
        ):
            for at in places:
                if fits[at]:
                    self.cached[name] += self._enter(cache, prompts[at], answers[at])
        for at in range(0, len(rows), _AT_ONCE):
            # A window's at once would be in memory several times.
            chains = array("Q")
            for one, fit in zip(prompts[at : at + _AT_ONCE], fits[at : at + _AT_ONCE], strict=True):
                for prompt in one if fit else ():
                    chains += prompt.chain
            self._all_blocks += len(chains)
            self._blocks.add(np.unique(np.array(chains, "<u8")).view(_BLOCKS))
        records = records[fits]
        self._requests.add(records)
        self.requests += len(rows)
        self.too_long += len(rows) - len(records)
        self.prompt_tokens += int(records["prompt"].sum(dtype=np.uint64))
        self.output_tokens += int(records["output"].sum(dtype=np.uint64))

    def _enter(self, cache: KvCache, prompts: list[Blocks], answer: int) -> int:
        block = self._block
        found = 0
        for prompt in prompts:
            # The last token is always computed; the answer goes on in the block that the prompt began.
            sharable = (prompt.tokens - 1) // block
            answer_blocks = -(-(prompt.tokens + answer) // block) - len(prompt.chain)
            found += cache.enter(prompt.chain, max(0, sharable), answer_blocks)
        return found * block

    def shared_tokens(self) -> int:
        """Tokens in full blocks that an earlier prompt began with as well, wherever it stands."""
        distinct = sum(len(np.unique(part["hash"])) for part in self._blocks)
        return (self._all_blocks - distinct) * self._block

    def duplicates(self) -> Duplicates:
        """Requests that ask what another one does, the first of each left out."""
        requests = again = prompt = output = 0
        for part in self._requests:
            _, first = np.unique(part["hash"], return_index=True)
            rest = np.delete(part, first)
            fixed = rest[rest["determined"] == 1]
            requests += len(rest)
            again += len(fixed)
            prompt += int(fixed["prompt"].sum(dtype=np.uint64))
            output += int(fixed["output"].sum(dtype=np.uint64))
        return Duplicates(requests=requests, determined=again, prompt_tokens=prompt, output_tokens=output)

    def close(self) -> None:
        """Let the temporary files go."""
        self._requests.close()
        self._blocks.close()


def analyze(
    source: str,
    settings: Settings,
    registry: Registry,
    *,
    model: str | None = None,
    max_tokens_default: int | None = None,
    kv_tokens: int | None = None,
    block_tokens: int | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Analyse a file. `UsageError` for what is no file or no text, `InvalidInput` when no request in it is valid."""
    rules = Rules(settings, registry, model, max_tokens_default)
    lazy = _Lazy(rules, settings, registry, kv_tokens, block_tokens)
    try:
        with open_source(source) as opened, Reading(opened, rules, skip_invalid=True, progress=progress) as reading:
            reading.run(lazy)
            report = reading.report()
            if reading.fatal is not None:
                raise InvalidInput(f"{opened.name}: {reading.fatal}")
            name = opened.name
        tally = lazy.tally
        if tally is None or not tally.requests:
            raise InvalidInput(f"{name}: none of its {report.requests} requests is valid; see producers validate")
        return _report(name, report.error_count, lazy, tally, registry)
    finally:
        if lazy.tally is not None:
            lazy.tally.close()


class _Lazy:
    """Takes windows of a reading (`intake.reading.Windows`); the first request decides the model version."""

    def __init__(
        self, rules: Rules, settings: Settings, registry: Registry, kv_tokens: int | None, block_tokens: int | None
    ) -> None:
        self._rules = rules
        self._settings = settings
        self._registry = registry
        self.tally: _Tally | None = None
        self.model = ""
        self.kv_tokens, self.block = kv_tokens, block_tokens
        self.kv_said = "as asked"
        self.context: int | None = None
        self.counter: Counter | None = None

    def add(self, rows: Sequence[WindowRow], _start: int, _end: int, /) -> None:
        """A window of valid rows."""
        if rows:
            self.tally = self.tally or self._begin()
            self.tally.add(rows)

    def _begin(self) -> _Tally:
        self.model = self._rules.decide_default()
        entry = self._registry.get(self.model)
        folder = _model_folder(self.model, entry, self._settings)
        self.counter = counter(self.model, folder)
        if self.block is None:
            said = argument(entry.engine, "block_size")
            usual = CPU_BLOCK if entry.hardware.gpus == 0 else GPU_BLOCK
            self.block = said if isinstance(said, int) and said > 0 else usual
        if self.kv_tokens is None:
            self.kv_tokens, self.kv_said = _kv_tokens(entry, folder, self.block)
        if self.kv_tokens < self.block:
            raise UsageError(f"--kv-tokens: {self.kv_tokens} is less than one block of {self.block} tokens")
        self.context = context_of(entry, self._settings, folder)
        return _Tally(self.counter, self.kv_tokens, self.block, self.context)


def _report(name: str, invalid: int, lazy: _Lazy, tally: _Tally, registry: Registry) -> Analysis:
    assert lazy.counter is not None
    assert lazy.kv_tokens is not None
    assert lazy.block is not None
    duplicates = tally.duplicates()
    use = {
        order_: KvUse(cached_tokens=cached, computed_tokens=tally.prompt_tokens - cached)
        for order_, cached in tally.cached.items()
    }
    found: list[Forecast] = forecasts(registry, use, duplicates, tally.prompt_tokens, tally.output_tokens)
    return Analysis(
        file=name,
        model=lazy.model,
        requests=tally.requests,
        invalid=invalid,
        too_long=tally.too_long,
        context=lazy.context,
        counted=lazy.counter.said,
        exact=lazy.counter.exact,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        shared_prefix_tokens=tally.shared_tokens(),
        duplicates=duplicates,
        cache=registry.get(lazy.model).cache,
        kv_tokens=lazy.kv_tokens,
        kv_said=lazy.kv_said,
        block_tokens=lazy.block,
        arrival=use["arrival"],
        planned=use["planned"],
        forecasts=found,
    )


def _model_folder(model: str, entry: ModelVersion, settings: Settings) -> Path | None:
    """Where the model's files lie on this machine; None when they are not here."""
    name, _, version = model.partition("@")
    named = settings.inference.model_path or entry.source.removeprefix("file://")
    for folder in (expanded(named), models_dir(settings) / name / version):
        if (folder / "config.json").is_file():
            return folder
    return None


def _kv_tokens(entry: ModelVersion, folder: Path | None, block: int) -> tuple[int, str]:
    """How many tokens the KV cache of one worker holds, and how that is known."""
    blocks = argument(entry.engine, "num_gpu_blocks_override")
    if isinstance(blocks, int) and blocks > 0:
        return blocks * block, "num_gpu_blocks_override of models.yaml"
    if entry.hardware.gpus == 0 and folder is not None:
        try:
            config = json.loads((folder / "config.json").read_bytes())
            heads = config["num_attention_heads"]
            size = config.get("head_dim") or config["hidden_size"] // heads
            # Keys and values of every layer, two bytes each.
            token = 2 * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size
            return int(entry.hardware.cpu_kv_gb * (1 << 30)) // token, "cpu_kv_gb of models.yaml and the model's shape"
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            pass
    return ASSUMED_KV_TOKENS, "assumed; a worker logs what it has (kv_cache_tokens), set it with --kv-tokens"
