"""Settings of a fleet: `config/fleet.yaml`, checked whole at start, overridable by environment.

Precedence: environment, then the file, then the defaults below. A key `section.key` is overridden by
`BATCHMILL_SECTION_KEY`, or by `BATCHMILL_SECTION_KEY_FILE`, which names a file that holds the value (for secrets).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from common import addresses
from common.conversion import convert
from common.errors import UsageError

Strict = {"forbid_unknown_fields": True, "frozen": True, "kw_only": True}


class Inference(msgspec.Struct, **Strict):
    """The engine of a worker. A model's entry in models.yaml overrides these for that model."""

    #: `vllm`, or `echo` (no model: for measuring and testing all that surrounds the engine).
    engine: str = "vllm"
    #: A model folder that takes the place of the registry's source.
    model_path: str | None = None
    #: Requests the engine runs at once (vLLM's max_num_seqs).
    batch_size: int | None = None
    #: Tokens of prompt and answer together (vLLM's max_model_len).
    max_seq_len: int | None = None
    #: Devices of one worker; empty: all that are visible.
    device_ids: list[int] = []
    gpu_memory_utilization: float | None = None
    #: Upper bound of one answer; requests that ask for more are refused at intake. None: the context length bounds.
    max_output_tokens: int | None = None
    #: Chunks in the engine at a time (K).
    chunks_in_flight: int = 3
    #: Seconds one request may spend in the engine.
    request_timeout_s: float = 600.0
    #: Seconds a worker may go on with running chunks after SIGTERM.
    drain_s: float = 30.0
    #: Share of its last requests from which a worker that fails them, while others do not, takes no more; 0: never.
    sick_share: float = 0.5
    #: How many requests those are, at least.
    sick_window: int = 64
    #: Model version used when neither the command nor the request names one.
    default_model: str | None = None
    #: Where pulled models are kept.
    models_dir: str | None = None


class Cache(msgspec.Struct, **Strict):
    """The result cache."""

    mode: str = "off"
    url: str | None = None
    capacity_gb: float = 1.0
    #: Milliseconds that one answer of the cache's server may take.
    timeout_ms: int = 250
    sync_interval_ms: int = 200
    ttl_s: int | None = None
    #: MB of answers a worker keeps in its own memory, in front of the server.
    local_mb: int = 64


#: What a batch weighs by its priority, unless `scheduler.priority_weights` says otherwise.
PRIORITY_WEIGHTS = {"low": 1.0, "normal": 4.0, "high": 16.0, "urgent": 64.0}


class Scheduler(msgspec.Struct, **Strict):
    """Dispatch, retries and leases."""

    #: Requests dispatched and not yet logged, per model version (the window), at most; None: four for each sequence
    #: that the live workers run at a time, at least 16,384, at most 262,144.
    queue_size: int | None = None
    #: Requests a chunk carries, at most; the engine's size raises it, the end of a batch lowers it.
    chunk_requests: int = 256
    #: Bytes of rows a chunk carries, at most (one larger request still goes, alone).
    chunk_bytes: int = 1 << 20
    #: Milliseconds the coordinator waits for more before it sends a chunk that is not full, while workers have others.
    timeout_ms: int = 50
    #: Attempts after the first, for what may be retried.
    retry_times: int = 3
    #: Seconds until a lease lapses that is not renewed.
    lease_s: float = 6.0
    #: Seconds after which a chunk that nobody leased counts as lost while later ones were taken or its queue is empty.
    unclaimed_s: float = 5.0
    #: How many times as long as chunks take a chunk runs, at the end of the work, before what is missing of it goes to
    #: idle workers too; 0: never.
    straggler_factor: float = 2.0
    #: Requests that share a long prefix stay with one worker while all have work.
    sticky_prefixes: bool = True
    #: Coordinator shards.
    shards: int = 1
    #: Seconds without a heartbeat after which a standby takes over.
    takeover_s: float = 10.0
    #: Shares of tenants in a model version's workers; a tenant that is not named has 1.
    tenants: dict[str, float] = {}
    #: What a batch weighs among its tenant's by its priority, where it is not `PRIORITY_WEIGHTS`.
    priority_weights: dict[str, float] = {}


