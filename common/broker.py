"""The broker: one Celery configuration, the queues and how to publish, on Redis and on RabbitMQ alike.

Every publish goes through the default exchange (`''`) with the queue as routing key: through a named exchange, a
message vanishes silently once the exchange's binding is gone. `publisher.py` publishes, confirmed by the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu import Connection, Exchange, Queue

from common import queue_order, redis_clients, redis_clock, serializer
from common.codec import PURPOSE_CHUNK, PURPOSE_RESULTS, Codec
from common.errors import Unreachable, UsageError
from common.messages import QUEUE_DEAD, QUEUE_INTAKE
from common.settings import Settings

#: Seconds after its last use until a worker's own queue ends, with what waits in it.
TRANSIENT_S = 3600

DEFAULT_EXCHANGE = Exchange("", type="direct")


def broker_url(settings: Settings) -> str:
    """The broker's URL; `UsageError` when none is set."""
    if not settings.broker.url:
        raise UsageError("no broker is configured: set broker.url in fleet.yaml or BATCHMILL_BROKER_URL")
    return settings.broker.url


def is_amqp(url: str) -> bool:
    """True for RabbitMQ."""
    return url.startswith(("amqp", "pyamqp"))


def transport_options(settings: Settings) -> dict[str, Any]:
    """kombu's options; the same for every role, since on Redis the shortest visibility timeout of any client wins."""
    if is_amqp(broker_url(settings)):
        return {"confirm_publish": True}
    return {
        "visibility_timeout": settings.broker.visibility_timeout_s,
        # One sweep every unacked_restore_interval (10 s); the default is one in ten.
        "unacked_restore_throttle": 1,
        # Who is killed in a sweep leaves its lock behind; by default nobody would sweep for five minutes then.
        "unacked_mutex_expire": 15,
        "socket_keepalive": True,
        "health_check_interval": 10,
        "queue_order_strategy": queue_order.NAME,
    }


def make_app(settings: Settings) -> Celery:
    """The Celery application every role uses. Each setting's reason stands beside it."""
    serializer.install()
    redis_clock.install()
    redis_clients.install()
    url = broker_url(settings)
    app = Celery("batchmill", broker=url, set_as_current=False)
    app.conf.update(
        accept_content=[serializer.CONTENT_TYPE, "json"],  # json: remote control and `batchmill.submit`
        # Remote control serialises with it (celery/app/control.py); chunks name their own serializer.
        task_serializer="json",
        task_acks_late=True,  # acked only after the results are confirmed
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        result_backend=None,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,  # a blip must not throw generations away
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=True,
        worker_enable_remote_control=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,
        broker_pool_limit=settings.inference.chunks_in_flight + 4,
        broker_heartbeat=settings.broker.heartbeat_s if is_amqp(url) else 0,
        broker_transport_options=transport_options(settings),
        task_create_missing_queues=False,
        task_queues=[queue(settings, QUEUE_INTAKE)],
        task_default_queue=QUEUE_INTAKE,
        task_default_exchange="",
        task_default_routing_key=QUEUE_INTAKE,
        event_queue_expires=60,
        control_queue_expires=300,
    )
    return app


def queue(settings: Settings, name: str, *, transient: bool = False) -> Queue:
    """A queue by name; on RabbitMQ a quorum queue (`transient`: a worker's own, deleted an hour after its last use).

    `intake` is a plain durable queue: senders are plain Celery programs, which declare a queue they send to, and
    RabbitMQ refuses another declaration than the first.
    """
    arguments: dict[str, Any] = {}
    if is_amqp(broker_url(settings)) and name != QUEUE_INTAKE:
        arguments = {
            "x-queue-type": "quorum",
            "x-consumer-timeout": settings.broker.consumer_timeout_ms,
            "x-delivery-limit": settings.broker.delivery_limit,
        }
        if transient:
            arguments["x-expires"] = TRANSIENT_S * 1000
        if name != QUEUE_DEAD:
            arguments |= {
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": QUEUE_DEAD,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
    return Queue(name, exchange=DEFAULT_EXCHANGE, routing_key=name, durable=True, queue_arguments=arguments)


def delete_queue(settings: Settings, connection: Connection, name: str) -> None:
    """Delete a queue and what waits in it; raises what the transport raises."""
    if is_amqp(broker_url(settings)):
        connection.default_channel.queue_delete(name)
    else:
        # An empty queue does not exist there, and kombu deletes only what is bound to an exchange.
        connection.default_channel.queue_purge(name)


def connect(
    settings: Settings, on_blocked: Callable[[bool], None] | None = None, *, confirm_each: bool = True
) -> Connection:
    """A connection of one's own (not from a pool); `Unreachable` when the broker does not answer within 5 s.

    `on_blocked` is called, while something reads, when RabbitMQ blocks publishers (memory or disk alarm) or no more.
    `confirm_each`: every publish waits for RabbitMQ's confirm.
    """
    serializer.install()
    redis_clock.install()
    redis_clients.install()
    url = broker_url(settings)
    options = transport_options(settings)
    if not confirm_each:
        options.pop("confirm_publish", None)
    if on_blocked is not None and is_amqp(url):
        options["on_blocked"] = lambda *_: on_blocked(True)
        options["on_unblocked"] = lambda *_: on_blocked(False)
    connection = Connection(
        url,
        transport_options=options,
        heartbeat=settings.broker.heartbeat_s if is_amqp(url) else 0,
        connect_timeout=5,
    )
    try:
        connection.ensure_connection(max_retries=1, interval_start=0.2, timeout=5)
        if not is_amqp(url):
            redis_clock.follow(connection.default_channel.client)
    except Exception as exc:
        connection.release()
        raise Unreachable(f"broker {url} does not answer: {exc}") from None
    return connection


def codecs(settings: Settings) -> tuple[Codec, Codec]:
    """The codecs of both directions, (chunks, results); `UsageError` when a key is missing."""
    security = settings.security
    made = []
    for purpose, key, old, name in (
        (PURPOSE_CHUNK, security.dispatch_key, security.old_dispatch_keys, "dispatch_key"),
        (PURPOSE_RESULTS, security.results_key, security.old_results_keys, "results_key"),
    ):
        if not key:
            raise UsageError(
                f"security.{name} is not set: put 64 hex digits (openssl rand -hex 32) in a file and name it in "
                f"BATCHMILL_SECURITY_{name.upper()}_FILE, the same on every machine"
            )
        keys = {k: bytes.fromhex(v) for k, v in old.items()} | {security.key_id: bytes.fromhex(key)}
        made.append(Codec(purpose, keys, security.key_id))
    return made[0], made[1]
