"""The driver contract: what the control plane asks of any router whose packets it reroutes.

A plug point: one module per product, registered in the entry-point group `orchestrrl.route_drivers`, looked up
by `driver.py`. Every driver passes `conformance.py`. A product writes a `RouterWire`, the few verbs that it has, and
`driver.RouterDriver` makes the contract of it. A driver owns the routes that bear its mark (a protocol number, a tag);
it reads, changes and removes those alone. Errors are those of `orchestrrl/core/errors.py`.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.fabric.route_plan import NextHop, RouteChange, RouteTable


@dataclass(frozen=True, slots=True)
class RouterCapabilities:
    """What a router can hold. `max_weight` 1: all next hops of a route get the same. `link_events`: the router says by
    itself when an interface changes; without, it is asked again and again. `installs_later`: it takes a change before
    it forwards by it, so that reading back may have to wait."""

    max_next_hops: int
    max_weight: int
    link_events: bool = False
    installs_later: bool = False


@dataclass(frozen=True, slots=True)
class AppliedRoutes:
    """What became of changes, as read back from the router. `why` some are `missing`, with the router's own words."""

    done: tuple[RouteChange, ...]  # those that were so already included
    missing: tuple[RouteChange, ...]
    sent: int  # how many were not so already
    why: str = ""


@dataclass(frozen=True, slots=True)
class RouteReading:
    """Our routes, and the prefixes that others hold where ours would have to go. `idle`: of those that are ours, the
    ones by which the router does not forward yet, or not over all of their next hops."""

    table: RouteTable
    foreign: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


class RouterWire(Protocol):
    """The verbs of one product, without policy. `driver.RouterDriver` calls them inside a time limit. A verb raises

    - Retryable: the router cannot be reached, or is busy
    - Permanent: the router refused, with its own words; of a `send`, part may have taken
    - OutcomeUnknown: the connection broke after changes were sent.
    """

    capabilities: RouterCapabilities

    async def read_routes(self) -> RouteReading:
        """Our routes as the router has been told them: one that is idle now may come to life with its link."""
        ...

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        """Make these, whose prefixes have the routes of `now`. One that is refused does not keep back the others."""
        ...

    async def read_links(self) -> Mapping[str, bool]: ...

    def link_events(self) -> AsyncGenerator[None]:
        """Something about some interface has changed. Asked for only where `link_events` is declared."""
        ...

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        """Forget the neighbours on these interfaces and start to look for these gateways there; waits for nobody."""
        ...

    async def found(self, hops: Collection[NextHop]) -> frozenset[NextHop]:
        """Those whose gateway has answered."""
        ...

    async def close(self) -> None: ...
