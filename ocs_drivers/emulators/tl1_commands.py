"""TL1 commands as an emulated device takes them apart, and what the devices of all vendors have in common."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import Action, CrossConnect, SwitchEvent, SwitchFacts


class Tl1Refusal(Exception):
    """DENY, with a code of four letters and words."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Tl1Command:
    """`VERB:TID:AID:CTAG:GENERAL:BLOCK,BLOCK:...`, without its end."""

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
        """A parameter by position, of those after the general block."""
        values = _split(self.part(5), ",")
        return _plain(values[index].strip()) if index < len(values) else ""


def _split(text: str, mark: str) -> list[str]:
    """At marks outside of quotes."""
    return re.split(rf'{mark}(?=(?:[^"\\]|\\.|"(?:[^"\\]|\\.)*")*$)', text)


def _plain(value: str) -> str:
    return value[1:-1].replace('\\"', '"').replace("\\\\", "\\") if value[:1] == '"' else value


def ports_of(text: str) -> list[int]:
    """`1&2&3` and `1&&4`, also mixed."""
    ports: list[int] = []
    for run in re.split(r"(?<!&)&(?!&)", text):
        first, _, last = run.partition("&&")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: {text[:40]}")
        ports += range(int(first), int(last or first) + 1)
    return ports


class Tl1Device(ABC):
    """A vendor's commands, in front of a device. `semicolons`: labels hold `;` and quotes."""

    name: ClassVar[str]  # before the date in every reply
    reports_at_first: ClassVar[bool]
    reports_on = reports_off = ""  # the verbs that switch reports on and off, where there are any

    def __init__(self, device: EmulatedDevice, panel: DevicePanel, semicolons: bool) -> None:
        self.device = device
        self.panel = panel
        self.semicolons = semicolons

    @classmethod
    @abstractmethod
    def facts(cls, panel: DevicePanel) -> SwitchFacts: ...

    @abstractmethod
    async def answer(self, command: Tl1Command) -> Sequence[str]:
        """Return the lines of the reply. Raises Tl1Refusal."""

    @abstractmethod
    def report(self, event: SwitchEvent) -> tuple[str, str, str]:
        """Return severity, verb and line of the report of an event on a port or a circuit. There is none on a restart,
        which ends every session."""

    async def set(self, action: Action, pairs: Sequence[CrossConnect], command: Tl1Command) -> None:
        """Hand a change to the device, and turn what it says against it into a refusal."""
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
        """What is connected to these ingress ports, in the order of the list."""
        present = {
            circuit.cross_connect.ingress_port: circuit.cross_connect for circuit in self.device.model.circuits()
        }
        return [present[port] for port in ingress if port in present]
