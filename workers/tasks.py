"""The Celery application of a worker and its one task."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.exceptions import Reject, Terminated

from common.broker import make_app, queue
from common.messages import TASK_INFER
from workers.node import Ending, Node
from workers.request import ChunkRequest, strategy


def make_worker_app(node: Node) -> Celery:
    """The application, consuming the queues of `node`."""
    app = make_app(node.settings)
    shared, own = node.queues
    app.conf.update(
        task_queues=[queue(node.settings, shared), queue(node.settings, own, transient=True)],
        task_default_queue=shared,
        task_default_routing_key=shared,
        worker_concurrency=node.settings.inference.chunks_in_flight,
        worker_pool="workers.pool:EnginePool",
        worker_consumer="workers.consumer:ChunkConsumer",
        # A redelivered copy of a running chunk takes a place in the prefetch and frees it when that chunk is done.
        worker_enable_prefetch_count_reduction=False,
    )
    app.batchmill_node = node

    @app.task(  # type: ignore[untyped-decorator]
        name=TASK_INFER,
        bind=True,
        acks_late=True,
        ignore_result=True,
        send_events=True,
        Request=ChunkRequest,
        Strategy=staticmethod(strategy),
        max_retries=0,
    )
    def infer_chunk(self: Any, blob: bytes) -> str:
        """Run one chunk; everything about it is in the signed blob."""
        delivery = self.request.delivery_info or {}
        ending, word = node.infer(
            self.request.id, str(delivery.get("routing_key")), blob, redelivered=bool(delivery.get("redelivered"))
        )
        if ending is Ending.REQUEUE:
            raise Reject(word, requeue=True)
        if ending is Ending.TERMINATED:
            raise Terminated(word)
        return word

    return app
