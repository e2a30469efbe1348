"""Custom ids that are used twice, in files of any length.

Repeats within a window are found at once; those across windows at the end (`across_windows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from producers.planner import FEW_ROWS

if TYPE_CHECKING:
    from producers.intake.across_windows import AcrossWindows


@dataclass(frozen=True)
class Duplicate:
    """A request whose custom id an earlier line has."""

    index: int
    line: int
    first_line: int
    custom_id: bytes


class Window(NamedTuple):
    """The requests of a window, column by column; each custom id stands once.

    `refused`: 1 for those that were refused for another reason, else 0.
    """

    indexes: Sequence[int]
    lines: Sequence[int]
    ids: Sequence[bytes]
    refused: Sequence[int]


class Duplicates:
    """Takes every custom id of a file. `folder`: for temporary files."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        #: The first window, if it is small: most files have no other, and need nothing of what compares windows.
        self._first: Window | None = None
        self._across: AcrossWindows | None = None

    def add_window(
        self, requests: Sequence[tuple[int, int, bytes]], refused: Sequence[tuple[int, int, bytes]]
    ) -> list[Duplicate]:
        """Take the next window's `(index, line, custom_id)`; its own repeats, in order of their indexes.

        Custom ids are JSON string literals, equal for equal ids, below 64 KiB. `refused`: requests that were refused
        for another reason; their ids are taken, but they are not reported a second time.
        """
        if not requests and not refused:
            return []
        if refused:
            window = Window(*zip(*sorted([*((*r, 0) for r in requests), *((*r, 1) for r in refused)]), strict=True))
        else:
            indexes, lines, ids = zip(*requests, strict=True)
            window = Window(indexes, lines, ids, (0,) * len(ids))
        found: list[Duplicate] = []
        if len(set(window.ids)) < len(window.ids):
            first: dict[bytes, tuple[int, int, bytes, int]] = {}
            for request in zip(*window, strict=True):
                index, line, custom_id, again = request
                earlier = first.setdefault(custom_id, request)
                if earlier is not request and not again:
                    found.append(Duplicate(index, line, earlier[1], custom_id))
            window = Window(*zip(*first.values(), strict=True))
        if self._across is None and self._first is None and len(window.ids) <= FEW_ROWS:
            self._first = window
        else:
            self._compare(window)
        return found

    def _compare(self, window: Window) -> None:
        if self._across is None:
            from producers.intake.across_windows import AcrossWindows

            self._across = AcrossWindows(self._folder)
            if self._first is not None:
                self._across.add(self._first)
                self._first = None
        self._across.add(window)

    def across_windows(self) -> Iterator[Duplicate]:
        """Repeats that only show across windows, in order of their indexes; to be asked after the last window."""
        return iter(()) if self._across is None else self._across.repeats()

    def close(self) -> None:
        """Let the temporary files go."""
        if self._across is not None:
            self._across.close()
