"""Parse TL1 commands, and implement the common parts of emulated devices and the commands of Polatis and Glimmerglass
switches. tl1_calient.py implements the commands of a Calient switch. tl1.py implements the server."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CircuitState,
    CrossConnect,
    EventKind,
    PortState,
    PortStatus,
    SwitchEvent,
    SwitchFacts,
)


class Tl1Refusal(Exception):
    """Raised when the device refuses a command (DENY), with an error code of four letters and a text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Tl1Command:
    """A command of the form `VERB:TID:AID:CTAG:GENERAL:BLOCK,BLOCK:...`, without its terminator."""

    text: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Tl1Command":
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
        """Return the parameter at this position among the parameters after the general block, or "" if it is absent."""
        values = _split(self.part(5), ",")
        return _plain(values[index].strip()) if index < len(values) else ""


def _split(text: str, mark: str) -> list[str]:
    """Split the text at each `mark` that is outside quotes."""
    return re.split(rf'{mark}(?=(?:[^"\\]|\\.|"(?:[^"\\]|\\.)*")*$)', text)


def _plain(value: str) -> str:
    return value[1:-1].replace('\\"', '"').replace("\\\\", "\\") if value[:1] == '"' else value


def ports_of(text: str) -> list[int]:
    """Parse a list of ports such as `1&2&3`, with `1&&4` for a range. Raises Tl1Refusal if the list is invalid."""
    ports: list[int] = []
    for run in re.split(r"(?<!&)&(?!&)", text):
        first, _, last = run.partition("&&")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: {text[:40]}")
        ports += range(int(first), int(last or first) + 1)
    return ports


class Tl1Device(ABC):
    """The commands of one vendor, for an emulated device. If `semicolons` is True, labels in replies contain `;` and
    quotes."""

    name: ClassVar[str]  # before the date in every reply
    reports_at_first: ClassVar[bool]
    reports_on = reports_off = ""  # the verbs that enable and disable reports, if any

    def __init__(self, device: EmulatedDevice, semicolons: bool) -> None:
        self.device = device
        self.semicolons = semicolons

    @classmethod
    @abstractmethod
    def facts(cls, panel: DevicePanel) -> SwitchFacts: ...

    @abstractmethod
    async def answer(self, command: Tl1Command) -> Sequence[str]:
        """Carry out a command and return the lines of its reply. Raises Tl1Refusal if the device refuses the
        command."""

    @abstractmethod
    def report(self, event: SwitchEvent) -> tuple[str, str, str]:
        """Return the severity, the verb and the line of the report on a port or circuit event. A restart is not
        reported, because it ends every session."""

    async def set(self, action: Action, pairs: Sequence[CrossConnect], command: Tl1Command) -> None:
        """Connect or disconnect the pairs on the device. Raises Tl1Refusal if the device refuses a pair."""
        try:
            await self.device.set(action, pairs, command.text)
        except DriverPermanent as refusal:
            raise Tl1Refusal("SROF", f"Status, Requested Operation Failed: {refusal.answer}") from refusal

    def pairs(self, ingress: Sequence[int], egress: Sequence[int]) -> list[CrossConnect]:
        facts = self.device.facts
        if len(ingress) != len(egress):
            raise Tl1Refusal("IDNV", "Input, Data Not Valid: lists of different lengths")
        for port, ports in [*((p, facts.ingress_ports) for p in ingress), *((p, facts.egress_ports) for p in egress)]:
            if port not in ports:
                raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: no port {port} on that side")
        return [CrossConnect(one, other) for one, other in zip(ingress, egress, strict=True)]

    def held_by(self, ingress: Sequence[int]) -> list[CrossConnect]:
        """Return the connections of these ingress ports, in the order of the ports. Ports without a connection are
        skipped."""
        present = {circuit.cross_connect.ingress_port: circuit.cross_connect for circuit in self.device.circuits()}
        return [present[port] for port in ingress if port in present]


