"""What an entry of models.yaml may say of the arguments that decide about memory and speed, without the engine.

vLLM's own parser has the last word, when a worker starts. A slip in one of these would otherwise be found by whoever
starts that worker, long after batches for it were taken in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

#: What a worker says to the engine by itself.
_RESERVED = frozenset(
    {
        "api_key",
        "api_server_count",
        "config",
        "enable_log_outputs",
        "enable_log_requests",
        "headless",
        "host",
        "model",
        "model_tag",
        "port",
        "served_model_name",
        "uds",
    }
)
#: Whole numbers, and the least that each may be.
_COUNTS = {
    "block_size": 1,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 1,
    "pipeline_parallel_size": 1,
    "seed": 0,
    "tensor_parallel_size": 1,
}
#: Numbers that vLLM also takes as `8k`, `25.6k` or `1M`.
_SIZES = frozenset({"kv_cache_memory_bytes", "max_model_len", "max_num_batched_tokens"})
_SIZE = re.compile(r"[1-9]\d*|\d+(\.\d+)?[kKmMgGtT]", re.ASCII)
#: What the letters stand for: as vLLM has it, small ones are decimal.
_UNITS = {
    letter: base**power
    for power, pair in enumerate(("kK", "mM", "gG", "tT"), 1)
    for letter, base in zip(pair, (1000, 1024), strict=True)
}
#: Such a number inside JSON, where vLLM takes it too; what stands in quotes is let be.
_JSON_SIZE = re.compile(r'"(?:[^"\\]|\\.)*"|\b\d+(?:\.\d+)?[kKmMgGtT]\b')
_BACKENDS = ("native", "lmcache")
_SWITCHES = frozenset({"enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "trust_remote_code"})
_WORDS = frozenset({"dtype", "kv_cache_dtype", "load_format", "quantization", "tokenizer"})


def argument(engine: Mapping[str, Any], name: str) -> Any:
    """The value of an argument, however its key is spelt (`max_num_seqs`, `max-num-seqs`); None: it is not there."""
    return next((value for key, value in engine.items() if key.replace("-", "_") == name), None)


def size(value: Any) -> int | None:
    """A size such as 8192, `8k` or `8K` as a number; None for what names none (`auto`, -1)."""
    text = str(value)
    if isinstance(value, bool) or not _SIZE.fullmatch(text):
        return None
    unit = _UNITS.get(text[-1])
    return int(text) if unit is None else int(float(text[:-1]) * unit)


def context(engine: Mapping[str, Any], otherwise: int | None) -> int | None:
    """Tokens of prompt and answer together that an engine takes, as far as its settings say.

    `otherwise`: `inference.max_seq_len`, which an entry of models.yaml goes before; None: the model's own length.
    """
    said = argument(engine, "max_model_len")
    return otherwise if said is None else size(said)


def offloading_gib(engine: Mapping[str, Any]) -> float | None:
    """`kv_offloading_size`, which may be a number or its text; None: it is not there. `ValueError`: it is neither."""
    value = argument(engine, "kv_offloading_size")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    found = float(value)
    if not 0 < found < math.inf:
        raise ValueError
    return found


def transfer_config(engine: Mapping[str, Any]) -> dict[str, Any] | None:
    """`kv_transfer_config`, which may be a mapping or JSON; None: it is not there. `ValueError`: it is neither."""
    value = argument(engine, "kv_transfer_config")
    if isinstance(value, str):
        value = json.loads(_JSON_SIZE.sub(_whole, value))
    if value is not None and not isinstance(value, dict):
        raise ValueError
    return value


def _whole(match: re.Match[str]) -> str:
    text = match[0]
    return text if text.startswith('"') else str(size(text))


def fault(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key that cannot be there, or whose value cannot be, and what is wrong with it."""
    for key, value in engine.items():
        if key.replace("-", "_") in _RESERVED:
            return key, "it is set by the worker; take it out"
        wrong = None if value is None else _wrong(key.replace("-", "_"), value)
        if wrong is not None:
            return key, wrong
    return None


def _wrong_of_offload(name: str, value: Any) -> str | None:
    text = f"{str(value)[:80]!a}"
    if name == "kv_offloading_backend" and value not in _BACKENDS:
        return f"{text} is not one of {', '.join(_BACKENDS)}"
    try:
        if name == "kv_offloading_size":
            offloading_gib({name: value})
        elif name == "kv_transfer_config":
            transfer_config({name: value})
    except ValueError:
        what = (
            "a number above 0 (GiB)" if name == "kv_offloading_size" else "a mapping (kv_connector: …), nor JSON of one"
        )
        return f"{text} is not {what}"
    return None


def _wrong(name: str, value: Any) -> str | None:
    text = f"{str(value)[:80]!a}"
    if name in _COUNTS:
        least = _COUNTS[name]
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if good else f"{text} is not a whole number of at least {least}"
    if name in _SIZES:
        if isinstance(value, bool) or not isinstance(value, int | str):
            return f"{text} is not a number"
        # The model's own length, as vLLM has it.
        own = name == "max_model_len" and str(value) in ("-1", "auto")
        return None if own or _SIZE.fullmatch(str(value)) else f"{text} is not a number above 0 (8192, 8k)"
    if name == "gpu_memory_utilization":
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
        return None if good else f"{text} is not a number between 0 and 1"
    if name in _SWITCHES:
        return None if isinstance(value, bool) else f"{text} is neither true nor false"
    if name in _WORDS:
        return None if isinstance(value, str) else f"{text} is not a word"
    return _wrong_of_offload(name, value)
