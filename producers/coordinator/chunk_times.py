"""How long workers have a chunk, measured on the latest ones. Pure."""

from __future__ import annotations

from collections import deque

#: Chunks that count.
LATEST = 64
#: Chunks from which on the figure is believed.
ENOUGH = 3
#: What the latest chunk weighs in the figure of its worker.
LATEST_WEIGHT = 0.3


class ChunkTimes:
    """Seconds from a chunk's start on a worker to its last result."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, int]] = deque(maxlen=LATEST)
        self._median: float | None = None
        self._by_node: dict[str, float] = {}

    def add(self, seconds: float, rows: int, node: str = "") -> None:
        """A chunk of so many rows has ended on a worker."""
        before = self._by_node.get(node, seconds)
        self._by_node[node] = before + LATEST_WEIGHT * (seconds - before)
        self._latest.append((seconds, rows))
        self._median = None

    @property
    def rate(self) -> float | None:
        """Requests a second that come out of one of a worker's chunks; None while too few have ended."""
        if len(self._latest) < ENOUGH:
            return None
        return sum(rows for _, rows in self._latest) / sum(seconds for seconds, _ in self._latest)

    def of(self, node: str) -> float:
        """How long a worker has a chunk; of one that has ended none, as the others do."""
        return self._by_node.get(node) or self.median or 1.0

    @property
    def median(self) -> float | None:
        """The time of the chunk that the median row was in, so that the short chunks at an end weigh little.

        None while too few have ended.
        """
        if self._median is None and len(self._latest) >= ENOUGH:
            half, passed = sum(rows for _, rows in self._latest) / 2, 0
            for seconds, rows in sorted(self._latest):
                passed += rows
                if passed >= half:
                    self._median = seconds
                    break
        return self._median