class PolatisTl1Device(Tl1Device):
    """The commands of a Polatis switch. RTRV-PATCH waits until moving mirrors are in place, then lists the circuits in
    place."""

    name = "Polatis"
    reports_at_first = False
    reports_on, reports_off = "RLS-ARC-EQPT", "OPR-ARC-EQPT"

    @classmethod
    def facts(cls, panel: DevicePanel) -> SwitchFacts:
        return panel.facts("Polatis", "OST", "002414", "6.5.2.18")

    async def answer(self, command: Tl1Command) -> Sequence[str]:
        facts, verb, aid = self.device.facts, command.verb, command.aid.upper()
        if verb == "RTRV-EQPT" and aid == "SYSTEM":
            return [f'"SYSTEM:SIZE={len(facts.ingress_ports)}x{len(facts.egress_ports)}"']
        if verb == "RTRV-EQPT" and aid == "BOOT":
            boot = BootBehaviour.RESTORE if facts.boot is BootBehaviour.RESTORE else BootBehaviour.DARK
            return [f'"BOOT:MODE={boot.upper()}"']
        if verb == "RTRV-NETYPE":
            model = '\\"OST; second of 2\\"' if self.semicolons else "OST"
            return [f'"{facts.vendor},{model},OCS,{facts.software}"']
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
            await self.set(Action.ADD, self.pairs(ports_of(ingress), ports_of(egress)), command)
            return []
        if verb == "DLT-PATCH":
            ports = list(facts.ingress_ports) if aid in ("", "ALL") else ports_of(aid)
            await self.set(Action.REMOVE, self.held_by(ports), command)
            return []
        raise Tl1Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: SwitchEvent) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT:
            return "A", "REPT EVT EQPT", f'"{event.text.replace("port", "Port")}"'
        pair = event.cross_connect
        assert pair is not None
        return "A", "REPT EVT PATCH", f'"{pair.ingress_port},{pair.egress_port}"'

    async def _patches(self, aid: str) -> Sequence[str]:
        while math.isfinite(moving_s := self.device.moving_s()):
            await self.device.clock.sleep(moving_s)
        wanted = set(ports_of(aid)) if aid else None
        return [
            f'"{pair.ingress_port},{pair.egress_port}"'
            for circuit in self.device.circuits()
            if circuit.state is not CircuitState.TUNING
            for pair in [circuit.cross_connect]
            if wanted is None or wanted & pair.ports
        ]

    def _ports(self, verb: str, aid: str) -> Sequence[str]:
        states = {state.port: state for state in self.device.ports()}
        ports = ports_of(aid) if aid else list(states)
        if unknown := [port for port in ports if port not in states]:
            raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: no port {unknown[0]}")
        if verb == "RTRV-PORT-POWER":
            return [f'"{port}:{states[port].power_dbm:.1f}"' for port in ports]
        shutter = {PortStatus.ENABLED: "OPEN", PortStatus.DISABLED: "CLOSED", PortStatus.FAILED: "FAILED"}
        return [f'"{port}:{shutter[states[port].status]}"' for port in ports]

    async def _shut(self, is_open: bool, ports: Sequence[int], command: Tl1Command) -> Sequence[str]:
        if not {state.port for state in self.device.ports()}.issuperset(ports):
            raise Tl1Refusal("IIAC", "Input, Invalid Access Identifier: no such port")
        await self.device.enable(ports, is_open, command.text)
        return []


class GlimmerglassTl1Device(Tl1Device):
    """The commands of a Glimmerglass switch. Port numbers have five digits. The first digit is 1 for inputs and 2 for
    outputs."""

    name = "GGN"
    reports_at_first = True

    @classmethod
    def facts(cls, panel: DevicePanel) -> SwitchFacts:
        return panel.mirrored_facts("Glimmerglass", "System-300", "G300-117", "3.4.1")

    @property
    def _label(self) -> str:
        return '\\"to rack 3; unit 5, left\\"' if self.semicolons else ""

    async def answer(self, command: Tl1Command) -> Sequence[str]:
        facts, verb, aid = self.device.facts, command.verb, command.aid.lower()
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
            states = self.device.ports()
            return [self._port(side, state) for side in (10000, 20000) for state in states]
        if verb == "RTRV-PORT-POWER":
            states = self.device.ports()
            return [
                f'"GGN:PORTID={side + state.port},PORTNAME={self._label},PORTPOWER={state.power_dbm:.3f}"'
                for side in (10000, 20000)
                for state in states
            ]
        if verb == "RTRV-CRS-FIBER":
            return self._connections(aid)
        if verb == "ENT-CRS-FIBER":
            ingress, _, egress = aid.partition(",")
            pairs = self.pairs(_side(ingress, 10000), _side(egress, 20000))
            await self.set(Action.ADD, pairs, command)
            return []
        if verb == "DLT-CRS-FIBER":
            inputs, _, _ = aid.partition(",")
            ports = list(facts.ingress_ports) if inputs == "all" else _side(inputs, 10000)
            await self.set(Action.REMOVE, self.held_by(ports), command)
            return []
        raise Tl1Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: SwitchEvent) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT and event.port is not None:
            return "**", "REPT ALM PORT", f'"GGN:PORTID={10000 + event.port},PORTHEALTH={event.text.split()[-1]}"'
        pair = event.cross_connect
        assert pair is not None
        ends = f"IPORTID={10000 + pair.ingress_port},OPORTID={20000 + pair.egress_port}"
        return "A", "REPT EVT CRS", f'"GGN:{ends},CONNSTATE={event.text.split()[-1]}"'

    def _port(self, side: int, state: PortState) -> str:
        health = "bad" if state.status is PortStatus.FAILED else "good"
        direction = "input" if side == 10000 else "output"
        privilege = "0x0" if state.status is PortStatus.DISABLED else "0x1"
        return (
            f'"GGN:PORTID={side + state.port},PORTNAME={self._label},PORTDIR={direction},PORTHEALTH={health},'
            f'PORTCAT=nor,PORTPRIV={privilege}"'
        )

    def _connections(self, aid: str) -> Sequence[str]:
        """Return a line for every input, and for every output that is not connected. If `aid` lists ports, return only
        their lines."""
        ports = self.device.facts.ingress_ports
        names = {CircuitState.TUNED: "steady", CircuitState.FAILED: "fault", CircuitState.TUNING: "pending"}
        circuits = {circuit.cross_connect.ingress_port: circuit for circuit in self.device.circuits()}
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
        raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: {text[:40]} is on the other side")
    return ports
