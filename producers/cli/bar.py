"""The bar of a batch that is being followed on a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from producers.batch_view import BatchView
from producers.cli import wording
from producers.following import Pace


def frame(seen: BatchView, pace: Pace) -> Group:
    """One picture of the bar; fits 80 columns."""
    total = seen.request_counts.total
    head = Text.assemble((seen.id, "bold"), "  ", wording.plain(seen.model), no_wrap=True, overflow="ellipsis")
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        ProgressBar(total=max(1, total), completed=seen.answered if total else 1),
        f"{seen.answered:,}/{total:,}  {wording.percent(seen):>3}%",
    )
    foot = Text(" · ".join([wording.status(seen), *wording.facts(seen, pace)]), no_wrap=True, overflow="ellipsis")
    why = wording.reason(seen)
    return Group(head, row, foot, *([Text(wording.plain(why), style="yellow")] if why else []))
