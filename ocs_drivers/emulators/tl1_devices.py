"""What the commands of three vendors' TL1 mean to the glass behind it. The server is tl1.py."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ocs_drivers.emulators.base import EmulatedDevice, Panel
from ocs_drivers.errors import Permanent
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CircuitState,
    Connectivity,
    CrossConnect,
    Event,
    EventKind,
    Facts,
    PortState,
    PortStatus,
)


class Refusal(Exception):
    """DENY, with a code of four letters and words."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Command:
    """`VERB:TID:AID:CTAG:GENERAL:BLOCK,BLOCK:...`, without its end."""

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Command":
        return cls(text, tuple(_split(text, ":")))

    @property
    def verb(self) -> str:
        return self.part(0).upper()

    @property
    def aid(self) -> str:
        return _plain(self.part(2))

    @property
    def ctag(self) -> str:
        return self.part(3) or "0"

    def part(self, index: int) -> str:
        return self.parts[index].strip() if index < len(self.parts) else ""

    def block(self, index: int) -> str:
        """A parameter by position, of those after the general block."""
        values = _split(self.part(5), ",")
        return _plain(values[index].strip()) if index < len(values) else ""


def _split(text: str, mark: str) -> list[str]:
    """At marks outside of quotes."""
    parts, quoted, escaped = [""], False, False
    for sign in text:
        if sign == mark and not quoted:
            parts.append("")
            continue
        quoted ^= sign == '"' and not escaped
        escaped = sign == "\\" and not escaped
        parts[-1] += sign
    return parts


def _plain(value: str) -> str:
    return value[1:-1].replace('\\"', '"').replace("\\\\", "\\") if value[:1] == '"' else value


def ports_of(text: str) -> list[int]:
    """`1&2&3` and `1&&4`, also mixed."""
    ports: list[int] = []
    for run in re.split(r"(?<!&)&(?!&)", text):
        first, _, last = run.partition("&&")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise Refusal("IIAC", f"Input, Invalid Access Identifier: {text[:40]}")
        ports += range(int(first), int(last or first) + 1)
    return ports


