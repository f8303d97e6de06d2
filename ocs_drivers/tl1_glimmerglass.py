"""Implement the TL1 dialect of Glimmerglass switches. Commands denote input n as 10000 + n and output m as 20000 + m.

The following is known from working clients. ent-crs-fiber and dlt-crs-fiber accept `&` lists. rtrv-crs-fiber with `all`
lists every input, with OPORTID=0 if it is not connected. CONNSTATE is steady for a working connection and fault for a
failed connection. RTRV-CFG-FIBER reports PORTHEALTH good or bad, and PORTPRIV 0x0 for a port that must not be used.
rtrv-port-power reports PORTPOWER. rtrv-system-info reports LicensedPortMatrix, SerialNumber, ChassisType and
SoftwareActiveVersion.

The following is not verified. Any value of CONNSTATE except steady and fault is assumed to mean that mirrors are
moving. A reported line with IPORTID and OPORTID is treated as a report on a connection. It is not known how long the
mirrors take to move, whether connections survive a restart, or whether the list of dlt-crs-fiber has a limit.
"""

from collections.abc import Sequence

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import (
    Action,
    CircuitState,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.polatis_yang import parse_size
from ocs_drivers.tl1_framing import fields, measured, whole_number
from ocs_drivers.tl1_wire import Tl1Wire

INPUT, OUTPUT = 10000, 20000

_SETTERS = {Action.ADD: "ent-crs-fiber::{0},{1}:<ctag>;", Action.REMOVE: "dlt-crs-fiber::{0}:<ctag>;"}
_STATES = {"steady": CircuitState.TUNED, "fault": CircuitState.FAILED}


class GlimmerglassTl1Wire(Tl1Wire):
    """Implements the operations of `base.SwitchWire` for Glimmerglass switches."""

    default_port = 10034
    default_reconfiguration_s = 0.020  # unverified
    capabilities = SwitchCapabilities(bulk=True, tuned_state=True, port_power=True)

    async def attach(self) -> None:
        self._system: dict[str, str] = {}
        for line in await self.ask("rtrv-system-info:::<ctag>;"):
            self._system |= fields(line)
        sides = parse_size(self._system.get("LICENSEDPORTMATRIX", ""))
        if sides is None:
            raise DriverPermanent(
                "the device does not report its size (parameter LICENSEDPORTMATRIX)",
                command="rtrv-system-info",
                answer=str(self._system),
            )
        self.ingress, self.egress = sides[1], range(1, len(sides[2]) + 1)

    async def read_facts(self) -> SwitchFacts:
        return self.facts(
            vendor="Glimmerglass",
            model=self._system.get("CHASSISTYPE", ""),
            serial=self._system.get("SERIALNUMBER", ""),
            software=self._system.get("SOFTWAREACTIVEVERSION", ""),
        )

    async def read_ports(self) -> Sequence[PortState]:
        """Return the state of every port. An input and an output with the same number are reported as one port. Its
        status is the worse of the two. Its power is that of the input or, if the device reports no power for the
        input, that of the output."""
        sides = [fields(line) for line in await self.ask("RTRV-CFG-FIBER::all:<ctag>;")]
        powers = [fields(line) for line in await self.ask("rtrv-port-power::all:<ctag>;")]
        read = {_port(found, "PORTID"): measured(found.get("PORTPOWER", "")) for found in powers}
        dbm = {side: value for side, value in read.items() if value is not None}
        status = {side: _status(found) for found in sides if (side := _port(found, "PORTID"))}
        last = max(self.ingress[-1], self.egress[-1])
        return [
            PortState(
                port,
                _worse(status.get(INPUT + port), status.get(OUTPUT + port)),
                dbm.get(INPUT + port, dbm.get(OUTPUT + port)),
            )
            for port in range(1, last + 1)
        ]

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        circuits = []
        for line in await self.ask("rtrv-crs-fiber::all:<ctag>;"):
            found = fields(line)
            if pair := _pair(found):
                state = _STATES.get(found.get("CONNSTATE", "").lower(), CircuitState.TUNING)
                circuits.append(DeviceCircuit(pair, state))
        return circuits

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        # For dlt-crs-fiber `all` means every connection. Numbers never spell it, and `port_list` refuses an empty list.
        await self.order_in_lines(pairs, _SETTERS[action], INPUT, OUTPUT)

    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        found = fields(line)
        if pair := _pair(found):
            return EventKind.CIRCUIT, None, pair
        if port := _port(found, "PORTID"):
            return EventKind.PORT, port % INPUT, None
        return EventKind.ALARM, None, None


def _port(found: dict[str, str], name: str) -> int:
    """Return the port number in the field `name`, or 0 if the field is missing or not a number."""
    return whole_number(found.get(name, ""))


def _pair(found: dict[str, str]) -> CrossConnect | None:
    source, destination = _port(found, "IPORTID"), _port(found, "OPORTID")
    is_whole = INPUT < source < OUTPUT < destination
    return CrossConnect(source - INPUT, destination - OUTPUT) if is_whole else None


def _status(found: dict[str, str]) -> PortStatus:
    if found.get("PORTHEALTH", "good").lower() != "good":
        return PortStatus.FAILED
    return PortStatus.DISABLED if found.get("PORTPRIV", "").lower() == "0x0" else PortStatus.ENABLED


def _worse(*sides: PortStatus | None) -> PortStatus:
    """Return the worse status of an input and an output. A side that does not exist is given as None."""
    order = (PortStatus.FAILED, PortStatus.DISABLED, PortStatus.ENABLED)
    return next((status for status in order if status in sides), PortStatus.FAILED)
