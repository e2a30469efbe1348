"""Which publishes a broker has still to confirm (RabbitMQ's publisher confirms). Pure: no connection in here."""

from __future__ import annotations

from typing import NamedTuple


class Sent(NamedTuple):
    """One publish on its way: the queue it goes to, its sender's name for it, and when it was sent (monotonic)."""

    queue: str
    key: str
    at: float


class Confirms:
    """The publishes of one channel, by delivery tag: the broker counts them from 1, and so does this.

    One answer of the broker may settle several: `multiple` settles all up to its tag.
    """

    def __init__(self) -> None:
        self._last = 0
        self._waiting: dict[int, Sent] = {}  # in the order of their tags
        #: Publishes that the broker refused (nack) since they were last taken.
        self.refused: list[Sent] = []
        #: Publishes that the broker confirmed since they were last taken.
        self.confirmed: list[Sent] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> Sent | None:
        """The one that has waited longest."""
        return next(iter(self._waiting.values()), None)

    @property
    def waiting(self) -> list[Sent]:
        """All that wait, the oldest first."""
        return list(self._waiting.values())

    def sent(self, queue: str, key: str, at: float) -> None:
        """Note a publish; call it in the order in which they are written to the channel, before the write."""
        self._last += 1
        self._waiting[self._last] = Sent(queue, key, at)

    def ack(self, tag: int, multiple: bool) -> None:
        """The broker has it."""
        self.confirmed += self._settle(tag, multiple)

    def nack(self, tag: int, multiple: bool) -> None:
        """The broker does not take it."""
        self.refused += self._settle(tag, multiple)

    def _settle(self, tag: int, multiple: bool) -> list[Sent]:
        if not multiple:
            found = self._waiting.pop(tag, None)
            return [] if found is None else [found]
        # Tag 0 with `multiple` means all there are (AMQP 0-9-1).
        tags = [t for t in self._waiting if tag == 0 or t <= tag]
        return [self._waiting.pop(t) for t in tags]
