"""Implement the TL1 dialect of Calient's S-series, with one command for each one-way connection from a port's input to
a port's output.

The following is known from working clients. `ENT-CRS::<src>,<dst>:<ctag>::<group>,1WAY` provisions a connection and
`ACT-CRS` activates it. `CANC-CRS` deactivates a connection and `DLT-CRS` deletes it, both by its name `<src>><dst>`.
RTRV-CRS reports AS=UMA,OS=RDY for a provisioned connection, AS=IS,OS=IS,OC=OK for a working connection, and OC=FAIL for
a failed connection. Ports have names such as `1.1.1`, or numbers on some releases. RTRV-PORT-SUM reports the power and
RTRV-PORT the state of each side of a port. Both report all ports if port 0 is requested.

The following is not verified. Any value of OS except IS is assumed to mean that mirrors are moving. OOS-MA is assumed
to mean that an operator has disabled the port. ALW-MSG is assumed to reverse INH-MSG. A reported line with a
connection's name is treated as a report on that connection. The natural order of the port names determines the port
numbers, so a change of the list of ports is an error. The option `port_names` sets the numbers explicitly.

A connection that is provisioned but not activated is not reported as a circuit, because no light passes. It is deleted
if this driver owns it and it occupies a needed port. The driver owns such a connection if it provisioned it, or if the
connection is in the group set by option `group`, except for the default group SYSTEM, which all clients share. A 2WAY
connection is shown as its two one-way connections. The driver refuses to remove them.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ocs_drivers.base import DeviceClock
from ocs_drivers.errors import DriverError, DriverPermanent, DriverRetryable
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
from ocs_drivers.tl1_framing import fields, measured, quote, whole_number
from ocs_drivers.tl1_session import Tl1Denied
from ocs_drivers.tl1_wire import Tl1Options, Tl1Wire, partly_done

# The group of connections made by Calient's own REST interface.
SHARED_GROUP = "SYSTEM"


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection, as one line of the answer to RTRV-CRS describes it."""

    name: str
    group: str
    source: str
    destination: str
    is_two_way: bool
    is_lit: bool  # activated; otherwise only provisioned
    state: CircuitState

    @classmethod
    def parse(cls, line: str) -> "_Connection":
        found = fields(line)
        works = found.get("OS") == "IS"
        state = CircuitState.TUNED if works else CircuitState.TUNING
        return cls(
            name=found.get("CONNNAME", found.get("", "")),
            group=found.get("GRPNAME", ""),
            source=found.get("SRCPORT", ""),
            destination=found.get("DSTPORT", ""),
            is_two_way=found.get("CONNTYPE", "1WAY").upper() == "2WAY",
            is_lit=works or found.get("AS", "IS") == "IS",
            state=CircuitState.FAILED if found.get("OC", "OK") != "OK" else state,
        )


