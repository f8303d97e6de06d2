"""Glimmerglass in TL1: connections from input n (10000 + n on the wire) to output m (20000 + m), in bulk.

Known from working clients: ent-crs-fiber and dlt-crs-fiber with `&` lists, rtrv-crs-fiber of all, which lists every
input with OPORTID=0 where it leads nowhere, CONNSTATE=steady of a connection that works and fault of one that does not,
RTRV-CFG-FIBER with PORTHEALTH good or bad and PORTPRIV 0x0 of a port that must not be used, rtrv-port-power with
PORTPOWER, and rtrv-system-info with LicensedPortMatrix, SerialNumber, ChassisType and SoftwareActiveVersion.

Unverified: what CONNSTATE says while mirrors move (anything but steady, single and fault is taken for moving); any
report at all (a line with IPORTID and OPORTID is taken for one on a connection); how long mirrors move; what becomes of
connections at a restart; whether the list of dlt-crs-fiber has a limit.
"""

import re
from collections.abc import Sequence

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import (
    BootBehaviour,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.tl1_framing import fields, measured, port_count, whole_number
from ocs_drivers.tl1_lists import lines_of, set_in_lines
from ocs_drivers.tl1_session import Tl1Session

INPUT, OUTPUT = 10000, 20000

_STATES = {"steady": CircuitState.TUNED, "fault": CircuitState.FAILED}


class Glimmerglass:
    """See `tl1.Dialect`."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True, port_power=True)

    def __init__(self, boot: BootBehaviour, reconfiguration_s: float, line_limit: int = 0) -> None:
        self._boot = boot
        self._reconfiguration_s = reconfiguration_s
        self._line_limit = line_limit
        self._system: dict[str, str] = {}
        self._inputs = self._outputs = range(0)

    async def attach(self, session: Tl1Session) -> None:
        for line in (await session.execute("rtrv-system-info:::<ctag>;")).lines:
            self._system |= fields(line)
        size = re.match(r"(\d+)x(\d+)", self._system.get("LICENSEDPORTMATRIX", ""))
        inputs, outputs = (port_count(size[1]), port_count(size[2])) if size else (0, 0)
        if not inputs or not outputs:
            raise DriverPermanent(
                "the device does not tell its size", command="rtrv-system-info", answer=str(self._system)
            )
        self._inputs, self._outputs = range(1, inputs + 1), range(1, outputs + 1)

    async def let_report(self, session: Tl1Session, is_wanted: bool) -> None:
        """No command for this is known."""

    async def read_facts(self, session: Tl1Session) -> SwitchFacts:
        return SwitchFacts(
            vendor="Glimmerglass",
            model=self._system.get("CHASSISTYPE") or f"{len(self._inputs)}x{len(self._outputs)}",
            serial=self._system.get("SERIALNUMBER", ""),
            software=self._system.get("SOFTWAREACTIVEVERSION", ""),
            connectivity=Connectivity.INGRESS_EGRESS,
            ingress_ports=self._inputs,
            egress_ports=self._outputs,
            reconfiguration_s=self._reconfiguration_s,
            boot=self._boot,
        )

    async def read_ports(self, session: Tl1Session) -> Sequence[PortState]:
        """An input and an output of one number are one port: as bad as the worse side, with the power of the input."""
        sides = [fields(line) for line in (await session.execute("RTRV-CFG-FIBER::all:<ctag>;")).lines]
        powers = [fields(line) for line in (await session.execute("rtrv-port-power::all:<ctag>;")).lines]
        dbm = {_port(found, "PORTID"): measured(found.get("PORTPOWER", "")) for found in powers}
        status = {side: _status(found) for found in sides if (side := _port(found, "PORTID"))}
        last = max(self._inputs[-1], self._outputs[-1])
        return [
            PortState(
                port,
                _worse(status.get(INPUT + port), status.get(OUTPUT + port)),
                dbm.get(INPUT + port, dbm.get(OUTPUT + port)),
            )
            for port in range(1, last + 1)
        ]

    async def read_circuits(self, session: Tl1Session) -> Sequence[DeviceCircuit]:
        circuits = []
        for line in (await session.execute("rtrv-crs-fiber::all:<ctag>;")).lines:
            found = fields(line)
            if pair := _pair(found):
                state = _STATES.get(found.get("CONNSTATE", "").lower(), CircuitState.TUNING)
                circuits.append(DeviceCircuit(pair, state))
        return circuits

    async def add(self, session: Tl1Session, pairs: Sequence[CrossConnect]) -> None:
        await self._set(session, pairs, "ent-crs-fiber::{0},{1}:<ctag>;")

    async def remove(self, session: Tl1Session, pairs: Sequence[CrossConnect]) -> None:
        # `all` means every connection: numbers never spell it, and `lines_of` refuses a list of none.
        await self._set(session, pairs, "dlt-crs-fiber::{0}:<ctag>;")

    async def _set(self, session: Tl1Session, pairs: Sequence[CrossConnect], form: str) -> None:
        await set_in_lines(session, list(lines_of(pairs, form, INPUT, OUTPUT, self._line_limit)))

    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        found = fields(line)
        if pair := _pair(found):
            return EventKind.CIRCUIT, None, pair
        if port := _port(found, "PORTID"):
            return EventKind.PORT, port % INPUT, None
        return EventKind.ALARM, None, None


def _port(found: dict[str, str], name: str) -> int:
    """0: none."""
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
    """Of an input and an output; None: there is none of this number."""
    order = (PortStatus.FAILED, PortStatus.DISABLED, PortStatus.ENABLED)
    return next((status for status in order if status in sides), PortStatus.FAILED)