class _Setter:
    """Hands changes to the device, and turns what it says of them into a refusal."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device

    async def set(self, action: Action, pairs: Sequence[CrossConnect], command: Command) -> None:
        try:
            await self.device.set(action, pairs, command.text)
        except Permanent as refusal:
            raise Refusal("SROF", f"Status, Requested Operation Failed: {refusal.answer}") from refusal

    def pairs(self, ingress: Sequence[int], egress: Sequence[int]) -> list[CrossConnect]:
        facts = self.device.facts
        if len(ingress) != len(egress):
            raise Refusal("IDNV", "Input, Data Not Valid: lists of different lengths")
        for port, ports in [*((p, facts.ingress_ports) for p in ingress), *((p, facts.egress_ports) for p in egress)]:
            if port not in ports:
                raise Refusal("IIAC", f"Input, Invalid Access Identifier: no port {port} on that side")
        return [CrossConnect(one, other) for one, other in zip(ingress, egress, strict=True)]

    def held_by(self, ingress: Sequence[int]) -> list[CrossConnect]:
        """What is connected to these ingress ports, in the order of the list."""
        present = {
            circuit.cross_connect.ingress_port: circuit.cross_connect for circuit in self.device.glass.circuits()
        }
        return [present[port] for port in ingress if port in present]


class PolatisBox:
    """A Polatis. While its mirrors move, other commands wait: RTRV-PATCH lists what is in place."""

    name = "Polatis"
    reports_at_first = False
    report_verbs: ClassVar = {"RLS-ARC-EQPT": True, "OPR-ARC-EQPT": False}

    def __init__(self, device: EmulatedDevice, panel: Panel, *, semicolons: bool) -> None:
        self._device = device
        self._setter = _Setter(device)
        self._boot = panel.boot if panel.boot is not BootBehaviour.UNKNOWN else BootBehaviour.DARK
        self._model = '\\"OST; second of 2\\"' if semicolons else "OST"

    @classmethod
    def facts(cls, panel: Panel) -> Facts:
        inputs = range(1, panel.ingress_ports + 1)
        return Facts(
            vendor="Polatis",
            model="OST",
            serial="002414",
            software="6.5.2.18",
            connectivity=Connectivity.INGRESS_EGRESS,
            ingress_ports=inputs,
            egress_ports=range(inputs[-1] + 1, inputs[-1] + panel.egress_ports + 1),
            reconfiguration_s=panel.reconfiguration_s,
            boot=panel.boot,
        )

    async def answer(self, command: Command) -> Sequence[str]:
        facts, verb, aid = self._device.facts, command.verb, command.aid.upper()
        if verb == "RTRV-EQPT" and aid == "SYSTEM":
            return [f'"SYSTEM:SIZE={len(facts.ingress_ports)}x{len(facts.egress_ports)}"']
        if verb == "RTRV-EQPT" and aid == "BOOT":
            return [f'"BOOT:MODE={self._boot.upper()}"']
        if verb == "RTRV-NETYPE":
            return [f'"{facts.vendor},{self._model},OCS,{facts.software}"']
        if verb == "RTRV-INV":
            return [f'"OCS:SN={facts.serial}"']
        if verb in ("RTRV-PORT-SHUTTER", "RTRV-PORT-POWER"):
            return self._ports(verb, aid)
        if verb in ("OPR-PORT-SHUTTER", "RLS-PORT-SHUTTER"):
            return await self._shut(verb == "RLS-PORT-SHUTTER", ports_of(aid), command)
        if verb == "RTRV-PATCH":
            return await self._patches(aid)
        if verb == "ENT-PATCH":
            ingress, _, egress = command.part(2).partition(",")
            await self._setter.set(Action.ADD, self._setter.pairs(ports_of(ingress), ports_of(egress)), command)
            return []
        if verb == "DLT-PATCH":
            ports = list(facts.ingress_ports) if aid in ("", "ALL") else ports_of(aid)
            await self._setter.set(Action.REMOVE, self._setter.held_by(ports), command)
            return []
        raise Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: Event) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT:
            return "A", "REPT EVT EQPT", f'"{event.text.replace("port", "Port")}"'
        if event.cross_connect is not None:
            pair = event.cross_connect
            return "A", "REPT EVT PATCH", f'"{pair.ingress_port},{pair.egress_port}"'
        return "**", "REPT ALM EQPT", f'"{event.text}"'

    async def _patches(self, aid: str) -> Sequence[str]:
        while math.isfinite(moving_s := self._device.glass.moving_s()):
            await self._device.clock.sleep(moving_s)
        wanted = set(ports_of(aid)) if aid else None
        return [
            f'"{pair.ingress_port},{pair.egress_port}"'
            for circuit in self._device.glass.circuits()
            if circuit.state is not CircuitState.TUNING
            for pair in [circuit.cross_connect]
            if wanted is None or wanted & {pair.ingress_port, pair.egress_port}
        ]

    def _ports(self, verb: str, aid: str) -> Sequence[str]:
        states = {state.port: state for state in self._device.glass.ports()}
        ports = ports_of(aid) if aid else list(states)
        if unknown := [port for port in ports if port not in states]:
            raise Refusal("IIAC", f"Input, Invalid Access Identifier: no port {unknown[0]}")
        if verb == "RTRV-PORT-POWER":
            return [f'"{port}:{states[port].power_dbm:.1f}"' for port in ports]
        shutter = {PortStatus.ENABLED: "OPEN", PortStatus.DISABLED: "CLOSED", PortStatus.FAILED: "FAILED"}
        return [f'"{port}:{shutter[states[port].status]}"' for port in ports]

    async def _shut(self, is_open: bool, ports: Sequence[int], command: Command) -> Sequence[str]:
        if not {state.port for state in self._device.glass.ports()}.issuperset(ports):
            raise Refusal("IIAC", "Input, Invalid Access Identifier: no such port")
        await self._device.enable(ports, is_open, command.text)
        return []


class CalientBox:
    """A Calient: connections are provisioned by name, then lit."""

    name = "CALIENT01TS"
    reports_at_first = True
    report_verbs: ClassVar = {"ALW-MSG": True, "INH-MSG": False}

    def __init__(self, device: EmulatedDevice, panel: Panel, *, semicolons: bool) -> None:
        self._device = device
        self._setter = _Setter(device)
        self._groups: dict[CrossConnect, str] = {}  # provisioned, lit or not
        self._held: dict[tuple[str, int], CrossConnect] = {}  # by either end
        self._ports = {_slot(port): port for port in device.facts.ingress_ports}
        self._session = device.session()
        self._changes = device.glass.listen()
        self._alias = '\\"row B; rack 3, unit 5\\"' if semicolons else "NONE"

    @classmethod
    def facts(cls, panel: Panel) -> Facts:
        ports = range(1, max(panel.ingress_ports, panel.egress_ports) + 1)
        return Facts(
            vendor="Calient",
            model="S320",
            serial="C00002227",
            software="6.0-3",
            connectivity=Connectivity.INGRESS_EGRESS,
            ingress_ports=ports,
            egress_ports=ports,
            reconfiguration_s=panel.reconfiguration_s,
            boot=panel.boot,
        )

    async def answer(self, command: Command) -> Sequence[str]:
        self._forget_after_restart()
        self._take_over()
        facts, verb = self._device.facts, command.verb
        if verb == "RTRV-NE":
            about = f"SERIALNUMBER={facts.serial},SWPACKAGE={facts.software},STATUS=OK,CHASSISTYPE={facts.model}"
            return [f'"{self.name}:{about},PLATFORM=VERSION2"']
        if verb in ("RTRV-PORT-SUM", "RTRV-PORT"):
            wanted = facts.ingress_ports if command.aid in ("0", "") else [self._port(command.aid)]
            return self._summaries(wanted) if verb == "RTRV-PORT-SUM" else self._states(wanted)
        if verb == "RTRV-CRS":
            lit = self._lit()
            return [self._connection(pair, lit.get(pair)) for pair in sorted(self._groups)]
        if verb == "ENT-CRS":
            return self._provision(command)
        if verb in ("ACT-CRS", "CANC-CRS", "DLT-CRS"):
            return await self._change(verb, self._named(command), command)
        raise Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: Event) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT and event.port is not None:
            return "*C", "REPT ALM PORT", f'"{_slot(event.port)}:CR,{event.text.upper()},NSA"'
        if event.cross_connect is not None:
            return "A", "REPT DBCHG CRS", f'"{_name(event.cross_connect)}:{event.text}"'
        return "**", "REPT ALM EQPT", f'"NE:MJ,RESTART,NSA,,,,:\\"{event.text}\\""'

    def _forget_after_restart(self) -> None:
        """What the glass has lost is not provisioned any more."""
        if not self._device.is_alive(self._session):
            self._session = self._device.session()
            for pair in [pair for pair in self._groups if not self._device.glass.holds(pair)]:
                self._forget(pair)

    def _take_over(self) -> None:
        """Circuits that came to the glass by other ways than by our commands are connections too."""
        while not self._changes.empty():
            pair = self._changes.get_nowait().cross_connect
            if pair is None or pair in self._groups or not self._device.glass.holds(pair):
                continue
            for held in {self._held[end] for end in self._device.facts.ends(pair) if end in self._held}:
                self._forget(held)
            self._provide(pair, "OPERATOR")

    def _provide(self, pair: CrossConnect, group: str) -> None:
        self._groups[pair] = group
        self._held |= dict.fromkeys(self._device.facts.ends(pair), pair)

    def _forget(self, pair: CrossConnect) -> None:
        del self._groups[pair]
        for end in self._device.facts.ends(pair):
            del self._held[end]

    def _lit(self) -> dict[CrossConnect, CircuitState]:
        return {circuit.cross_connect: circuit.state for circuit in self._device.glass.circuits()}

    def _port(self, name: str) -> int:
        if name not in self._ports:
            raise Refusal("IIAC", f"Input, Invalid Access Identifier: no port {name}")
        return self._ports[name]

    def _provision(self, command: Command) -> Sequence[str]:
        source, _, destination = command.aid.partition(",")
        pair = CrossConnect(self._port(source), self._port(destination))
        if command.block(1).upper() != "1WAY":
            raise Refusal("IDNV", "Input, Data Not Valid: this emulator knows 1WAY only")
        for end in self._device.facts.ends(pair):
            if end in self._held:
                raise Refusal("SROF", f"Invalid Connection: port already in connection {_name(self._held[end])}")
        self._provide(pair, command.block(0))
        return []

    def _named(self, command: Command) -> CrossConnect:
        """By name: first in ACT-CRS, and first or third in the others, as clients put it."""
        for index in (0, 2):
            source, arrow, destination = command.block(index).partition(">")
            if arrow and source in self._ports and destination in self._ports:
                pair = CrossConnect(self._ports[source], self._ports[destination])
                if pair in self._groups:
                    return pair
        raise Refusal("IIAC", "Invalid Connection: no connection of that name")

    async def _change(self, verb: str, pair: CrossConnect, command: Command) -> Sequence[str]:
        if verb == "ACT-CRS":
            await self._setter.set(Action.ADD, [pair], command)
        elif verb == "CANC-CRS":
            await self._setter.set(Action.REMOVE, [pair], command)
        elif self._device.glass.holds(pair):
            raise Refusal("SROF", f"Invalid Connection: {_name(pair)} is active")
        else:
            self._forget(pair)
        return []

    def _connection(self, pair: CrossConnect, state: CircuitState | None) -> str:
        shown = {
            None: "AS=UMA,OS=RDY,OC=OK",
            CircuitState.TUNING: "AS=IS,OS=RDY,OC=OK",
            CircuitState.TUNED: "AS=IS,OS=IS,OC=OK",
            CircuitState.FAILED: "AS=IS,OS=OOS,OC=FAIL",
        }[state]
        ends = f"SRCPORT={_slot(pair.ingress_port)},DSTPORT={_slot(pair.egress_port)},GRPNAME={self._groups[pair]}"
        return f'"{_name(pair)}:{ends},CONNNAME={_name(pair)},CONNTYPE=1WAY,{shown},PS=UPR,AL=CL"'

    def _summaries(self, ports: Sequence[int]) -> Sequence[str]:
        powers = {state.port: state.power_dbm for state in self._device.glass.ports()}
        held = {port: pair for pair in self._groups for port in (pair.ingress_port, pair.egress_port)}
        lit, lines = self._lit(), []
        for port in ports:
            name = _name(held[port]) if port in held else "NONE"
            state = "ACT" if held.get(port) in lit else "NONE"
            measured = f"INPWR={powers[port]:.2f},OUTPWR={powers[port]:.2f}"
            more = f"CONNNAME1={name},CONNSTATE1={state},CONNNAME2=NONE,CONNSTATE2=NONE"
            lines.append(f'"{_slot(port)}:ALIAS={self._alias},{measured},{more}"')
        return lines

    def _states(self, ports: Sequence[int]) -> Sequence[str]:
        status, lines = {state.port: state.status for state in self._device.glass.ports()}, []
        for port in ports:
            administrative = "OOS-MA" if status[port] is PortStatus.DISABLED else "IS"
            works = "FAIL" if status[port] is PortStatus.FAILED else "OK"
            sides = (f"{side}AS={administrative},{side}OS=IS,{side}OC={works},{side}RS=NPR" for side in ("IN", "OUT"))
            lines.append(f'"{_slot(port)}:WX,NONE,NONE:{",".join(sides)}"')
        return lines


def _slot(port: int) -> str:
    """Eight ports to a row, eight rows to a shelf: 1 is `1.1.1`, 9 is `1.2.1`, 65 is `2.1.1`."""
    return f"{(port - 1) // 64 + 1}.{(port - 1) // 8 % 8 + 1}.{(port - 1) % 8 + 1}"


def _name(pair: CrossConnect) -> str:
    return f"{_slot(pair.ingress_port)}>{_slot(pair.egress_port)}"


class GlimmerglassBox:
    """A Glimmerglass: numbers of five figures, the first of which tells the side."""

    name = "GGN"
    reports_at_first = True
    report_verbs: ClassVar[dict[str, bool]] = {}

    def __init__(self, device: EmulatedDevice, panel: Panel, *, semicolons: bool) -> None:
        self._device = device
        self._setter = _Setter(device)
        self._label = '\\"to rack 3; unit 5, left\\"' if semicolons else ""

    @classmethod
    def facts(cls, panel: Panel) -> Facts:
        ports = range(1, max(panel.ingress_ports, panel.egress_ports) + 1)
        return Facts(
            vendor="Glimmerglass",
            model="System-300",
            serial="G300-117",
            software="3.4.1",
            connectivity=Connectivity.INGRESS_EGRESS,
            ingress_ports=ports,
            egress_ports=ports,
            reconfiguration_s=panel.reconfiguration_s,
            boot=panel.boot,
        )

    async def answer(self, command: Command) -> Sequence[str]:
        facts, verb, aid = self._device.facts, command.verb, command.aid.lower()
        if verb == "RTRV-SYSTEM-INFO":
            count = len(facts.ingress_ports)
            about = (
                f"SerialNumber={facts.serial}",
                "SystemType=OXC",
                f"ChassisType={facts.model}",
                f"SoftwareActiveVersion={facts.software}",
                f"LicensedPortMatrix={count}x{count}",
            )
            return [f'"GGN:{each}"' for each in about]
        if verb == "RTRV-CFG-FIBER":
            states = self._device.glass.ports()
            return [self._port(side, state) for side in (10000, 20000) for state in states]
        if verb == "RTRV-PORT-POWER":
            states = self._device.glass.ports()
            return [
                f'"GGN:PORTID={side + state.port},PORTNAME={self._label},PORTPOWER={state.power_dbm:.3f}"'
                for side in (10000, 20000)
                for state in states
            ]
        if verb == "RTRV-CRS-FIBER":
            return self._connections(aid)
        if verb == "ENT-CRS-FIBER":
            ingress, _, egress = aid.partition(",")
            pairs = self._setter.pairs(_side(ingress, 10000), _side(egress, 20000))
            await self._setter.set(Action.ADD, pairs, command)
            return []
        if verb == "DLT-CRS-FIBER":
            inputs, _, _ = aid.partition(",")
            ports = list(facts.ingress_ports) if inputs == "all" else _side(inputs, 10000)
            await self._setter.set(Action.REMOVE, self._setter.held_by(ports), command)
            return []
        raise Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: Event) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT and event.port is not None:
            return "**", "REPT ALM PORT", f'"GGN:PORTID={10000 + event.port},PORTHEALTH={event.text.split()[-1]}"'
        if event.cross_connect is not None:
            pair = event.cross_connect
            ends = f"IPORTID={10000 + pair.ingress_port},OPORTID={20000 + pair.egress_port}"
            return "A", "REPT EVT CRS", f'"GGN:{ends},CONNSTATE={event.text.split()[-1]}"'
        return "**", "REPT ALM EQPT", f'"GGN:\\"{event.text}\\""'

    def _port(self, side: int, state: PortState) -> str:
        health = "bad" if state.status is PortStatus.FAILED else "good"
        direction = "input" if side == 10000 else "output"
        privilege = "0x0" if state.status is PortStatus.DISABLED else "0x1"
        return (
            f'"GGN:PORTID={side + state.port},PORTNAME={self._label},PORTDIR={direction},PORTHEALTH={health},'
            f'PORTCAT=nor,PORTPRIV={privilege}"'
        )

    def _connections(self, aid: str) -> Sequence[str]:
        """Every input, and every output that is not connected; or those on the ports that are asked for."""
        ports = self._device.facts.ingress_ports
        names = {CircuitState.TUNED: "steady", CircuitState.FAILED: "fault", CircuitState.TUNING: "pending"}
        circuits = {circuit.cross_connect.ingress_port: circuit for circuit in self._device.glass.circuits()}
        taken = {circuit.cross_connect.egress_port for circuit in circuits.values()}
        rows = []
        for port in ports:
            circuit = circuits.get(port)
            end = 20000 + circuit.cross_connect.egress_port if circuit else 0
            rows.append((10000 + port, end, names[circuit.state] if circuit else "single"))
        rows += [(0, 20000 + port, "single") for port in ports if port not in taken]
        wanted = None if aid == "all" else set(ports_of(aid))
        return [
            f'"GGN:IPORTID={source},IPORTNAME={self._label},OPORTID={end},OPORTNAME={self._label},CONNID=0,'
            f"CONNSTATE={state},CONNCAUSE=none,INPWR=-12.618,OUTPWR=-14.277,PWRLOSS=1.672,CONNLOCK=0,"
            'CONNLOCKUSER="'
            for source, end, state in rows
            if wanted is None or wanted & {source, end}
        ]


def _side(text: str, offset: int) -> list[int]:
    ports = [port - offset for port in ports_of(text)]
    if not all(0 < port < 10000 for port in ports):
        raise Refusal("IIAC", f"Input, Invalid Access Identifier: {text[:40]} is on the other side")
    return ports