class Broker(msgspec.Struct, **Strict):
    """Where queues live: `redis://…`, `redis+socket://…` or `amqp://…`. None: the embedded fleet."""

    url: str | None = None
    #: Redis: seconds until an unacked message is delivered again; workers renew it.
    visibility_timeout_s: int = 60
    #: RabbitMQ: seconds between heartbeats.
    heartbeat_s: int = 30
    #: RabbitMQ: milliseconds a consumer may hold a delivery.
    consumer_timeout_ms: int = 24 * 3600 * 1000
    #: RabbitMQ: deliveries before a message is dead-lettered (attempts are counted in the ledger, not here).
    delivery_limit: int = 50


class State(msgspec.Struct, **Strict):
    """Live state (leases, workers). A Redis; None: the broker's own, when that is Redis."""

    url: str | None = None


class StoreSettings(msgspec.Struct, **Strict):
    """Where batches live: a folder or an fsspec URL; `wal_dir` is a local folder for the ledger."""

    url: str | None = None
    wal_dir: str | None = None
    #: Object stores: seconds between copies of the ledger into the store, while there is something new.
    wal_copy_s: float = 60.0
    #: Bytes of one request line, at most.
    max_request_bytes: int = 8 << 20


class Security(msgspec.Struct, **Strict):
    """Message keys, one a direction: 64 hex digits each, kept out of the file (use `…_FILE`)."""

    key_id: str = "k1"
    dispatch_key: str | None = None
    results_key: str | None = None
    #: Keys still accepted while they are being replaced: key id → 64 hex digits.
    old_dispatch_keys: dict[str, str] = {}
    old_results_keys: dict[str, str] = {}
    #: Folders and URLs below which a `batchmill.submit` task may name a file; what it sends inline needs none.
    intake_urls: list[str] = []


class Telemetry(msgspec.Struct, **Strict):
    """Logs and metrics."""

    log_level: str = "info"
    #: `console` or `json`.
    log_format: str = "console"
    #: Port of the Prometheus endpoint on loopback; 0: none.
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"


class Settings(msgspec.Struct, **Strict):
    """All sections; every one may be left out."""

    inference: Inference = msgspec.field(default_factory=Inference)
    cache: Cache = msgspec.field(default_factory=Cache)
    scheduler: Scheduler = msgspec.field(default_factory=Scheduler)
    broker: Broker = msgspec.field(default_factory=Broker)
    state: State = msgspec.field(default_factory=State)
    store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    security: Security = msgspec.field(default_factory=Security)
    telemetry: Telemetry = msgspec.field(default_factory=Telemetry)


_CHOICES: dict[str, tuple[str, ...]] = {
    "inference.engine": ("vllm", "echo"),
    "cache.mode": ("off", "read", "write", "on"),
    "telemetry.log_format": ("console", "json"),
    "telemetry.log_level": ("debug", "info", "warning", "error"),
}
#: What the URL of a key may begin with.
_SCHEMES: dict[str, tuple[str, ...]] = {
    "broker.url": ("redis", "rediss", "redis+socket", "amqp", "amqps", "pyamqp"),
    "state.url": ("redis", "rediss", "redis+socket", "unix"),
    "cache.url": ("redis", "rediss", "unix"),
}
#: Keys that must be at least this; the zero ones may be off.
_AT_LEAST: dict[str, float] = {
    "inference.chunks_in_flight": 2,
    "inference.batch_size": 1,
    "inference.max_seq_len": 1,
    "inference.max_output_tokens": 1,
    "inference.request_timeout_s": 0.001,
    "inference.drain_s": 0,
    "inference.sick_share": 0,
    "inference.sick_window": 2,
    "scheduler.queue_size": 1,
    "scheduler.chunk_requests": 1,
    "scheduler.chunk_bytes": 1024,
    "scheduler.timeout_ms": 0,
    "scheduler.retry_times": 0,
    "scheduler.lease_s": 0.5,
    "scheduler.unclaimed_s": 0.5,
    "scheduler.straggler_factor": 0,
    "scheduler.shards": 1,
    "scheduler.takeover_s": 0.5,
    "broker.visibility_timeout_s": 2,
    "broker.heartbeat_s": 1,
    # An empty Redis takes more than a thousandth already.
    "cache.capacity_gb": 0.01,
    "cache.timeout_ms": 1,
    "cache.sync_interval_ms": 1,
    "cache.ttl_s": 1,
    "cache.local_mb": 0,
    "store.max_request_bytes": 1024,
    "store.wal_copy_s": 0.2,
    "telemetry.metrics_port": 0,
}


