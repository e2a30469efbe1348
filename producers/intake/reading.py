"""One reading of one input: check lines, gather windows of rows, find repeated custom ids, keep what was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from common.errors import InvalidInput
from common.pieces import LEAST, Body, Pieces
from producers.intake.duplicates import Duplicate, Duplicates
from producers.intake.explain import Refused
from producers.intake.reader import ENDLESS, read_lines
from producers.intake.refusals import SHOWN, LineError, Refusal, Refusals, Report, ReportFile
from producers.intake.rules import Rules
from producers.intake.source import Source
from producers.plan_file import WindowRow
from producers.planner import EXACT_BYTES, WINDOW_BYTES, WINDOW_ROWS, Key, hold_key

if TYPE_CHECKING:
    from producers.invalid_file import InvalidWriter

#: Called now and then with bytes read (before decompression) and lines.
Progress = Callable[[int, int], None]

#: Bytes that a row takes in memory besides its custom id, its body and its key: the objects, and the planner's numbers.
_ROW_EXTRA = 512

#: Faults after which a file is read no further that will not be taken, or that has nothing else: a stream of garbage
#: need not end, and nobody mends as many by hand.
MOST_FAULTS = 100_000

#: Rows, plans and results keep an index in 32 bits.
MAX_REQUESTS = 2**32 - 1


class Windows(Protocol):
    """Takes the valid rows of a file, window by window; `plan_file.PlanWriter`."""

    def add(self, rows: Sequence[WindowRow], index_start: int, index_end: int, /) -> None:
        """A window; all its rows have indexes in `[index_start, index_end)`."""
        ...


class Reading:
    """Use it as a context manager: temporary files are let go at its end.

    `folder`: where they go; None: the system's place. `report_file`: whether one may be written for a person.
    """

    def __init__(
        self,
        source: Source,
        rules: Rules,
        *,
        skip_invalid: bool = False,
        progress: Progress | None = None,
        folder: str | None = None,
        report_file: bool = True,
    ) -> None:
        self._source = source
        self._rules = rules
        self._skip_invalid = skip_invalid
        self._progress = progress
        self._report_file = report_file
        self._duplicates = Duplicates(folder)
        self._refusals = Refusals(folder)
        #: Refused in the window at hand, not in order yet.
        self._refused: list[Refusal] = []
        #: Valid so far in the window at hand.
        self._rows: list[WindowRow] = []
        self._pieces = Pieces()
        self._window_start = 0
        self._lines = 0
        self._cost = 0
        #: Requests so far, valid or not, which is the index of the next.
        self.requests = 0
        #: Repeats that only showed across windows; known after a report.
        self.repeats_across = 0
        #: Why the input as a whole cannot be taken, whatever its lines are like.
        self.fatal: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._duplicates.close()
        self._refusals.close()

    def run(self, writer: Windows | None) -> None:
        """Read to the end; rows go to `writer` window by window, as long as the batch may still come to be."""
        check = self._rules.check
        source = self._source
        rows = self._rows
        held: Body
        held_key: Key
        number = index = size = cost_sum = 0
        window_end = WINDOW_ROWS
        for lines, utf8, endless in read_lines(source.blocks(), self._rules.longest):
            if source.broken:
                # What is left is the start of a line whose rest is lost: not that line's fault.
                break
            for line in lines:
                number += 1
                try:
                    checked = check(line, utf8)
                except Refused as refused:
                    self._refused.append(Refusal(index, number, refused.custom_id, refused.field, refused.reason))
                    index += 1
                    if not self._skip_invalid:
                        # There will be no batch: from here on only the report counts.
                        writer = None
                else:
                    if checked is None:
                        continue
                    custom_id, url, body, key, cost, output = checked
                    cost_sum += cost
                    if writer is not None:
                        if len(body) < LEAST and len(key) <= EXACT_BYTES:
                            # As `_hold`, which most requests need not pay for.
                            held, held_key, need = body, key, len(body) + len(key) + len(custom_id) + _ROW_EXTRA
                        else:
                            held, held_key, need = self._hold(custom_id, body, key)
                        if size + need > WINDOW_BYTES and size:
                            self._close_window(writer, index)
                            window_end = index + WINDOW_ROWS
                            size = 0
                            held, held_key, need = self._hold(custom_id, body, key)
                        size += need
                    else:
                        held = held_key = b""
                    rows.append((index, number, custom_id, url, held, held_key, cost, output))
                    index += 1
                if index >= window_end:
                    self._close_window(writer, index)
                    window_end = index + WINDOW_ROWS
                    size = 0
            self.requests, self._lines, self._cost = index, number, cost_sum
            if endless:
                self.fatal = (
                    f"has a line of more than {ENDLESS * self._rules.longest} bytes: it is no file of JSON lines"
                )
                break
            faults = self._refusals.count + len(self._refused)
            if faults >= MOST_FAULTS and (not self._skip_invalid or faults == index):
                self.fatal = f"has {faults} faults up to line {number}, where reading stopped"
                break
            if index > MAX_REQUESTS:
                self.fatal = f"has more than {MAX_REQUESTS} requests; split it"
                break
            if self._progress is not None:
                self._progress(source.bytes_read, number)
        self._close_window(writer, index)
        self._end()

    def _hold(self, custom_id: bytes, body: bytes, key: bytes) -> tuple[Body, Key, int]:
        """A row's body and key as they are kept in the window at hand, and the bytes of memory that the row takes."""
        held, taken = self._pieces.hold(body)
        held_key, more = hold_key(key, self._pieces)
        return held, held_key, taken + more + len(custom_id) + _ROW_EXTRA

    def _end(self) -> None:
        if self._source.broken:
            self.fatal = f"{self._source.broken}; read so far: {self._lines} whole lines"
        elif self.fatal is None:
            try:
                self._source.verify()
            except InvalidInput as exc:
                self.fatal = str(exc).removeprefix(f"{self._source.name}: ")
            else:
                if not self.requests:
                    self.fatal = "has no requests in it"

    def _close_window(self, writer: Windows | None, index_end: int) -> None:
        rows = self._rows
        repeats = self._duplicates.add_window(
            [row[:3] for row in rows],
            [(r.index, r.line, r.custom_id) for r in self._refused if r.custom_id is not None],
        )
        if repeats:
            self._refused.extend(map(_as_refusal, repeats))
            self._refused.sort(key=lambda r: r.line)
        self._refusals.add(self._refused)
        self._refused.clear()
        if writer is not None and (self._skip_invalid or not self._refusals.count):
            dropped = {r.index for r in repeats}
            writer.add([r for r in rows if r[0] not in dropped] if dropped else rows, self._window_start, index_end)
        rows.clear()
        self._pieces.clear()
        self._window_start = index_end

    def repeats(self) -> Iterator[Duplicate]:
        """The requests that only show as repeats across windows, in order of their indexes."""
        return self._duplicates.across_windows()

    def report(self, invalid: InvalidWriter | None = None) -> Report:
        """What was found. Refused requests go to `invalid` as error lines, or else to the report file."""
        report = Report(
            requests=self.requests, errors=[], error_count=0, model=self._rules.model or "", cost=self._cost
        )
        file = ReportFile(self._source.name)

        def note(error: LineError) -> None:
            report.error_count += 1
            if report.error_count <= SHOWN:
                report.errors.append(error)
            if invalid is None and self._report_file:
                file.add(error)

        found = self._refusals.count
        for refusal in self._refusals.merged(map(_as_refusal, self.repeats())):
            note(LineError(refusal.line, refusal.field, refusal.reason))
            if invalid is not None:
                place = f"{refusal.field}: " if refusal.field else ""
                invalid.add(refusal.index, refusal.custom_id, f"line {refusal.line}: {place}{refusal.reason}")
        self.repeats_across = report.error_count - found
        if self.fatal is not None:
            note(LineError(max(1, self._lines), "", self.fatal))
        if invalid is not None:
            invalid.flush()
        file.close()
        report.report_file = file.path
        return report


def _as_refusal(repeat: Duplicate) -> Refusal:
    return Refusal(
        repeat.index, repeat.line, repeat.custom_id, "custom_id", f"is the same as on line {repeat.first_line}"
    )
