"""The driver `iproute`: a Linux router's own routing table, by iproute2's `ip -json` and `ip -batch`.

Ours are the routes of one table that bear our protocol number and our metric. Another's route to the same prefix has
another metric and stays beside ours, and the smaller metric wins; where it has the very same, ours is refused. No
daemon and no library is needed on the router, so a prefix (`ssh tor3`) is all it takes to reroute one that is
elsewhere.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.route_drivers.base import RouterCapabilities, RouteReading
from orchestrrl.fabric.route_drivers.command import RouterShell, prefix_of
from orchestrrl.fabric.route_drivers.driver import RouterDriver, RouterTimeouts
from orchestrrl.fabric.route_drivers.linux import LinuxHost
from planner.fabric.route_plan import NextHop, PacketRoute, RouteChange, RouteTable

MAIN_TABLE = 254
# No daemon's: 1-4 are the kernel's and the boot's, 8-18 and 186-192 are taken by routing daemons in rt_protos.
PROTOCOL = 160


class IprouteWire(LinuxHost):
    """The `base.Wire` of a Linux router. A weight is carried in eight bits; so many next hops fit into one message."""

    capabilities = RouterCapabilities(max_next_hops=128, max_weight=256, link_events=True)

    def __init__(self, shell: RouterShell, table: int, protocol: int, metric: int) -> None:
        super().__init__(shell)
        self._table = table
        self._protocol = protocol
        self._metric = metric

    async def read_routes(self) -> RouteReading:
        # Of all tables: one that is empty does not exist, and asking for it alone is an error.
        rows = await self.show("-N", "-4", "route", "show", "table", "all", "metric", str(self._metric))
        ours, foreign = [], set()
        for row in rows:
            if int(row.get("table", MAIN_TABLE)) != self._table:
                continue
            prefix, shares = _prefix(row["dst"]), _shares(row)
            if shares and int(row.get("protocol", 0)) == self._protocol:
                ours.append(PacketRoute.of(prefix, shares))
            else:
                foreign.add(prefix)
        return RouteReading(RouteTable.of(ours), frozenset(foreign))

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        await self.batch([self._line(change, now) for change in changes])

    def _line(self, change: RouteChange, now: RouteTable) -> str:
        ours = f"table {self._table} proto {self._protocol} metric {self._metric}"
        if change.route is None:
            return f"route del {change.prefix} {ours}"
        # `add` fails where anything has come to stand there since we looked; `replace` would take it away.
        verb = "replace" if change.prefix in now.routes else "add"
        return f"route {verb} {change.prefix} {ours} {_next_hops(change.route.next_hops)}"


def _next_hops(hops: Sequence[NextHop]) -> str:
    if len(hops) == 1:
        return f"via {hops[0].gateway} dev {hops[0].interface} onlink"
    return " ".join(f"nexthop via {hop.gateway} dev {hop.interface} onlink weight {hop.weight}" for hop in hops)


def _prefix(dst: str) -> str:
    return "0.0.0.0/0" if dst == "default" else str(IPv4Network(dst))


def _shares(row: dict[str, Any]) -> dict[tuple[str, str], int]:
    """What each way gets; empty for a route that we never made: a blackhole, one without a gateway."""
    hops = row.get("nexthops") or [row]
    if not all("gateway" in hop and "dev" in hop for hop in hops):
        return {}
    return {(hop["gateway"], hop["dev"]): int(hop.get("weight", 1)) for hop in hops}


class IprouteRouter(RouterDriver):
    """The driver `iproute`. `prefix`: the words that stand before each command. `table`, `protocol`, `metric`: where
    our routes are, and what marks them."""

    def __init__(
        self,
        router: str,
        *,
        clock: Clock | None = None,
        prefix: Sequence[str] = (),
        table: int = MAIN_TABLE,
        protocol: int = PROTOCOL,
        metric: int = 10,
        command_timeout_s: float = 5.0,
    ) -> None:
        wrong = [
            f"options.{name}: must be a whole number within {low}..{high}, got {value!r}"
            for name, value, low, high in (
                ("table", table, 1, 2**32 - 1),
                ("protocol", protocol, 5, 255),
                ("metric", metric, 1, 2**32 - 1),
            )
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
        ]
        words, faults = options_of_commands(prefix, command_timeout_s)
        if wrong + faults:
            raise ProblemFaults(wrong + faults)
        wire = IprouteWire(RouterShell(words), table, protocol, metric)
        super().__init__(router, wire, clock=clock, limits=RouterTimeouts(command_s=command_timeout_s))


def options_of_commands(prefix: object, command_timeout_s: object) -> tuple[tuple[str, ...], list[str]]:
    """The options of every driver that runs commands, and what is wrong with them."""
    words: tuple[str, ...] = ()
    faults: list[str] = []
    try:
        words = prefix_of(prefix)
    except ProblemFaults as error:
        faults += error.faults
    is_number = isinstance(command_timeout_s, int | float) and not isinstance(command_timeout_s, bool)
    if not (is_number and 0 < command_timeout_s < 3600):  # type: ignore[operator]  # it is a number
        faults.append(f"options.command_timeout_s: must be a number within 0..3600, got {command_timeout_s!r}")
    return words, faults
