"""Sort more records than memory should hold: sorted runs in a temporary file, merged piece by piece.

Only one run and a sample of every run's keys (8 bytes for every `_STRIDE` records) stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from producers.intake.temporary import spooled, write

Records = npt.NDArray[np.void]

#: Records of a run. The longer the runs, the fewer of them a piece is gathered from.
_RUN = 16_384
#: Every how many records of a run a key is remembered; a piece cannot be smaller than this times the number of runs.
_STRIDE = 64


class ExternalSort:
    """Records of a numpy structured type, out again in order of one of its u64 fields; equal keys in no set order.

    `piece`: about how many records are in memory at a time. `folder`: where the temporary file goes (it has no name
    there, so nothing is left behind whatever happens).
    """

    def __init__(self, dtype: np.dtype[np.void], key: str, folder: str | None = None, piece: int = 32_768) -> None:
        self._dtype = dtype
        self._key = key
        self._piece = piece
        self._file = spooled(folder)
        self._runs: list[tuple[int, int, npt.NDArray[np.uint64]]] = []
        self._pending: list[Records] = []
        self._pending_count = 0
        self.count = 0

    def add(self, records: Records) -> None:
        """Add records in any order; they are kept, not copied, until a run is full."""
        if len(records):
            self._pending.append(records)
            self._pending_count += len(records)
            if self._pending_count >= _RUN:
                self._end_run()

    def _end_run(self) -> None:
        if not self._pending:
            return
        records = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        self._pending.clear()
        self._pending_count = 0
        run = records[np.argsort(records[self._key], kind="stable")]
        write(self._file, run.tobytes())
        self._runs.append((self.count, len(run), run[self._key][::_STRIDE].copy()))
        self.count += len(run)

    def __iter__(self) -> Iterator[Records]:
        """Everything in order, in arrays; records of one key are never split over two arrays."""
        self._end_run()
        done = [0] * len(self._runs)
        for bound in self._bounds():
            parts = []
            for n, (start, length, sample) in enumerate(self._runs):
                # Where the bound falls in a run lies before the first sampled key that reaches it.
                reach = length if bound is None else int(np.searchsorted(sample, bound, "left")) * _STRIDE
                end = min(length, reach)
                if end <= done[n]:
                    continue
                records = self._read(start + done[n], end - done[n])
                if bound is not None:
                    records = records[: int(np.searchsorted(records[self._key], bound, "left"))].copy()
                done[n] += len(records)
                parts.append(records)
            if parts and sum(map(len, parts)):
                merged = np.concatenate(parts)
                yield merged[np.argsort(merged[self._key], kind="stable")]

    def _bounds(self) -> Iterator[np.uint64 | None]:
        """Keys that cut everything into pieces; None, at the end, stands for all that is left."""
        if self._runs:
            sample = np.sort(np.concatenate([s for _, _, s in self._runs]))
            step = max(1, self._piece // _STRIDE)
            last = None
            for bound in sample[step::step]:
                if last is None or bound > last:
                    yield bound
                    last = bound
        yield None

    def _read(self, start: int, count: int) -> Records:
        size = self._dtype.itemsize
        self._file.seek(start * size)
        return np.frombuffer(self._file.read(count * size), self._dtype)

    def close(self) -> None:
        """Let the temporary file go."""
        self._file.close()
