"""Publishing, confirmed by the broker: one message at a time, or several on their way at once."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from amqp.exceptions import MessageNacked
from kombu import Connection, Producer

from common import serializer
from common.broker import TRANSIENT_S, broker_url, connect, is_amqp, queue
from common.confirms import Confirms
from common.settings import Settings

#: Seconds to wait for the broker's confirm; a broker that blocks publishers (memory, disk) answers late.
CONFIRM_TIMEOUT_S = 30


class Publisher:
    """Publishes over a connection of its own, confirmed. One thread at a time.

    `publish` returns once the broker has the message. `begin` only sends it, and `settle` waits for those that are on
    their way: with a broker whose confirm takes 20 ms (a quorum on three machines, a disk), one by one would be 50
    messages a second. Redis answers a publish itself, so there nothing is ever on its way.

    A RabbitMQ that is killed within seconds of a quorum queue's declaration comes back with that queue unable to
    confirm anything, for good (seen on 3.10). So a queue that leaves publishes unconfirmed twice in a row, on a broker
    that answers and blocks nobody, is deleted and declared anew: what it held is sent again, since the store is the
    truth.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._amqp = is_amqp(broker_url(settings))
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._declared: set[str] = set()
        self._confirms = Confirms()
        self._confirmed: list[str] = []
        self._unconfirmed: Counter[str] = Counter()
        #: True while RabbitMQ, short of memory or disk, takes nothing from publishers.
        self.blocked = False
        #: Called whenever that changes, in the middle of a `settle` too, which waits for it to end.
        self.on_blocked: Callable[[bool], None] = lambda _blocked: None

    def publish(
        self,
        name: str,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        serializer_name: str = serializer.NAME,
        **properties: Any,
    ) -> None:
        """Publish to a queue, declaring it at first use; raises what the transport raises when it is not confirmed.

        The connection is dropped after an error, so that the next call starts on a new one.
        """
        self.begin(name, body, headers=headers, serializer_name=serializer_name, **properties)
        self.settle()
        self._confirmed.clear()

    def begin(
        self,
        name: str,
        body: Any,
        *,
        key: str = "",
        headers: dict[str, Any] | None = None,
        serializer_name: str = serializer.NAME,
        transient: bool = False,
        **properties: Any,
    ) -> None:
        """Send a message on its way; `confirmed` names it by `key` once the broker has it.

        After an error, and after one of `settle`, all that was on its way has to be sent again. `transient`: a worker's
        own queue, which ends an hour after its last use.
        """
        try:
            producer = self._ready(name, transient)
            self._confirms.sent(name, key, time.monotonic())
            producer.publish(
                body,
                exchange="",
                routing_key=name,
                serializer=serializer_name,
                headers=headers or {},
                delivery_mode=2,
                # RabbitMQ: a queue that is gone (a wiped broker) makes the publish fail; otherwise the message would
                # be confirmed and dropped.
                mandatory=True,
                # Of the write: a broker that reads no more must not hold this thread for good.
                timeout=CONFIRM_TIMEOUT_S,
                **properties,
            )
            if not self._amqp:
                self._confirms.ack(0, multiple=True)
                if transient:
                    producer.channel.client.expire(name, TRANSIENT_S)
            self._note()
        except BaseException:
            self.close()
            raise

    def begin_task(
        self, name: str, task: str, task_id: str, blob: bytes, argsrepr: str, *, transient: bool = False
    ) -> None:
        """Send a Celery task (protocol 2) whose only argument is `blob` on its way, by its id.

        `argsrepr` is all that monitors show.
        """
        self.begin(
            name,
            blob,
            key=task_id,
            headers={
                "lang": "py",
                "task": task,
                "id": task_id,
                "root_id": task_id,
                "parent_id": None,
                "group": None,
                "argsrepr": argsrepr,
                "kwargsrepr": "{}",
                "origin": "coordinator",
                "ignore_result": True,
            },
            correlation_id=task_id,
            transient=transient,
        )

    def settle(self, most: int = 0) -> None:
        """Wait until at most `most` messages are on their way.

        `MessageNacked` when the broker refused one, `TimeoutError` when one waits for `CONFIRM_TIMEOUT_S`, and whatever
        else the transport raises.
        """
        try:
            while len(self._confirms) > most and self._connection is not None:
                self._drain()
            self._note()
        except BaseException as exc:
            waiting = {sent.queue for sent in self._confirms.waiting}
            self.close()
            if isinstance(exc, TimeoutError) and not self.blocked:
                self._suspect(waiting)
            raise
        refused, self._confirms.refused = self._confirms.refused, []
        if refused:
            self.close()
            if not self.blocked:
                self._suspect({sent.queue for sent in refused})
            raise MessageNacked(f"the broker refused a message for {refused[0].queue}")

    def waiting(self) -> set[str]:
        """The keys of those that are on their way."""
        return {sent.key for sent in self._confirms.waiting}

    def confirmed(self) -> list[str]:
        """The keys of those that the broker confirmed since this was last asked, whatever came of the others."""
        self._note()
        found, self._confirmed = self._confirmed, []
        return found

    def _drain(self) -> None:
        """Read what the broker says, for as long as the oldest message may still wait."""
        oldest = self._confirms.oldest
        left = CONFIRM_TIMEOUT_S if oldest is None else oldest.at + CONFIRM_TIMEOUT_S - time.monotonic()
        if left <= 0 or self._connection is None:
            raise TimeoutError("the broker did not confirm a message")
        self._connection.drain_events(timeout=left)

    def _note(self) -> None:
        done, self._confirms.confirmed = self._confirms.confirmed, []
        if done:
            for sent in done:
                self._confirmed.append(sent.key)
                self._unconfirmed.pop(sent.queue, None)
            self._on_blocked(False)

    def _suspect(self, names: set[str]) -> None:
        for name in names:
            self._unconfirmed[name] += 1
            if self._unconfirmed[name] >= 2 and self._amqp:
                self._replace(name)

    def _replace(self, name: str) -> None:
        connection = connect(self._settings)
        try:
            connection.default_channel.queue_delete(name)
        finally:
            connection.collect(socket_timeout=1)
        self._unconfirmed.pop(name, None)

    def _ready(self, name: str, transient: bool) -> Producer:
        if self._connection is None or self._producer is None:
            self._connection = connect(self._settings, on_blocked=self._on_blocked, confirm_each=False)
            channel = self._connection.default_channel
            if self._amqp:
                channel.confirm_select()
                channel.events["basic_ack"].add(self._confirms.ack)
                channel.events["basic_nack"].add(self._confirms.nack)
            self._producer = Producer(self._connection, auto_declare=False)
        if transient or name not in self._declared:  # A worker's own queue may have been deleted since.
            queue(self._settings, name, transient=transient).bind(self._connection.default_channel).declare()
            self._declared.add(name)
        return self._producer

    def _on_blocked(self, blocked: bool) -> None:
        if blocked != self.blocked:
            self.blocked = blocked
            self.on_blocked(blocked)

    def heartbeat(self) -> None:
        """Keep an idle RabbitMQ connection alive; call it at least twice in every heartbeat interval."""
        if self._connection is not None and self._connection.heartbeat:
            try:
                # The server's heartbeats count only once they are read, and nothing else reads here.
                with contextlib.suppress(TimeoutError):
                    self._connection.drain_events(timeout=0.001)
                self._connection.heartbeat_check()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection, with whatever is on its way; the next message opens another."""
        self._note()
        self._confirms = Confirms()
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        if connection is None:
            return
        if self._amqp:
            # No handshake: a channel that waits for a confirm would hold it up for a minute.
            connection.collect(socket_timeout=1)
        else:
            with contextlib.suppress(Exception):  # thrown away; how it fails to close adds nothing
                connection.release()
