"""The driver contract: what a router must support so that the control plane can reroute its packets.

A plug point: one module per product, registered in the entry-point group `orchestrrl.route_drivers` and looked up by
`driver.py`. Every driver passes `conformance.py`. A product implements the few methods of `RouterWire`, and
`driver.RouterDriver` builds the contract on them. A driver owns the routes that bear its mark (a protocol number or a
tag); it reads, changes and removes only those. Errors are those of `orchestrrl/core/errors.py`."""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.fabric.route_plan import NextHop, RouteChange, RouteTable


@dataclass(frozen=True, slots=True)
class RouterCapabilities:
    """The features and limits of a router. `max_weight` 1: all next hops of a route get equal shares. `link_events`:
    the router reports interface changes; otherwise it is polled. `installs_later`: it accepts a change before it
    forwards by it, so a read may have to be repeated."""

    max_next_hops: int
    max_weight: int
    link_events: bool = False
    installs_later: bool = False


@dataclass(frozen=True, slots=True)
class AppliedRoutes:
    """The result of changes, as read back from the router. `why` is the router's reason for the `missing` ones."""

    done: tuple[RouteChange, ...]  # including those that were in place before
    missing: tuple[RouteChange, ...]
    sent: int  # how many had to be sent
    why: str = ""


@dataclass(frozen=True, slots=True)
class RouteReading:
    """The routes that a driver owns, as read. `foreign`: prefixes of other routes that conflict with them. `idle`:
    owned prefixes that the router does not forward by yet, or not over all of their next hops."""

    table: RouteTable
    foreign: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


class RouterWire(Protocol):
    """The methods of one product, without policy. `driver.RouterDriver` calls them within a time limit. A method raises

    - Retryable: the router is unreachable or busy
    - Permanent: the router refused, with its reason; part of a `send` may have taken effect
    - OutcomeUnknown: the connection broke after changes were sent."""

    capabilities: RouterCapabilities

    async def read_routes(self) -> RouteReading:
        """Return the driver's configured routes; an idle one may become active with its link."""
        ...

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        """Send changes. `now` has the present routes of their prefixes. A refused change must not stop the others."""
        ...

    async def read_links(self) -> Mapping[str, bool]: ...

    def link_events(self) -> AsyncGenerator[None]:
        """Yield whenever an interface has changed. Called only if `link_events` is declared."""
        ...

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        """Clear the neighbours on these interfaces and start to resolve the gateways there, without waiting."""
        ...

    async def found(self, hops: Collection[NextHop]) -> frozenset[NextHop]:
        """Return the next hops whose gateway has answered."""
        ...

    async def close(self) -> None: ...
