"""What a fault cost: requests run twice, and seconds to recover. Pure: events in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.echo_journal import Event


@dataclass(frozen=True)
class Measured:
    """`run_twice`: times that a request entered an engine which had been in one before.

    `recovered_s`: seconds from the end of the fault until every request that was in an engine before it and had to be
    run again was in one again, and a result was logged; 0 when both came while the fault still lasted.
    """

    run_twice: int
    recovered_s: float


def measure(events: Iterable[Event], began: float, ended: float, progress_at: float) -> Measured:
    """The cost of a fault that lasted from `began` to `ended`; `progress_at`: when a result was logged after it."""
    first: dict[str, float] = {}
    run_twice = 0
    again_at = began
    for event in events:
        if event.kind != "+":
            continue
        if event.request in first:
            run_twice += 1
            if first[event.request] <= ended:
                again_at = max(again_at, event.at)
        first.setdefault(event.request, event.at)
    return Measured(run_twice, round(max(0.0, again_at - ended, progress_at - ended), 1))
