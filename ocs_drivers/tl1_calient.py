"""Calient's S-series in TL1: one-way connections from any port's input to any port's output, one command each.

Known from working clients: `ENT-CRS::<src>,<dst>:<ctag>::<group>,1WAY` provisions a connection and `ACT-CRS` lights it,
`CANC-CRS` darkens and `DLT-CRS` forgets it, by its name `<src>><dst>`. RTRV-CRS tells AS=UMA,OS=RDY of one that is
provisioned, AS=IS,OS=IS,OC=OK of one that works, OC=FAIL of one that does not. Ports are named by slots as `1.1.1`, on
some releases by numbers. RTRV-PORT-SUM tells power, RTRV-PORT the state of each side, both of all ports for port 0.

Unverified: what OS says while mirrors move (anything but IS is taken for moving); that OOS-MA means switched off by
hand; that ALW-MSG undoes INH-MSG; reports on connections (a line with a connection's name is taken for one); and that
the natural order of the port names never changes: it is what numbers the ports, so a change of the list is an error.
Pin it by the option `port_names`.

A connection that is provisioned and not lit is none: no light passes. If it is ours and in the way, it is deleted: that
is one that we provisioned, or any of the group that option `group` says is ours. SYSTEM, the default, is everybody's.
A 2WAY connection is shown as the two one-way ones that it is made of, and cannot be removed by halves.
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

# What Calient's own REST interface files connections under.
SHARED_GROUP = "SYSTEM"


@dataclass(frozen=True, slots=True)
class _Connection:
    """One line of RTRV-CRS."""

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
    """The verbs of a Calient. Option `group` "": the group that all share."""

    default_port = 3082
    default_reconfiguration_s = 0.010  # the paper's table 2
    capabilities = SwitchCapabilities(tuned_state=True, port_power=True)

    def __init__(self, options: Tl1Options, clock: DeviceClock) -> None:
        super().__init__(options, clock)
        self._group = options.group or SHARED_GROUP
        self._provisioned: set[str] = set()  # by us, and not seen to be gone
        self._pinned = options.port_names
        self._names: dict[int, str] = dict(enumerate(options.port_names, 1))
        self._numbers: dict[str, int] = {name: number for number, name in self._names.items()}
        self._shown: dict[CrossConnect, _Connection] = {}  # as last read

    async def attach(self) -> None:
        """Which ports there are, and by which numbers we know them."""
        there = [fields(line).get("", "") for line in await self.ask("RTRV-PORT-SUM::0:<ctag>;")]
        names = dict(enumerate(self._pinned or sorted(there, key=_natural), 1))
        if all(whole_number(name) for name in names.values()) and not self._pinned:
            names = {whole_number(name): name for name in names.values()}
        if not names or min(names) != 1 or max(names) != len(names):
            raise DriverPermanent("its ports cannot be numbered: say port_names", answer=" ".join(there[:8]))
        if absent := sorted({*names.values()} - {*there}, key=_natural):
            raise DriverPermanent(f"the device has no ports {', '.join(absent)}: look at port_names")
        if self._names and names != self._names:
            raise DriverPermanent("the device has other ports than before: pin them by port_names, and start anew")
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
            with suppress(DriverError):  # the refusal itself is what counts
                await self.order(f"DLT-CRS:::<ctag>::{name};")
            raise
        except DriverRetryable as error:
            raise partly_done("one of two commands was carried out before", error) from error

    async def _disconnect(self, pair: CrossConnect) -> None:
        if pair not in self._shown:
            await self.read_circuits()
        connection = self._shown.get(pair)
        if connection is None:
            raise DriverPermanent(f"there is no connection {pair}")
        if connection.is_two_way:
            raise DriverPermanent(f"{pair} is half of the two-way connection {connection.name}")
        for verb in ("CANC-CRS", "DLT-CRS"):
            try:
                # Never without a name, which would not say what to delete.
                await self.order(f"{verb}:::<ctag>::{quote_name(connection.name)};")
            except DriverRetryable as error:
                if verb == "CANC-CRS":
                    raise
                raise partly_done("one of two commands was carried out before", error) from error

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
        if source is None or destination is None:  # of ports that port_names leaves out
            return []
        there = CrossConnect(source, destination)
        return [there, CrossConnect(destination, source)] if connection.is_two_way else [there]

    async def _make_way(self, source: str, destination: str) -> bool:
        """Delete what of ours is provisioned and dark on these ports: left over from a change that was cut off. Whether
        there was any."""
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
    """A connection's name as a parameter: `>` and `-` are part of many, and clients send them bare."""
    if not name:
        raise ValueError("a connection without a name cannot be named in a command")
    return name if re.fullmatch(r"[\w.>-]+", name) else quote(name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """`2` before `10`, `1.2.1` before `1.10.1`."""
    return [(not part.isdecimal(), whole_number(part), part) for part in re.findall(r"\d+|\D+", name)]


def _by_name(lines: Sequence[str]) -> dict[str, dict[str, str]]:
    """Fields by port; of `1.1.1:WX,NONE,NONE:INAS=IS,...` those after the last colon."""
    return {line.partition(":")[0]: fields(line) for line in lines}


def _status(found: dict[str, str]) -> PortStatus:
    """Of both sides together: they share a number."""
    if any(found.get(side, "OK") != "OK" for side in ("INOC", "OUTOC")):
        return PortStatus.FAILED
    if any(found.get(side, "").startswith("OOS-MA") for side in ("INAS", "OUTAS")):
        return PortStatus.DISABLED
    return PortStatus.ENABLED
