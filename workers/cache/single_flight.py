"""Identical determined requests in flight run once: the first leads, the others wait for its answer. Pure.

Whoever owns the requests asks here before one enters the engine, and says what became of it. Nothing is decided about
answers: the owner knows whether the leader's outcome is one for all (an answer) or its own affair (a refusal, a
failure, a timeout), and then runs those who waited, each for itself: a leader's failure must not be anybody else's, and
failing one after the other would take as long as all of them together.

A leader that is given up does not stop the computation while somebody waits for it: the longest waiting takes over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class _Flight(Generic[Member]):
    __slots__ = ("leader", "waiting")

    def __init__(self, leader: Member) -> None:
        self.leader = leader
        # In order of arrival; a dict, since any of them may leave.
        self.waiting: dict[Member, None] = {}


class SingleFlight(Generic[Member]):
    """Flights by key. Not thread-safe: all of it belongs to one thread, the engine's loop.

    A member is one request of one chunk and is in one flight at a time.
    """

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight[Member]] = {}
        self._key_of: dict[Member, bytes] = {}

    def __len__(self) -> int:
        """Flights under way."""
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Members that wait for a leader; they take no room in the engine."""
        return len(self._key_of) - len(self._flights)

    def join(self, key: bytes, member: Member) -> bool:
        """True: the member leads and must be run; False: it waits until the leader ends or leaves."""
        if member in self._key_of:
            raise ValueError("is in a flight already")
        self._key_of[member] = key
        flight = self._flights.get(key)
        if flight is None:
            self._flights[key] = _Flight(member)
            return True
        flight.waiting[member] = None
        return False

    def end(self, leader: Member) -> list[Member]:
        """The leader's computation has ended: those who waited for it, in order of their arrival.

        They get its answer, or each of them has to be run by itself, without joining again. Nobody when the member
        is in no flight.
        """
        key = self._key_of.get(leader)
        if key is None:
            return []
        if self._flights[key].leader != leader:
            raise ValueError("waits, and does not lead")
        waited = list(self._flights.pop(key).waiting)
        for member in (leader, *waited):
            del self._key_of[member]
        return waited

    def leave(self, member: Member) -> Member | None:
        """A member is given up: its batch was cancelled, its chunk was given back.

        Returns who takes its place where it led and somebody waits: the computation goes on, and its outcome is that
        one's. None: end the computation if it led, which the owner knows.
        """
        key = self._key_of.pop(member, None)
        if key is None:
            return None
        flight = self._flights[key]
        if flight.leader != member:
            del flight.waiting[member]
            return None
        successor = next(iter(flight.waiting), None)
        if successor is None:
            del self._flights[key]
            return None
        del flight.waiting[successor]
        flight.leader = successor
        return successor
