"""The driver contract: the operations that the control plane requires of a router in order to reroute packets.

This is a plug point with one module per product, which is registered in the entry-point group
`orchestrrl.route_drivers` and looked up by `driver.py`. Every driver passes `conformance.py`. A product implements the
few methods of `RouterWire`, and `driver.RouterDriver` builds the contract on them. A driver owns the routes that bear
its mark, which is a protocol number or a tag. It reads, changes and removes only these routes. Drivers raise the errors
of `orchestrrl/core/errors.py`.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.fabric.route_plan import NextHop, RouteChange, RouteTable


@dataclass(frozen=True, slots=True)
class RouterCapabilities:
    """The features and limits of a router. If `max_weight` is 1, all next hops of a route get equal shares. If
    `link_events` is True, the router reports changes of interfaces; otherwise, it is polled. If `installs_later` is
    True, the router accepts a change before it forwards packets accordingly, so reads may have to be repeated."""

    max_next_hops: int
    max_weight: int
    link_events: bool = False
    installs_later: bool = False


@dataclass(frozen=True, slots=True)
class AppliedRoutes:
    """The result of changing routes, as read from the router afterwards. `why` is the reason why the `missing` changes
    were not applied."""

    done: tuple[RouteChange, ...]  # including those that were in place before
    missing: tuple[RouteChange, ...]
    sent: int  # number of changes that had to be sent
    why: str = ""


@dataclass(frozen=True, slots=True)
class RouteReading:
    """The routes that a driver owns, as read from the router. `foreign` contains the prefixes with routes of other
    owners, for which the driver cannot have routes. `idle` contains the prefixes whose owned route the router does not
    use yet, or uses without some of its next hops."""

    table: RouteTable
    foreign: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


class RouterWire(Protocol):
    """The basic operations on a router of one product, without retries or policy. `driver.RouterDriver` calls them
    within a time limit. Methods raise these errors:

    - Retryable if the router is unreachable or busy
    - Permanent, with the router's reason, if the router refused; part of a `send` may have taken effect
    - OutcomeUnknown if the connection broke after changes were sent
    """

    capabilities: RouterCapabilities

    async def read_routes(self) -> RouteReading:
        """Return the configured routes that the driver owns. They include idle routes, which may become active when
        their link comes up."""
        ...

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        """Send the changes to the router. `now` maps each prefix to the driver's current route. If the router refuses a
        change, the remaining changes must still be sent."""
        ...

    async def read_links(self) -> Mapping[str, bool]: ...

    def link_events(self) -> AsyncGenerator[None]:
        """Yield once after each change of an interface. This method is called only if the capability `link_events` is
        declared."""
        ...

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        """Clear the neighbour entries on the interfaces of these next hops, and start to resolve their gateways without
        waiting for answers."""
        ...

    async def found(self, hops: Collection[NextHop]) -> frozenset[NextHop]:
        """Return the next hops among `hops` whose gateway has answered."""
        ...

    async def close(self) -> None: ...
