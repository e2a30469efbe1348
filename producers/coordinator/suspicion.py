"""Which requests may be what ends engines, and what becomes of them. Pure.

A worker that ends abnormally leaves a breadcrumb of what was inside its engine. Each request that it names is charged
once; all others are not. Charged twice, a request goes into probation: an isolated chunk, with nothing else in its
worker's engine. At first a few suspects run side by side there, which clears most of those that were merely near; what
is charged once more runs one at a time, so that a crash names exactly one. Who ends an engine alone twice is convicted
and becomes an error; its neighbours are answered. Once would not do: workers are also killed from outside.

So a request that ends every engine costs at most `CONVICTED` = 5 of them, and n of them that meet in one engine cost at
most 2 + 3 n: two crashes charge all of them twice, at most n groups end, and each ends two engines alone. A small group
and then one at a time, and not in halves as a bisection would, since a restart of an engine costs minutes and a request
seconds.

A lease that lapses without a report (the machine is gone, or its network) charges nobody, but a request may be what
takes whole machines down: `LAPSES` of them in a row count as one charge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from producers.coordinator.lanes import Outstanding, Retry, Share
from producers.coordinator.row_states import Positions

#: Charges from which a request runs isolated, from which it runs alone, and at which it is convicted.
SUSPECT = 2
ALONE = 3
CONVICTED = 5
#: Losses in a row without a report that count as one charge.
LAPSES = 3
#: Requests of an isolated chunk, at most. It is quartered after each lapse, so that whoever is convicted without a
#: breadcrumb was alone.
MOST_ISOLATED = 16
#: Of a request that was tried on more than one worker.
SEVERAL = "*"

_Item = TypeVar("_Item", Share, Retry)


def tried_on(before: str, node: str) -> str:
    """Where a request was tried, after `node` tried it too: nowhere (empty), one worker, or `SEVERAL`."""
    if not node or before == node:
        return before
    return SEVERAL if before else node


def after_crash(share: Share, rows: Positions, named: Positions, node: str, now: float) -> list[Retry]:
    """What becomes of the open `rows` of a share whose worker crashed with `named` inside its engine."""
    guilty = np.isin(rows, named)
    tried = tried_on(share.tried, node)
    found = []
    if guilty.any():
        found.append(Retry(share.batch, rows[guilty], share.attempt, share.charges + 1, 0, now, tried=tried))
    if not guilty.all():
        # A lapse all the same: what ends a worker before it enters the engine must not do so for ever.
        found.append(_lapsed(share, rows[~guilty], share.tried, now))
    return found


def after_lapse(share: Share, rows: Positions, node: str, now: float) -> Retry:
    """What becomes of the open `rows` of a share whose lease lapsed without a report."""
    return _lapsed(share, rows, tried_on(share.tried, node), now)


def _lapsed(share: Share, rows: Positions, tried: str, now: float) -> Retry:
    charges, lapses = share.charges, share.lapses + 1
    if lapses >= LAPSES:
        # Nobody is convicted in company.
        charges, lapses = (charges, LAPSES - 1) if charges >= ALONE and len(rows) > 1 else (charges + 1, 0)
    return Retry(share.batch, rows, share.attempt, charges, lapses, now, tried=tried)


def charged_late(item: _Item, batch: str, named: Positions, node: str) -> list[_Item]:
    """`item`, parted, after a report that came when its rows had been sent again: never enough to convict."""
    hit = np.isin(item.positions, named)
    if item.batch != batch or item.charges >= SUSPECT or not hit.any():
        return [item]
    tried = tried_on(item.tried, node)
    charged = replace(item, positions=item.positions[hit], charges=item.charges + 1, tried=tried)
    return [charged] if hit.all() else [charged, replace(item, positions=item.positions[~hit])]


def untried(tried: str, nodes: Sequence[str]) -> bool:
    """True when one worker alone tried a request in vain and another is there: one more attempt, by that."""
    return tried not in ("", SEVERAL) and any(node != tried for node in nodes)


def room_for_isolated(out: Sequence[Outstanding], workers: int) -> bool:
    """True while another isolated chunk may go out: half of the workers go on with everybody else's work."""
    return sum(1 for chunk in out if chunk.isolated) < max(1, workers // 2)


def isolated_size(lapses: int) -> int:
    """Requests of an isolated chunk."""
    return max(1, MOST_ISOLATED >> (2 * lapses))


def isolated_at_once(charges: int) -> int:
    """How many requests of an isolated chunk may be in the engine at a time."""
    return MOST_ISOLATED if charges < ALONE else 1
