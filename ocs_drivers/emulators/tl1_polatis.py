"""What a Polatis does with TL1 commands. The server is tl1.py."""

import math
from collections.abc import Sequence

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.tl1_commands import Tl1Command, Tl1Device, Tl1Refusal, ports_of
from ocs_drivers.model import Action, BootBehaviour, CircuitState, EventKind, PortStatus, SwitchEvent, SwitchFacts


class PolatisTl1Device(Tl1Device):
    """A Polatis. While its mirrors move, other commands wait: RTRV-PATCH lists what is in place."""

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
            boot = BootBehaviour.RESTORE if self.panel.boot is BootBehaviour.RESTORE else BootBehaviour.DARK
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
        while math.isfinite(moving_s := self.device.model.moving_s()):
            await self.device.clock.sleep(moving_s)
        wanted = set(ports_of(aid)) if aid else None
        return [
            f'"{pair.ingress_port},{pair.egress_port}"'
            for circuit in self.device.model.circuits()
            if circuit.state is not CircuitState.TUNING
            for pair in [circuit.cross_connect]
            if wanted is None or wanted & pair.ports
        ]

    def _ports(self, verb: str, aid: str) -> Sequence[str]:
        states = {state.port: state for state in self.device.model.ports()}
        ports = ports_of(aid) if aid else list(states)
        if unknown := [port for port in ports if port not in states]:
            raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: no port {unknown[0]}")
        if verb == "RTRV-PORT-POWER":
            return [f'"{port}:{states[port].power_dbm:.1f}"' for port in ports]
        shutter = {PortStatus.ENABLED: "OPEN", PortStatus.DISABLED: "CLOSED", PortStatus.FAILED: "FAILED"}
        return [f'"{port}:{shutter[states[port].status]}"' for port in ports]

    async def _shut(self, is_open: bool, ports: Sequence[int], command: Tl1Command) -> Sequence[str]:
        if not {state.port for state in self.device.model.ports()}.issuperset(ports):
            raise Tl1Refusal("IIAC", "Input, Invalid Access Identifier: no such port")
        await self.device.enable(ports, is_open, command.text)
        return []