#: Keys that must be at most this.
_AT_MOST: dict[str, float] = {"telemetry.metrics_port": 65535}
#: A tenant's name: it stands in settings and is shown to people.
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
#: What Kubernetes and Docker put into the environment for a service named `batchmill-broker` and the like.
_OF_A_SERVICE = re.compile(r"SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?")


def default_config_path(env: Mapping[str, str] = os.environ) -> Path | None:
    """`$BATCHMILL_CONFIG`, else `config/fleet.yaml` below the working folder if it is there, else None."""
    named = env.get("BATCHMILL_CONFIG")
    if named:
        return Path(named)
    here = Path("config/fleet.yaml")
    return here if here.exists() else None


def load(path: Path | None = None, env: Mapping[str, str] = os.environ) -> Settings:
    """The settings out of `path` (default: `default_config_path`) and `env`; `UsageError` names file and key."""
    path = path or default_config_path(env)
    raw: dict[str, Any] = {}
    where = "environment"
    if path is not None:
        where = str(path)
        raw = read_yaml(path)
    settings = _convert(raw, where)
    merged, sources = _override(raw, env)
    if sources:
        settings = _convert(merged, "environment", sources)
    _check(settings, where, sources)
    return settings


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file; `UsageError` when it is missing, not YAML or not a mapping."""
    try:
        text = path.read_text("utf-8")
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text") from None
    # Here, as short questions to a store often need no file of settings, and the reader of them takes 10 ms to import.
    import yaml

    from common import plain_yaml

    try:
        raw = plain_yaml.parse(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{line}: is not valid YAML: {getattr(exc, 'problem', None) or exc}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: must hold a mapping of sections, not {type(raw).__name__}")
    return raw


def _convert(raw: dict[str, Any], where: str, sources: Mapping[str, str] | None = None) -> Settings:
    # A section that is present and empty (`cache:`) means its defaults.
    cleaned = {k: ({} if v is None else v) for k, v in raw.items()}
    return convert(cleaned, Settings, where, sources)


def _override(raw: dict[str, Any], env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    sources: dict[str, str] = {}
    for section in msgspec.structs.fields(Settings):
        _refuse_unknown(section.encode_name, {f.encode_name for f in msgspec.structs.fields(section.type)}, env)
        for field in msgspec.structs.fields(section.type):
            name = f"BATCHMILL_{section.encode_name}_{field.encode_name}".upper()
            value = env.get(name)
            file = env.get(f"{name}_FILE")
            if value is None and file:
                name = f"{name}_FILE"
                try:
                    value = Path(file).read_text("utf-8").strip()
                except (OSError, UnicodeDecodeError) as exc:
                    raise UsageError(f"{name}: cannot read {file}: {getattr(exc, 'strerror', 'not UTF-8')}") from None
            if value is None:
                continue
            target = merged.get(section.encode_name)
            if not isinstance(target, dict):
                target = merged[section.encode_name] = {}
            key = f"{section.encode_name}.{field.encode_name}"
            target[field.encode_name] = _parse(value, field.type, name)
            sources[key] = name
    return merged, sources


def _refuse_unknown(section: str, keys: set[str], env: Mapping[str, str]) -> None:
    """`UsageError` for a variable of a section that names no key of it: a slip would go unseen."""
    start = f"BATCHMILL_{section}_".upper()
    for name in sorted(n for n in env if n.startswith(start)):
        rest = name.removeprefix(start)
        if not _OF_A_SERVICE.fullmatch(rest) and not {rest.lower(), rest.removesuffix("_FILE").lower()} & keys:
            raise UsageError(f"{name}: there is no key {section}.{rest.lower()}; docs/settings.md lists the keys")


def _parse(value: str, kind: Any, name: str) -> Any:
    """An environment string as the field's type: lists may be `0,1`, strings are verbatim, the rest is YAML."""
    options = getattr(kind, "__args__", (kind,))
    if value == "" and type(None) in options:
        return None
    if getattr(kind, "__origin__", None) is list:
        if not value.lstrip().startswith("["):
            value = f"[{value}]"
    elif str in options and getattr(kind, "__origin__", None) is not dict:
        return value
    import yaml

    from common import plain_yaml

    try:
        return plain_yaml.parse(value)
    except yaml.YAMLError as exc:
        # Not its text, which may be a secret's.
        told = f": {exc.problem}" if isinstance(exc, yaml.constructor.ConstructorError) else ""
        raise UsageError(f"{name}: cannot be read as a value{told}") from None


