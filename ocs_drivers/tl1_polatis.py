"""Implement the TL1 dialect of Polatis (HUBER+SUHNER) switches, with bulk patches from ingress 1..N to egress N+1..N+M.

The following is known from working clients. ENT-PATCH accepts `&` lists, and DLT-PATCH removes a patch by its ingress
port. RTRV-PATCH returns lines such as `11,28`, RTRV-PORT-SHUTTER lines such as `1:OPEN` and `1:CLOSED`, and
RTRV-PORT-POWER lines such as `1:-3.2`. RTRV-NETYPE returns `vendor,model,type,version`. RTRV-EQPT returns the SIZE of
SYSTEM and the MODE of BOOT. RTRV-INV for OCS returns the serial number. RLS-ARC-EQPT for REPMGR enables reports, and
OPR-ARC-EQPT suppresses them. An example of a report is `Port 1 disabled`.

The following is not verified. The size of any-to-any devices is assumed to have the form `32xCC`. A port with a shutter
state other than OPEN and CLOSED is treated as failed. The last field of RTRV-INV's line is used as the serial number. A
reported line such as `11,28` is treated as a report on a patch. A patch that RTRV-PATCH lists is assumed to be in
place. The longest accepted line is not known.
"""

import re
from collections.abc import Sequence

from ocs_drivers.base import DeviceClock
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.polatis_yang import parse_size
from ocs_drivers.tl1_framing import measured
from ocs_drivers.tl1_session import Tl1Denied
from ocs_drivers.tl1_wire import Tl1Options, Tl1Wire

_SETTERS = {Action.ADD: "ENT-PATCH::{0},{1}:<ctag>:;", Action.REMOVE: "DLT-PATCH::{0}:<ctag>:;"}
_STATUS = {"OPEN": PortStatus.ENABLED, "CLOSED": PortStatus.DISABLED}


class PolatisTl1Wire(Tl1Wire):
    """Implements the operations of `base.SwitchWire` for Polatis switches."""

    default_port = 3082
    default_reconfiguration_s = 0.025  # the paper's table 2

    def __init__(self, options: Tl1Options, clock: DeviceClock) -> None:
        self.capabilities = SwitchCapabilities(bulk=True, port_power=options.port_power)
        super().__init__(options, clock)
        self._connectivity = Connectivity.INGRESS_EGRESS

    async def attach(self) -> None:
        """Read the size of the switch, and whether patches survive a restart. Raises DriverPermanent if the switch does
        not report its size."""
        told = " ".join(await self.ask("RTRV-EQPT::SYSTEM:<ctag>:::PARAMETER=SIZE;"))
        size = re.search(r"SIZE=(\w+)", told, re.IGNORECASE)
        if size is None or (sides := parse_size(size[1])) is None:
            raise DriverPermanent(
                "the device does not report its size (parameter SIZE)", command="RTRV-EQPT::SYSTEM", answer=told
            )
        self._connectivity, self.ingress, self.egress = sides
        mode = await self._if_known("RTRV-EQPT::BOOT:<ctag>:::PARAMETER=MODE;")
        if said := re.search(r"MODE=(DARK|RESTORE)", mode, re.IGNORECASE):
            self.boot = BootBehaviour(said[1].lower())

    async def let_report(self, is_wanted: bool) -> None:
        await self.ask("RLS-ARC-EQPT::REPMGR:<ctag>:;" if is_wanted else "OPR-ARC-EQPT::REPMGR:<ctag>::IND;")

    async def read_facts(self) -> SwitchFacts:
        lines = await self.ask("RTRV-NETYPE:::<ctag>:;")
        vendor, model, _, software = [*(part.strip('"') for part in _parts(lines[0] if lines else "")), *4 * [""]][:4]
        inventory = await self._if_known("RTRV-INV::OCS:<ctag>:;")
        return self.facts(
            vendor=vendor or "Polatis",
            model=model,
            serial=re.split(r"[=,:]", inventory)[-1].strip('"'),
            software=software,
            connectivity=self._connectivity,
        )

    async def read_ports(self) -> Sequence[PortState]:
        last = max(self.ingress[-1], self.egress[-1])
        states = _by_port(await self.ask(f"RTRV-PORT-SHUTTER::1&&{last}:<ctag>:;"))
        power: dict[int, str] = {}
        if self.capabilities.port_power:
            power = _by_port(await self.ask(f"RTRV-PORT-POWER::1&&{last}:<ctag>:;"))
        return [
            PortState(port, _STATUS.get(state.upper(), PortStatus.FAILED), measured(power.get(port, "")))
            for port, state in states.items()
        ]

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        lines = await self.ask("RTRV-PATCH:::<ctag>:;")
        pairs = {self._in_order(int(found[1]), int(found[2])) for line in lines if (found := _pair(line))}
        return [DeviceCircuit(pair) for pair in sorted(pairs)]

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        # For DLT-PATCH an empty list, and ALL, mean every patch: `port_list` refuses the former, numbers never spell
        # the latter.
        await self.order_in_lines(pairs, _SETTERS[action])

    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        if port := re.search(r"\bport (\d{1,9}) (?:disabled|enabled|failed)", line, re.IGNORECASE):
            return EventKind.PORT, int(port[1]), None
        if pair := _pair(line):
            return EventKind.CIRCUIT, None, self._in_order(int(pair[1]), int(pair[2]))
        return EventKind.ALARM, None, None

    async def _if_known(self, command: str) -> str:
        """Send a query and return the first line of the answer, or "" if the device refuses the query."""
        try:
            return next(iter(await self.ask(command)), "")
        except Tl1Denied:
            return ""

    def _in_order(self, one: int, other: int) -> CrossConnect:
        """Return the two ports as a cross-connect with the ingress port first, regardless of the order in which the
        device lists them."""
        if self.ingress != self.egress and one in self.egress and other in self.ingress:
            return CrossConnect(other, one)
        return CrossConnect(one, other)


def _parts(line: str) -> list[str]:
    return re.findall(r'"(?:[^"\\]|\\.)*"|[^,]+', line)


def _pair(line: str) -> re.Match[str] | None:
    return re.search(r"(?<![\d.])(\d{1,9}),(\d{1,9})(?![\d.])", line)


def _by_port(lines: Sequence[str]) -> dict[int, str]:
    found = (re.match(r"\s*(\d{1,9}):\s*([^,\s]+)", line) for line in lines)
    return {int(each[1]): each[2] for each in found if each}
