"""Who is served next: start-time fair queueing, on two levels (tenants, then the batches of each). Pure, no clock.

The rule is Goyal, Vin and Cheng, "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet
Switching Networks" (SIGCOMM 1996), with their hierarchy. Each level has a virtual time `v`; a flow that has something
to send carries a start tag, `max(v, finish tag of its last service)`; the smallest start tag is served; a service of
cost `c` sets the finish tag `start + c / weight`. It is fair however fast or slow the server is, which matters here,
since workers come and go, and it needs a service's cost only once that is done.

What holds, on each level, with `l` the largest cost of one service:

- two flows that both have something to send all the time get `|W_f / w_f - W_g / w_g| <= l_f / w_f + l_g / w_g`;
- a flow that has nothing behind it loses and gains nothing: one that comes new, or back, is served before any other is
  served twice by equal weights, however much the others have to send;
- something is served whenever anyone has something to send.

A cost that is only estimated is put right later (`correct`), but nobody gets ahead of the virtual time by it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_SPARE = 256


@dataclass(slots=True)
class _Flow:
    name: str
    number: int
    weight: float = 1.0
    #: Virtual time at which its next service begins; while it has nothing to send, when its last one ended.
    tag: float = 0.0
    active: bool = False


@dataclass(slots=True)
class _Level:
    """The flows that compete with each other."""

    flows: dict[str, _Flow] = field(default_factory=dict)
    #: `(tag, number, name)` of the active ones, ascending.
    order: list[tuple[float, int, str]] = field(default_factory=list)
    virtual: float = 0.0
    #: The largest tag there ever was.
    top: float = 0.0
    next_number: int = 0

    def flow(self, name: str) -> _Flow:
        found = self.flows.get(name)
        if found is None:
            found = self.flows[name] = _Flow(name, self.next_number)
            self.next_number += 1
        return found

    def activate(self, name: str) -> None:
        flow = self.flow(name)
        if not flow.active:
            flow.active = True
            flow.tag = max(flow.tag, self.virtual)
            insort(self.order, (flow.tag, flow.number, name))

    def deactivate(self, name: str) -> None:
        flow = self.flows.get(name)
        if flow is None or not flow.active:
            return
        flow.active = False
        self._take_out(flow)
        if not self.order:
            # The end of a busy period: nobody owes anybody.
            self.virtual = max(self.virtual, self.top)

    def charge(self, name: str, cost: float) -> None:
        flow = self.flow(name)
        if not flow.active:
            flow.tag = max(flow.tag, self.virtual)
        # The smallest tag there is, which is that of the flow served, unless it was served out of turn.
        self.virtual = max(self.virtual, min(flow.tag, self.order[0][0] if self.order else flow.tag))
        self._move(flow, flow.tag + cost / flow.weight)

    def correct(self, name: str, cost: float) -> None:
        flow = self.flows.get(name)
        if flow is not None:
            # No further back than where a new one begins: what one was charged too much is not for those to wait for
            # who came after.
            self._move(flow, max(self.virtual, flow.tag + cost / flow.weight))

    def weigh(self, name: str, weight: float) -> None:
        flow = self.flow(name)
        if weight != flow.weight:
            # What it was served beyond its share so far is worth so much less time, or more, by the new weight.
            ahead = max(0.0, flow.tag - self.virtual) * flow.weight / weight
            flow.weight = weight
            self._move(flow, self.virtual + ahead)

    def forget(self, name: str) -> None:
        self.deactivate(name)
        self.flows.pop(name, None)

    def _move(self, flow: _Flow, tag: float) -> None:
        if flow.active:
            self._take_out(flow)
            insort(self.order, (tag, flow.number, flow.name))
        flow.tag = tag
        self.top = max(self.top, tag)

    def _take_out(self, flow: _Flow) -> None:
        del self.order[bisect_left(self.order, (flow.tag, flow.number, flow.name))]


class FairQueue:
    """Tenants and their batches by name. A batch that was never heard of is new when it is first named."""

    def __init__(self) -> None:
        self._tenants = _Level()
        self._batches: dict[str, _Level] = {}
        self._tenant_of: dict[str, str] = {}
        #: Tenants without a batch that are kept, at most, before they are looked through.
        self._spare = _SPARE

    @property
    def active(self) -> list[str]:
        """The batches that have something to send."""
        return [name for level in self._batches.values() for _, _, name in level.order]

    def activate(self, batch: str, tenant: str) -> None:
        """The batch has something to send (again)."""
        self._tenant_of[batch] = tenant
        self._batches.setdefault(tenant, _Level()).activate(batch)
        self._tenants.activate(tenant)

    def deactivate(self, batch: str) -> None:
        """The batch has nothing to send for now."""
        tenant = self._tenant_of.get(batch)
        if tenant is not None:
            level = self._batches[tenant]
            level.deactivate(batch)
            if not level.order:
                self._tenants.deactivate(tenant)

    def forget(self, batch: str) -> None:
        """The batch will send nothing any more."""
        self.deactivate(batch)
        tenant = self._tenant_of.pop(batch, None)
        if tenant is None:
            return
        self._batches[tenant].forget(batch)
        self._let_go(tenant)
        if len(self._batches) > self._spare:
            for name in list(self._batches):
                self._let_go(name)
            self._spare = 2 * len(self._batches) + _SPARE

    def _let_go(self, tenant: str) -> None:
        if not self._batches[tenant].flows and self._tenants.flow(tenant).tag <= self._tenants.virtual:
            # Neither ahead nor behind, so that it may as well come new.
            del self._batches[tenant]
            self._tenants.forget(tenant)

    def weigh(self, batch: str, weight: float, tenant_weight: float) -> None:
        """Say what a batch (known by now) weighs among its tenant's, and its tenant among all; above 0."""
        tenant = self._tenant_of[batch]
        self._batches[tenant].weigh(batch, weight)
        self._tenants.weigh(tenant, tenant_weight)

    def charge(self, batch: str, cost: float) -> None:
        """The batch was served work of `cost`."""
        tenant = self._tenant_of.get(batch)
        if tenant is not None:
            self._batches[tenant].charge(batch, cost)
            self._tenants.charge(tenant, cost)

    def correct(self, batch: str, cost: float) -> None:
        """What the batch was served turned out to be worth `cost` more than it was charged for (below 0: less)."""
        tenant = self._tenant_of.get(batch)
        if tenant is not None:
            self._batches[tenant].correct(batch, cost)
            self._tenants.correct(tenant, cost)

    def round(self) -> Round:
        """The order of service for one chunk, which several batches may share. Changes nothing."""
        return Round(self._tenants, self._batches)


class Round:
    """Batches in the order in which they are to be served, each once, while nothing else happens to the queue."""

    def __init__(self, tenants: _Level, batches: dict[str, _Level]) -> None:
        self._levels = batches
        self._order = list(tenants.order)
        self._weights = {name: tenants.flows[name].weight for _, _, name in self._order}
        self._at = dict.fromkeys(self._weights, 0)

    def next(self) -> str | None:
        """The next batch; None when every batch that has something to send was named."""
        while self._order:
            tenant = self._order[0][2]
            order, at = self._levels[tenant].order, self._at[tenant]
            if at < len(order):
                self._at[tenant] = at + 1
                return order[at][2]
            del self._order[0]
        return None

    def took(self, cost: float) -> None:
        """The batch named last takes work of about `cost`, so that its tenant's turn moves on."""
        tag, number, tenant = self._order.pop(0)
        insort(self._order, (tag + cost / self._weights[tenant], number, tenant))
