"""The fingerprint of an engine: 16 hex digits that stand for whatever decides its answers besides the request.

It covers the model version and the digest of its folder (weights, tokenizer, chat template), the kind and version of
the engine, and its arguments, except those that only say how much it holds or how fast it goes. An argument that names
a file counts by the file's content. It stands on every result line, so one can tell which answers are comparable; the
result cache keeps answers of one fingerprint apart from those of another.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from common.registry import ModelVersion
from workers.engine.base import EngineFacts
from workers.models.digest import combine, digest_files

#: Arguments that decide how much an engine holds and how fast it goes, never what it answers. Whatever is not known
#: to be one of these makes another fingerprint: a needless miss costs a computation, a stale answer the trust. So does
#: a `kv_transfer_config`, which may name a connector that keeps keys and values in fewer bits.
NEUTRAL = frozenset(
    {
        "api_server_count",
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enable_prompt_tokens_details",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_offloading_size",
        "max_model_len",  # the engine's own word counts, below
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "num_gpu_blocks_override",
        "scheduling_policy",
        "swap_space",
    }
)
#: What the engine says of itself that decides its answers.
_FACTS = ("digest", "dtype", "tensor_parallel")


def fingerprint(model_version: str, entry: ModelVersion, facts: EngineFacts) -> str:
    """Of a running engine. Reads the files that its arguments name."""
    arguments = {key.replace("-", "_"): value for key, value in entry.engine.items()}
    what = {
        "model": model_version,
        "engine": facts.engine,
        "max_model_len": facts.max_model_len,
        "facts": {name: facts.detail[name] for name in _FACTS if name in facts.detail},
        "arguments": {key: _content(value) for key, value in arguments.items() if key not in NEUTRAL},
    }
    return blake3(msgspec.json.encode(what, order="deterministic")).hexdigest(length=8)


def _content(value: Any) -> Any:
    """The value, with the digest of each file or folder that it names, wherever inside it."""
    if isinstance(value, dict):
        return {key: _content(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_content(inner) for inner in value]
    if not isinstance(value, str) or len(value) > 4096 or "\n" in value:
        return value
    if value[:1] in ("{", "["):
        # vLLM takes JSON for a mapping.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            said = msgspec.json.decode(value)
            inside = _content(said)
            return value if inside == said else [value, inside]
    name, equals, named = value.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", name):
        # As in `lora_modules: [name=folder]`.
        content = _content(named)
        return value if content == named else [name, content]
    try:
        path = Path(value).expanduser()
        if path.is_dir():
            return [value, combine(digest_files(path))]
        if path.is_file():
            return [value, blake3(path.read_bytes()).hexdigest()]
    except (OSError, ValueError, RuntimeError):
        pass
    return value
