"""The patch panel: while a switch joins two fibres, their veth interfaces are in one bridge.

A cross-connect carries packets in both directions when its mirrors are in place and both ports work and are plugged in.
A ToR's fibre has a signal while light arrives from another ToR, over any number of switches. The panel applies changes
when the emulated devices report them, and when the devices' next mirror is due to be in place.
"""

import asyncio
import contextlib
import math
import os
import socket
import struct
from collections.abc import Iterable, Mapping

from ocs_drivers.emulators.base import EmulatedDevice
from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.switch_reader import site_pairs
from orchestrrl.lab.box.cabling import bridge_name, port_name
from orchestrrl.lab.box.namespaces import make_socket, within
from orchestrrl.lab.box.plan import End, TestbedPlan, is_fibre
from planner.fabric.model import OcsId, Port, PortPair

POLL_EVERY_S = 0.5  # for changes without an event, such as a pulled fibre


class PatchPanel:
    """The patch panel of one box. The caller runs `run` as a task. `joined` contains the cross-connects that carry
    packets."""

    def __init__(self, plan: TestbedPlan, glasses: Mapping[OcsId, EmulatedDevice]) -> None:
        self._glasses = glasses
        self._links = {switch: Links(room) for switch, room in plan.switches.items()}
        self._ports = {port: self._links[port[0]].index(port_name(port[1])) for port in plan.ends}
        self._bridges = {port: self._links[port[0]].index(bridge_name(port[1])) for port in plan.ends}
        self._ends = dict(plan.ends)  # the actual cabling, which `swap` changes
        self.joined: frozenset[PortPair] = frozenset()  # the cross-connects that carry packets
        self._lit: frozenset[Port] = frozenset()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        listeners = [asyncio.ensure_future(self._listen(glass)) for glass in self._glasses.values()]
        try:
            while True:
                self._changed.clear()
                wait_s = self.follow()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(wait_s, POLL_EVERY_S))
        finally:
            for each in listeners:
                each.cancel()

    def follow(self) -> float:
        """Apply the state of the devices to the interfaces. Return the time, in seconds, until the next mirror is in
        place or the next scheduled event is due."""
        next_s = min((min(glass.advance(), glass.moving_s()) for glass in self._glasses.values()), default=math.inf)
        joined = frozenset(pair for switch, glass in self._glasses.items() for pair in self._carrying(switch, glass))
        lit = lit_ports(self._ends, joined)
        # Set interfaces down before leaving a bridge and up after joining one, so that no packet is misdirected.
        self._take_apart(self.joined - joined, self._lit - lit)
        for pair in joined - self.joined:
            bridge = self._bridges[pair.switch, pair.ports[0]]
            for number in pair.ports:
                self._links[pair.switch].set(self._ports[pair.switch, number], master=bridge)
        for port in lit - self._lit:
            self._links[port[0]].set(self._ports[port], up=True)
        self.joined, self._lit = joined, lit
        return next_s

    def swap(self, one: Port, other: Port) -> None:
        """Swap the cables of two ports of one switch. Raises ValueError if a port has no cable or the ports are on
        different switches."""
        for port in (one, other):
            if port not in self._ends:
                raise ValueError(f"port must have a cable of the site, got {port[0]}:{port[1]}")
        if one[0] != other[0]:
            raise ValueError(f"ports must be on one switch, got {one[0]} and {other[0]}")
        joined, self.joined, self._lit = self.joined, frozenset(), frozenset()
        self._take_apart(joined, frozenset(self._ends))
        self._ports[one], self._ports[other] = self._ports[other], self._ports[one]
        self._ends[one], self._ends[other] = self._ends[other], self._ends[one]
        for port in (one, other):
            if not is_fibre(self._ends[port]):
                self._ends[self._ends[port]] = port  # type: ignore[index]  # a lane leads to a port
        self._changed.set()

    def close(self) -> None:
        for links in self._links.values():
            links.close()

    def _take_apart(self, pairs: Iterable[PortPair], dark: Iterable[Port]) -> None:
        for port in dark:
            if is_fibre(self._ends[port]):
                self._links[port[0]].set(self._ports[port], up=False)
        for pair in pairs:
            for number in pair.ports:
                self._links[pair.switch].set(self._ports[pair.switch, number], master=0)

    def _carrying(self, switch: OcsId, glass: EmulatedDevice) -> set[PortPair]:
        lit = [circuit.cross_connect for circuit in glass.circuits() if circuit.link_up]
        pairs, _ = site_pairs(switch, glass.facts, lit)
        return {pair for pair in pairs if all((switch, number) in self._ports for number in pair.ports)}

    async def _listen(self, glass: EmulatedDevice) -> None:
        events = glass.listen()
        try:
            while True:
                await events.get()
                self._changed.set()
        finally:
            glass.unlisten(events)


def lit_ports(ends: Mapping[Port, End], joined: Iterable[PortPair]) -> frozenset[Port]:
    """Return the switch ports whose fibre leads to a ToR and that receive light from the fibre of another ToR. `ends`
    maps each port to the far end of its fibre. `joined` contains the cross-connects that carry light."""
    partner: dict[Port, Port] = {}
    for pair in joined:
        one, other = ((pair.switch, number) for number in pair.ports)
        partner[one], partner[other] = other, one
    lit: set[Port] = set()
    for start, end in ends.items():
        at: Port | None = partner.get(start) if is_fibre(end) else None
        while at is not None and not is_fibre(ends[at]):
            at = partner.get(ends[at])  # type: ignore[arg-type]  # a lane leads to a port
        if at is not None:
            lit.add(at)
    return frozenset(lit)


# --- interfaces over netlink, rtnetlink(7): starting `ip` alone would take as long as moving mirrors

RTM_NEWLINK = 16
NLM_F_REQUEST, NLM_F_ACK = 1, 4
NLMSG_ERROR = 2
IFF_UP = 1
IFLA_MASTER = 10
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_MASTER = struct.Struct("=HHI")  # length, type, index
_ERROR = struct.Struct("=i")


class Links:
    """Adds interfaces of one namespace to a bridge, removes them from it, and sets them up and down. Interfaces are
    identified by their index."""

    def __init__(self, room: str) -> None:
        self._namespace = room
        self._socket = make_socket(room, socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def index(self, name: str) -> int:
        return within(self._namespace, lambda: socket.if_nametoindex(name))

    def close(self) -> None:
        self._socket.close()

    def set(self, index: int, *, master: int | None = None, up: bool | None = None) -> None:
        """Add an interface to the bridge `master`, or remove it from its bridge if `master` is 0. Set the interface up
        or down. None leaves the respective state unchanged.

        While an interface is up, the other end of its veth pair has a signal. Raises Permanent if the kernel rejects
        the change.
        """
        self._sequence += 1
        flags, change = (0, 0) if up is None else (IFF_UP * up, IFF_UP)
        body = _LINK.pack(socket.AF_UNSPEC, 0, index, flags, change)
        if master is not None:
            body += _MASTER.pack(_MASTER.size, IFLA_MASTER, master)
        header = _HEADER.pack(_HEADER.size + len(body), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, self._sequence, 0)
        self._socket.send(header + body)
        answer = self._socket.recv(65536)
        _, kind, _, sequence, _ = _HEADER.unpack_from(answer)
        if kind != NLMSG_ERROR or sequence != self._sequence:
            raise Permanent(f"{self._namespace}: netlink response must be for {self._sequence}, got {kind}, {sequence}")
        if code := _ERROR.unpack_from(answer, _HEADER.size)[0]:
            raise Permanent(f"{self._namespace}: interface {index} cannot be changed: {os.strerror(-code)}")