def _check(settings: Settings, where: str, sources: Mapping[str, str]) -> None:
    def place(key: str) -> str:
        return sources.get(key) or f"{where}: {key}"

    def value(key: str) -> Any:
        section, _, field = key.partition(".")
        return getattr(getattr(settings, section), field)

    for key, allowed in _CHOICES.items():
        if value(key) not in allowed:
            raise UsageError(f"{place(key)}: '{value(key)}' is not one of {', '.join(allowed)}")
    for key, schemes in _SCHEMES.items():
        fault = addresses.fault(value(key), schemes, key == "broker.url") if value(key) is not None else None
        if fault is not None:
            raise UsageError(f"{place(key)}: {fault}")
    for key, least in _AT_LEAST.items():
        given = value(key)
        if given is not None and given < least:
            raise UsageError(f"{place(key)}: {given} is too small, at least {least:g} is needed")
    for key, most in _AT_MOST.items():
        if value(key) > most:
            raise UsageError(f"{place(key)}: {value(key)} is too large, at most {most:g} is possible")
    used = settings.inference.gpu_memory_utilization
    if used is not None and not 0 < used <= 1:
        raise UsageError(f"{place('inference.gpu_memory_utilization')}: {used} is not between 0 and 1")
    _check_weights(settings, place)
    for key in ("security.dispatch_key", "security.results_key"):
        text = value(key)
        if text is not None and not is_key(text):
            raise UsageError(f"{place(key)}: must be 64 hex digits (make one: openssl rand -hex 32)")
    for key in ("security.old_dispatch_keys", "security.old_results_keys"):
        for name, text in value(key).items():
            if not is_key(text):
                raise UsageError(f"{place(key)}: key '{name}' must be 64 hex digits")


def _check_weights(settings: Settings, place: Callable[[str], str]) -> None:
    for key, weights in (
        ("scheduler.tenants", settings.scheduler.tenants),
        ("scheduler.priority_weights", settings.scheduler.priority_weights),
    ):
        for name, weight in weights.items():
            if not TENANT.fullmatch(name):
                raise UsageError(f"{place(key)}: {name[:80]!a} must be 1 to 64 letters, digits, '.', '_' or '-'")
            if not 0 < weight < float("inf"):
                raise UsageError(f"{place(key)}: the weight of '{name}' is {weight:g}; it must be above 0")
    unknown = sorted(settings.scheduler.priority_weights.keys() - PRIORITY_WEIGHTS.keys())
    if unknown:
        known = ", ".join(PRIORITY_WEIGHTS)
        raise UsageError(f"{place('scheduler.priority_weights')}: '{unknown[0]}' is no priority; they are {known}")


def is_key(text: str) -> bool:
    """True for 64 hex digits."""
    try:
        return len(bytes.fromhex(text)) == 32
    except ValueError:
        return False
