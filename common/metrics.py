"""Every metric of every role, declared once; docs/metrics.md is made from this catalogue (a test holds it).

Labels have few values by design: a kind, a model version, a direction. Never a batch id, a custom_id or a text.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from common.errors import UsageError
from common.settings import Telemetry

_CHUNK_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_SYNC_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)

# -- coordinator --------------------------------------------------------------------------------------------------

BATCHES_ACTIVE = Gauge("batchmill_batches_active", "Batches that are not final yet.")
REQUESTS_IN_FLIGHT = Gauge(
    "batchmill_requests_in_flight", "Requests dispatched and not logged: the window in use.", ["model"]
)
CHUNKS_SENT = Counter("batchmill_chunks_sent", "Chunks published to workers.", ["model"])
CHUNKS_COPIED = Counter("batchmill_chunks_copied", "Rests of slow chunks sent to idle workers too.", ["model"])
WINDOW = Gauge("batchmill_window_requests", "Requests that may be with workers at a time.", ["model"])
CHUNKS_STOLEN = Counter(
    "batchmill_chunks_stolen", "Chunks taken from a busy worker's own queue for an idle one.", ["model"]
)
CHUNKS_LOST = Counter("batchmill_chunks_lost", "Chunks given up and sent again.", ["model"])
CRASHES = Counter("batchmill_crashes", "Reports of chunks whose worker ended abnormally.", ["model"])
RESULTS_LOGGED = Counter("batchmill_results_logged", "Results logged by the coordinator.", ["kind"])
RESULTS_REPEATED = Counter("batchmill_results_repeated", "Results that were there already, or came too late.")
MESSAGES_REFUSED = Counter("batchmill_messages_refused", "Queue messages that failed verification.", ["direction"])
DEAD_LETTERS = Counter("batchmill_dead_letters", "Messages of the dead-letter queue that were recorded and put away.")
LEDGER_BYTES = Counter("batchmill_ledger_bytes", "Bytes appended to the ledger.")
LEDGER_SYNC_SECONDS = Histogram(
    "batchmill_ledger_sync_seconds", "Time of one fsync of the ledger.", buckets=_SYNC_SECONDS
)
LEADER = Gauge("batchmill_leader_epoch", "Epoch of this coordinator while it leads its shard, else 0.", ["shard"])

# -- worker -------------------------------------------------------------------------------------------------------

ENGINE_RUNNING = Gauge("batchmill_engine_running", "Requests the engine is running.", ["model"])
ENGINE_WAITING = Gauge("batchmill_engine_waiting", "Requests waiting inside the engine.", ["model"])
ENGINE_KV_USAGE = Gauge("batchmill_engine_kv_usage", "Share of the KV cache in use, 0 to 1.", ["model"])
CHUNKS_RUNNING = Gauge("batchmill_chunks_running", "Chunks this worker has in flight.", ["model"])
CHUNK_SECONDS = Histogram(
    "batchmill_chunk_seconds", "From taking a chunk up to its last result confirmed.", ["model"], buckets=_CHUNK_SECONDS
)
RESULTS_SENT = Counter("batchmill_results_sent", "Results published and confirmed.", ["model", "kind"])
TOKENS = Counter("batchmill_tokens", "Tokens of answered requests.", ["model", "type"])
REQUESTS_SHARED = Counter(
    "batchmill_requests_shared", "Requests answered by what was computed for an equal one at that moment.", ["model"]
)
CACHE_HITS = Counter("batchmill_cache_hits", "Requests that the result cache answered.")
CACHE_MISSES = Counter("batchmill_cache_misses", "Requests looked up in the result cache in vain.")
CACHE_SERVED = Counter("batchmill_cache_served_bytes", "Bytes of answers that the result cache gave.")
CACHE_WRITTEN = Counter("batchmill_cache_written", "Answers written to the result cache.")
CACHE_DROPPED = Counter("batchmill_cache_dropped", "Answers not kept: cache full or away, or the answer too large.")
CACHE_FAILURES = Counter("batchmill_cache_failures", "Times the result cache did not answer.")
CACHE_RESTING = Gauge("batchmill_cache_resting", "1 while the result cache is left alone because it failed.")
CACHE_ENTRIES = Gauge("batchmill_cache_entries", "Answers that the result cache's server holds.")
CACHE_BYTES = Gauge("batchmill_cache_bytes", "Memory of the result cache's server, or what the cache counted on it.")
CACHE_CAPACITY = Gauge("batchmill_cache_capacity_bytes", "What the result cache may hold.")
CACHE_EVICTED = Gauge("batchmill_cache_evicted", "Answers pushed out since the result cache's server started.")
DRAINING = Gauge("batchmill_draining", "1 while this worker finishes what it has and takes nothing new.", ["model"])
SICK = Gauge("batchmill_sick", "1 while this worker takes nothing: its requests fail, others' do not.", ["model"])
FAILING = Gauge("batchmill_failing", "Share of this worker's last first attempts that failed, 0 to 1.", ["model"])

CATALOGUE = (
    BATCHES_ACTIVE,
    REQUESTS_IN_FLIGHT,
    CHUNKS_SENT,
    CHUNKS_LOST,
    CRASHES,
    CHUNKS_COPIED,
    CHUNKS_STOLEN,
    WINDOW,
    RESULTS_LOGGED,
    RESULTS_REPEATED,
    MESSAGES_REFUSED,
    DEAD_LETTERS,
    LEDGER_BYTES,
    LEDGER_SYNC_SECONDS,
    LEADER,
    ENGINE_RUNNING,
    ENGINE_WAITING,
    ENGINE_KV_USAGE,
    CHUNKS_RUNNING,
    CHUNK_SECONDS,
    RESULTS_SENT,
    TOKENS,
    REQUESTS_SHARED,
    CACHE_HITS,
    CACHE_MISSES,
    CACHE_SERVED,
    CACHE_WRITTEN,
    CACHE_DROPPED,
    CACHE_FAILURES,
    CACHE_RESTING,
    CACHE_ENTRIES,
    CACHE_BYTES,
    CACHE_CAPACITY,
    CACHE_EVICTED,
    DRAINING,
    SICK,
    FAILING,
)


def serve(telemetry: Telemetry, offset: int = 0) -> int:
    """Serve `/metrics`; the port, or 0 where `telemetry.metrics_port` is 0.

    `offset` keeps the roles of one host apart: a coordinator takes its shard, a worker 100 and its first device.
    `UsageError` when the port is taken.
    """
    if telemetry.metrics_port == 0:
        return 0
    port = telemetry.metrics_port + offset
    try:
        start_http_server(port, addr=telemetry.metrics_host)
    except OSError as exc:
        raise UsageError(
            f"telemetry.metrics_port: cannot serve metrics on {telemetry.metrics_host}:{port}: {exc.strerror}"
        ) from None
    return port


def page() -> str:
    """docs/metrics.md."""
    rows = []
    for metric in CATALOGUE:
        description = next(iter(metric.describe()))
        name = description.name + ("_total" if description.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames) or "–"
        rows.append(f"| `{name}` | {description.type} | {labels} | {description.documentation} |")
    return "\n".join(
        [
            "# Metrics",
            "",
            "Made from `common/metrics.py` (`python -m common.metrics > docs/metrics.md`). Every role serves them at",
            "`/metrics` when `telemetry.metrics_port` is set: a coordinator at that port plus its shard, a worker at",
            "that port plus 100 plus its first device. They have no password: bind them to a private address.",
            "",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
