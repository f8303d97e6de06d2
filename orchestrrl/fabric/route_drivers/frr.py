"""The driver `frr`, which uses `vtysh -c` to change the static routes of a router that runs FRRouting (zebra and
staticd).

The driver owns the static routes of the default VRF that bear its tag. A route is in place when zebra has installed all
of its next hops. A prefix that has a static route without this tag is foreign, regardless of the distance of that
route. The reason is that staticd keeps one line per next hop, so the driver's lines would replace foreign lines.

The next hops of a route change one by one. New next hops are added before old ones are removed, and zebra replaces the
kernel's route each time, so that a route always exists. During the change, a packet may follow the old or the new next
hops. Neither path is a loop, because a new route is installed only after the routes further along its path (see
`planner/fabric/route_plan.py`). staticd has no weights, so next hops get equal shares.

staticd resolves every gateway in zebra, even a gateway marked onlink. The router therefore needs a route that covers
the addresses of the other routers. A route to Null0 such as `ip route 192.0.2.0/24 Null0` is sufficient.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ocs_drivers.options import must_be, whole
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.fabric.route_drivers.base import RouterCapabilities, RouteReading
from orchestrrl.fabric.route_drivers.driver import CommandOptions, RouterDriver, are_words
from orchestrrl.fabric.route_drivers.linux import CommandOutput, LinuxHost, RouterShell
from planner.fabric.route_plan import PacketRoute, RouteChange, RouteTable, route_table

TAG = 160
RETRY_S = 1.0

# `ip route 10.0.2.0/24 192.0.2.2 swp1 tag 160 onlink`, as in the displayed configuration.
STATIC = re.compile(r"ip route (?P<prefix>\S+) (?P<rest>.+)")
OURS = re.compile(r"(?P<gateway>[0-9.]+) (?P<interface>\S+) tag (?P<tag>\d+)(?: \d+)? onlink")
# Printed by vtysh, with exit status 1, if no daemon listens or the connection is lost.
UNREACHABLE = re.compile(r"failed to connect to any daemons|staticd is not running|Exiting: ", re.IGNORECASE)


class FrrOptions(CommandOptions):
    """The options of the driver `frr`. `tag` and `distance` apply to the driver's static routes. `vtysh_arguments` are
    passed to every `vtysh` command, for example to reach daemons whose sockets are at an unusual path."""

    tag: Annotated[int, whole(1, 2**32 - 1)] = TAG
    distance: Annotated[int, whole(1, 254)] = 1
    vtysh_arguments: Annotated[tuple[str, ...], must_be("a list of words", are_words)] = ()


class FrrWire(LinuxHost):
    """Implements `base.RouterWire` for a router with FRRouting. Common builds of FRRouting support 64 next hops per
    route."""

    capabilities = RouterCapabilities(max_next_hops=64, max_weight=1, link_events=True, installs_later=True)

    def __init__(self, options: FrrOptions, clock: Clock) -> None:
        super().__init__(RouterShell(options.prefix))
        self._options = options

    async def read_routes(self) -> RouteReading:
        ours, foreign = await self._configured()
        answer = await self._vtysh("zebra", "show ip route static json")
        if answer.status:
            raise Retryable(f"vtysh failed: {answer.error_text}", RETRY_S)
        installed = _installed(json.loads(answer.out or "{}"), self._options.tag)
        idle = frozenset(prefix for prefix, ways in ours.items() if ways != installed.get(prefix))
        routes = (PacketRoute.of(prefix, dict.fromkeys(ways, 1)) for prefix, ways in ours.items())
        return RouteReading(route_table(routes), frozenset(foreign), idle)

    async def _configured(self) -> tuple[dict[str, set[tuple[str, str]]], set[str]]:
        """Return the (gateway, interface) pairs of the driver's static routes, keyed by prefix, and the set of foreign
        prefixes."""
        answer = await self._vtysh("staticd", "show running-config staticd")
        if answer.status or "Current configuration" not in answer.out:
            raise Retryable(f"vtysh failed: {answer.error_text}", RETRY_S)
        ours: dict[str, set[tuple[str, str]]] = {}
        foreign = set()
        for line in _default_vrf(answer.out):
            if static := STATIC.fullmatch(line):
                mine = OURS.fullmatch(static["rest"])
                if mine and int(mine["tag"]) == self._options.tag:
                    ours.setdefault(static["prefix"], set()).add((mine["gateway"], mine["interface"]))
                else:
                    foreign.add(static["prefix"])
        return ours, foreign

    async def send(self, changes: Sequence[RouteChange], now: RouteTable) -> None:
        come, go = [], []
        for change in changes:
            wanted = {hop.way for hop in change.route.next_hops} if change.route else set()
            there = now.get(change.prefix)
            present = {hop.way for hop in there.next_hops} if there else set()
            come += [self._line(change.prefix, *way) for way in sorted(wanted - present)]
            go += [f"no {self._line(change.prefix, *way)}" for way in sorted(present - wanted)]
        answer = await self._vtysh("staticd", "configure terminal", *come, *go, is_setter=True)
        refused = [line.strip() for line in (answer.out + answer.err).splitlines() if line.startswith("%")]
        if UNREACHABLE.search(answer.out + answer.err):
            raise OutcomeUnknown(f"vtysh failed: {answer.error_text}")
        if refused or answer.status:
            raise Permanent(f"vtysh failed: {' | '.join(refused) or answer.error_text}")

    def _line(self, prefix: str, gateway: str, interface: str) -> str:
        distance = f" {self._options.distance}" if self._options.distance != 1 else ""
        return f"ip route {prefix} {gateway} {interface} tag {self._options.tag}{distance} onlink"

    async def _vtysh(self, daemon: str, *commands: str, is_setter: bool = False) -> CommandOutput:
        """Send commands to one daemon and return the output. If commands were sent to all daemons, a missing daemon
        could not be distinguished from a daemon without configuration."""
        # ssh passes the words through another shell.
        quoted = [f"'{command}'" for command in commands] if self.shell.is_ssh else list(commands)
        words = [word for command in quoted for word in ("-c", command)]
        return await self.shell.run("vtysh", *self._options.vtysh_arguments, "-d", daemon, *words, is_setter=is_setter)


def _installed(shown: Mapping[str, Any], tag: int) -> dict[str, set[tuple[str, str]]]:
    """Return the (gateway, interface) pairs that zebra has installed for routes with this tag, keyed by prefix."""
    return {
        prefix: {
            (hop["ip"], hop["interfaceName"])
            for entry in entries
            if entry.get("tag") == tag and entry.get("installed")
            for hop in entry["nexthops"]
            if hop.get("fib") and "ip" in hop and "interfaceName" in hop
        }
        for prefix, entries in shown.items()
    }


def _default_vrf(configuration: str) -> list[str]:
    """Return the lines of a configuration that belong to the default VRF. Lines of other VRFs are between `vrf NAME`
    and `exit-vrf`."""
    lines, is_other = [], False
    for line in map(str.strip, configuration.splitlines()):
        is_other = (is_other or line.startswith("vrf ")) and line != "exit-vrf"
        if not is_other:
            lines.append(line)
    return lines


class FrrRouter(RouterDriver, options=FrrOptions, wire=FrrWire):
    """The route driver for routers that run FRRouting."""
