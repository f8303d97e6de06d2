"""The driver `iproute`, which reads a Linux router's routing table with `ip -json` and changes it with `ip -batch`.

The driver owns the routes of one table that bear its protocol number and metric. A foreign route to the same prefix may
have another metric; packets then use the route with the smaller metric. If a foreign route has the same metric, the
driver's route is refused. The router needs no additional daemon or library. A remote router is reached with a command
prefix such as `ssh tor3`.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Annotated, Any

from ocs_drivers.options import whole
from orchestrrl.core.clock import Clock
from orchestrrl.fabric.route_drivers.base import RouterCapabilities, RouteReading
from orchestrrl.fabric.route_drivers.driver import CommandOptions, RouterDriver
from orchestrrl.fabric.route_drivers.linux import LinuxHost, RouterShell
from planner.fabric.route_plan import NextHop, PacketRoute, RouteChange, RouteTable, route_table

MAIN_TABLE = 254
# Unused by daemons: 1-4 belong to the kernel and boot, 8-18 and 186-192 to routing daemons in rt_protos.
PROTOCOL = 160


class IprouteOptions(CommandOptions):
    """The options of the driver `iproute`. The driver's routes are in the routing table `table`, and `protocol` and
    `metric` identify them."""

    table: Annotated[int, whole(1, 2**32 - 1)] = MAIN_TABLE
    protocol: Annotated[int, whole(5, 255)] = PROTOCOL
    metric: Annotated[int, whole(1, 2**32 - 1)] = 10


class IprouteWire(LinuxHost):
    """Implements `base.RouterWire` for a Linux router. The kernel stores a weight in eight bits, and one netlink
    message has space for 128 next hops."""

    capabilities = RouterCapabilities(max_next_hops=128, max_weight=256, link_events=True)

    def __init__(self, options: IprouteOptions, clock: Clock) -> None:
        super().__init__(RouterShell(options.prefix))
        self._options = options

    async def read_routes(self) -> RouteReading:
        # All tables, because an empty one does not exist, and reading it alone is an error.
        rows = await self.show("-N", "-4", "route", "show", "table", "all", "metric", str(self._options.metric))
        ours, foreign = [], set()
        for row in rows:
            if int(row.get("table", MAIN_TABLE)) != self._options.table:
                continue
            prefix, shares = _prefix(row["dst"]), _shares(row)
            if shares and int(row.get("protocol", 0)) == self._options.protocol:
                ours.append(PacketRoute.of(prefix, shares))
            else:
                foreign.add(prefix)
        return RouteReading(route_table(ours), frozenset(foreign))

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        await self.batch([self._line(change, now) for change in changes])

    def _line(self, change: RouteChange, now: RouteTable) -> str:
        ours = f"table {self._options.table} proto {self._options.protocol} metric {self._options.metric}"
        if change.route is None:
            return f"route del {change.prefix} {ours}"
        # `add` fails if a route has appeared since the read; `replace` would overwrite it.
        verb = "replace" if change.prefix in now else "add"
        return f"route {verb} {change.prefix} {ours} {_next_hops(change.route.next_hops)}"


def _next_hops(hops: Sequence[NextHop]) -> str:
    if len(hops) == 1:
        return f"via {hops[0].gateway} dev {hops[0].interface} onlink"
    return " ".join(f"nexthop via {hop.gateway} dev {hop.interface} onlink weight {hop.weight}" for hop in hops)


def _prefix(dst: str) -> str:
    return "0.0.0.0/0" if dst == "default" else str(IPv4Network(dst))


def _shares(row: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the weight of each (gateway, interface) pair of a route. The result is empty for routes that this driver
    does not create, such as blackholes and routes without a gateway."""
    hops = row.get("nexthops") or [row]
    if not all("gateway" in hop and "dev" in hop for hop in hops):
        return {}
    return {(hop["gateway"], hop["dev"]): int(hop.get("weight", 1)) for hop in hops}


class IprouteRouter(RouterDriver, options=IprouteOptions, wire=IprouteWire):
    """The route driver for Linux routers, based on iproute2."""
