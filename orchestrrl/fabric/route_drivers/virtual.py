"""A simulated router that refuses unsupported routes, forwards packets, and can lose its links and sessions.

`VirtualRouter` is the device, which determines the next hops of packets. `VirtualRouterWire` is a session with the
device. `VirtualRouterDriver` is the driver `virtual`. `VirtualRouter.join` connects two routers, as a circuit does, and
`part` disconnects them.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated

from ocs_drivers.options import must_be, whole
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.fabric.route_drivers.base import RouterCapabilities, RouteReading
from orchestrrl.fabric.route_drivers.driver import RouterDriver, RouterOptions, are_words
from planner.fabric.route_plan import INTERFACE, NextHop, PacketRoute, RouteChange, RouteTable


class RouterFaultKind(StrEnum):
    LINK_DOWN = "link_down"
    LINK_UP = "link_up"
    FOREIGN_ROUTE = "foreign_route"  # a foreign route appears for a prefix
    DROP_COMMAND = "drop_command"  # the connection breaks before the next change is received
    DROP_CONNECTION = "drop_connection"  # the connection breaks after the next change is received
    UNREACHABLE = "unreachable"  # the router stops answering
    REACHABLE = "reachable"


@dataclass(frozen=True, slots=True)
class RouterFault:
    kind: RouterFaultKind
    interface: str = ""
    prefix: str = ""


class VirtualRouter:
    """A simulated router with interfaces, a routing table, and a reference to the router at the far end of each
    interface."""

    def __init__(self, address: str, interfaces: Iterable[str]) -> None:
        self.address = address
        self.signal = dict.fromkeys(interfaces, False)
        self.far_end: dict[str, tuple[VirtualRouter, str]] = {}
        self.routes: dict[str, PacketRoute] = {}
        self.foreign: set[str] = set()
        self.pending: list[RouterFaultKind] = []
        self.is_reachable = True
        self.changed = asyncio.Event()

    def join(self, interface: str, other: "VirtualRouter", other_interface: str) -> None:
        self.far_end[interface] = (other, other_interface)
        other.far_end[other_interface] = (self, interface)
        self.set_signal(interface, up=True)
        other.set_signal(other_interface, up=True)

    def part(self, interface: str) -> None:
        other, other_interface = self.far_end.pop(interface)
        del other.far_end[other_interface]
        self.set_signal(interface, up=False)
        other.set_signal(other_interface, up=False)

    def set_signal(self, interface: str, up: bool) -> None:
        self.signal[interface] = up
        self.changed.set()

    def inject(self, fault: RouterFault) -> None:
        """Cause the fault immediately or, if the fault is a broken connection, when the next change is sent."""
        if fault.kind in (RouterFaultKind.LINK_DOWN, RouterFaultKind.LINK_UP):
            self.set_signal(fault.interface, fault.kind is RouterFaultKind.LINK_UP)
        elif fault.kind is RouterFaultKind.FOREIGN_ROUTE:
            self.foreign.add(fault.prefix)
        elif fault.kind in (RouterFaultKind.UNREACHABLE, RouterFaultKind.REACHABLE):
            self.is_reachable = fault.kind is RouterFaultKind.REACHABLE
        else:
            self.pending.append(fault.kind)

    def ways(self, destination: str) -> tuple[NextHop, ...]:
        """Return the next hops of the route with the longest prefix that matches an address, or () if no route
        matches."""
        holding = [route for prefix, route in self.routes.items() if IPv4Address(destination) in IPv4Network(prefix)]
        if not holding:
            return ()
        return max(holding, key=lambda route: IPv4Network(route.prefix).prefixlen).next_hops

    def answering(self, hop: NextHop) -> "VirtualRouter | None":
        """Return the router that receives a packet sent to this next hop. Return None if the link is down or the router
        at its far end has another address."""
        if hop.interface not in self.far_end or not self.signal[hop.interface]:
            return None
        far, _ = self.far_end[hop.interface]
        return far if far.address == hop.gateway else None


class VirtualRouterWire:
    """Implements `base.RouterWire` as a session with a `VirtualRouter`."""

    def __init__(self, device: VirtualRouter, clock: Clock, capabilities: RouterCapabilities) -> None:
        self.capabilities = capabilities
        self.sends = 0
        self._device = device
        self._clock = clock

    async def read_routes(self) -> RouteReading:
        self._check()
        return RouteReading(dict(self._device.routes), frozenset(self._device.foreign))

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        self._check()
        self.sends += 1
        pending = self._device.pending.pop(0) if self._device.pending else None
        if pending is RouterFaultKind.DROP_COMMAND:
            raise OutcomeUnknown("the connection to the router was closed")
        refused = [change for change in changes if not self._take(change)]
        if pending is RouterFaultKind.DROP_CONNECTION:
            raise OutcomeUnknown("the connection to the router was closed")
        if refused:
            raise Permanent(
                f"cannot set routes over an interface that does not exist or has no signal:"
                f" {', '.join(map(str, refused))}"
            )

    def _take(self, change: RouteChange) -> bool:
        """Apply a change unless its route uses an interface that does not exist, as a kernel would. Return whether the
        change was applied."""
        if change.route is None:
            self._device.routes.pop(change.prefix, None)
        elif change.route.interfaces <= set(self._device.signal):
            self._device.routes[change.prefix] = change.route
        else:
            return False
        return True

    async def read_links(self) -> Mapping[str, bool]:
        self._check()
        return dict(self._device.signal)

    async def link_events(self) -> AsyncGenerator[None]:
        while True:
            await self._device.changed.wait()
            self._device.changed.clear()
            yield

    async def probe_neighbours(self, hops: Collection[NextHop]) -> None:
        self._check()

    async def found(self, hops: Collection[NextHop]) -> frozenset[NextHop]:
        self._check()
        return frozenset(hop for hop in hops if self._device.answering(hop))

    async def close(self) -> None:
        """Do nothing, because there is no connection to close."""

    def _check(self) -> None:
        if not self._device.is_reachable:
            raise Retryable("no route to host", 1.0)


def _are_interfaces(value: object) -> bool:
    return are_words(value) and all(INTERFACE.fullmatch(name) for name in value)  # type: ignore[attr-defined]  # words


class VirtualRouterOptions(RouterOptions):
    address: str = "192.0.2.1"
    interfaces: Annotated[
        tuple[str, ...], must_be(f"a list of names that match {INTERFACE.pattern}", _are_interfaces)
    ] = ("swp1", "swp2", "swp3", "swp4")
    max_next_hops: Annotated[int, whole(1)] = 128
    max_weight: Annotated[int, whole(1)] = 256
    link_events: bool = True


class VirtualRouterDriver(RouterDriver, options=VirtualRouterOptions):
    """The route driver `virtual`, whose router runs inside this process."""

    def _make_wire(self, options: VirtualRouterOptions, clock: Clock) -> VirtualRouterWire:
        self.device = VirtualRouter(options.address, options.interfaces)
        can = RouterCapabilities(options.max_next_hops, options.max_weight, options.link_events)
        self.wire = VirtualRouterWire(self.device, clock, can)
        return self.wire