class CalientTl1Wire(Tl1Wire):
    """Implements the operations of `base.SwitchWire` for Calient switches. If option `group` is empty, the group that
    all clients share is used."""

    default_port = 3082
    default_reconfiguration_s = 0.010  # the paper's table 2
    capabilities = SwitchCapabilities(tuned_state=True, port_power=True)

    def __init__(self, options: Tl1Options, clock: DeviceClock) -> None:
        super().__init__(options, clock)
        self._group = options.group or SHARED_GROUP
        self._provisioned: set[str] = set()  # by this driver, and not known to be gone
        self._pinned = options.port_names
        self._names: dict[int, str] = dict(enumerate(options.port_names, 1))
        self._numbers: dict[str, int] = {name: number for number, name in self._names.items()}
        self._shown: dict[CrossConnect, _Connection] = {}  # from the last reading

    async def attach(self) -> None:
        """Read the list of ports and assign a number to each of them. Raises DriverPermanent if the ports cannot be
        numbered, differ from those of an earlier session, or do not include every port in option `port_names`."""
        there = [fields(line).get("", "") for line in await self.ask("RTRV-PORT-SUM::0:<ctag>;")]
        names = dict(enumerate(self._pinned or sorted(there, key=_natural), 1))
        if all(whole_number(name) for name in names.values()) and not self._pinned:
            names = {whole_number(name): name for name in names.values()}
        if not names or min(names) != 1 or max(names) != len(names):
            raise DriverPermanent(
                "the ports cannot be numbered from 1 without gaps: set the option `port_names`",
                answer=" ".join(there[:8]),
            )
        if absent := sorted({*names.values()} - {*there}, key=_natural):
            raise DriverPermanent(f"the device has no ports {', '.join(absent)}: check the option `port_names`")
        if self._names and names != self._names:
            raise DriverPermanent(
                "the device's list of ports has changed: set the option `port_names` and restart the daemon"
            )
        self.ingress = self.egress = range(1, len(names) + 1)
        self._names, self._numbers = names, {name: number for number, name in names.items()}

    async def let_report(self, is_wanted: bool) -> None:
        await self.ask("ALW-MSG:::<ctag>;" if is_wanted else "INH-MSG:::<ctag>;")

    async def read_facts(self) -> SwitchFacts:
        lines = await self.ask("RTRV-NE:::<ctag>;")
        found = fields(lines[0]) if lines else {}
        return self.facts(
            vendor="Calient",
            model=found.get("CHASSISTYPE") or "S-series",
            serial=found.get("SERIALNUMBER", ""),
            software=found.get("SWPACKAGE", ""),
        )

    async def read_ports(self) -> Sequence[PortState]:
        states = _by_name(await self.ask("RTRV-PORT::0:<ctag>;"))
        sums = _by_name(await self.ask("RTRV-PORT-SUM::0:<ctag>;"))
        return [
            PortState(number, _status(states.get(name, {})), measured(sums.get(name, {}).get("INPWR", "")))
            for number, name in self._names.items()
        ]

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        connections = [each for each in await self._connections() if each.is_lit]
        self._shown = {pair: connection for connection in connections for pair in self._pairs(connection)}
        return [DeviceCircuit(pair, connection.state) for pair, connection in self._shown.items()]

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        (pair,) = pairs
        await (self._connect if action is Action.ADD else self._disconnect)(pair)

    async def _connect(self, pair: CrossConnect) -> None:
        source, destination = self._names[pair.ingress_port], self._names[pair.egress_port]
        ports, name = f"{quote(source)},{quote(destination)}", _name(source, destination)
        provision = f"ENT-CRS::{ports}:<ctag>::{quote(self._group)},1WAY;"
        try:
            await self._provision(provision, f"{source}>{destination}")
        except Tl1Denied:
            if not await self._make_way(source, destination):
                raise
            await self._provision(provision, f"{source}>{destination}")
        try:
            await self.order(f"ACT-CRS::{ports}:<ctag>::{name},{quote(self._group)};")
        except Tl1Denied:
            with suppress(DriverError):  # only the refusal is reported
                await self.order(f"DLT-CRS:::<ctag>::{name};")
            raise
        except DriverRetryable as error:
            raise partly_done("only the first of two commands was carried out", error) from error

    async def _disconnect(self, pair: CrossConnect) -> None:
        if pair not in self._shown:
            await self.read_circuits()
        connection = self._shown.get(pair)
        if connection is None:
            raise DriverPermanent(f"connection {pair} does not exist")
        if connection.is_two_way:
            raise DriverPermanent(
                f"cross-connect {pair} is one direction of the two-way connection {connection.name}, which can only be "
                f"removed as a whole: remove connection {connection.name} on the device"
            )
        for verb in ("CANC-CRS", "DLT-CRS"):
            try:
                # A command without a name would not identify the connection to delete.
                await self.order(f"{verb}:::<ctag>::{quote_name(connection.name)};")
            except DriverRetryable as error:
                if verb == "CANC-CRS":
                    raise
                raise partly_done("only the first of two commands was carried out", error) from error

    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        for found in re.finditer(r"([\w.]+)[>-]([\w.]+)", line):
            ends = [self._numbers.get(name) for name in found.groups()]
            if ends[0] is not None and ends[1] is not None:
                return EventKind.CIRCUIT, None, CrossConnect(ends[0], ends[1])
        address = re.match(r"[\w.]+", line)
        if "PORT" in verb and address and address[0] in self._numbers:
            return EventKind.PORT, self._numbers[address[0]], None
        return EventKind.ALARM, None, None

    async def _provision(self, command: str, name: str) -> None:
        may_have_taken = True
        try:
            await self.order(command)
        except (Tl1Denied, DriverRetryable):
            may_have_taken = False
            raise
        finally:
            if may_have_taken:
                self._provisioned.add(name)

    async def _connections(self) -> list[_Connection]:
        lines = await self.ask("RTRV-CRS:::<ctag>::ALL;")
        return [_Connection.parse(line) for line in lines if "SRCPORT=" in line.upper()]

    def _pairs(self, connection: _Connection) -> list[CrossConnect]:
        source, destination = self._numbers.get(connection.source), self._numbers.get(connection.destination)
        if source is None or destination is None:  # on ports that port_names omits
            return []
        there = CrossConnect(source, destination)
        return [there, CrossConnect(destination, source)] if connection.is_two_way else [there]

    async def _make_way(self, source: str, destination: str) -> bool:
        """Delete this driver's connections that use one of these ports and were provisioned but not activated. They may
        be left over from an interrupted change. Return whether a connection was deleted."""
        stale = [
            connection
            for connection in await self._connections()
            if connection.group == self._group
            and (self._group != SHARED_GROUP or connection.name in self._provisioned)
            and not connection.is_lit
            and not connection.is_two_way
            and (connection.source == source or connection.destination == destination)
        ]
        for connection in stale:
            await self.order(f"DLT-CRS:::<ctag>::{quote_name(connection.name)};")
        return bool(stale)


def _name(source: str, destination: str) -> str:
    return quote_name(f"{source}>{destination}")


def quote_name(name: str) -> str:
    """Format a connection's name as a command parameter. Names with `>` and `-` are not quoted, because clients send
    them unquoted. Raises ValueError for an empty name."""
    if not name:
        raise ValueError("the connection's name must not be empty")
    return name if re.fullmatch(r"[\w.>-]+", name) else quote(name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders `2` before `10` and `1.2.1` before `1.10.1`."""
    return [(not part.isdecimal(), whole_number(part), part) for part in re.findall(r"\d+|\D+", name)]


def _by_name(lines: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the fields of each port by port name. The fields follow the last colon of a line such as
    `1.1.1:WX,NONE,NONE:INAS=IS,...`."""
    return {line.partition(":")[0]: fields(line) for line in lines}


def _status(found: dict[str, str]) -> PortStatus:
    """Return the combined status of a port's input and output, which share a number. It is the worse of the two."""
    if any(found.get(side, "OK") != "OK" for side in ("INOC", "OUTOC")):
        return PortStatus.FAILED
    if any(found.get(side, "").startswith("OOS-MA") for side in ("INAS", "OUTAS")):
        return PortStatus.DISABLED
    return PortStatus.ENABLED
