"""What a Glimmerglass does with TL1 commands. The server is tl1.py."""

from collections.abc import Sequence

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.tl1_commands import Tl1Command, Tl1Device, Tl1Refusal, ports_of
from ocs_drivers.model import Action, CircuitState, EventKind, PortState, PortStatus, SwitchEvent, SwitchFacts


class GlimmerglassTl1Device(Tl1Device):
    """A Glimmerglass: numbers of five figures, the first of which tells the side."""

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
            states = self.device.model.ports()
            return [self._port(side, state) for side in (10000, 20000) for state in states]
        if verb == "RTRV-PORT-POWER":
            states = self.device.model.ports()
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
        """Every input, and every output that is not connected; or those on the ports that are asked for."""
        ports = self.device.facts.ingress_ports
        names = {CircuitState.TUNED: "steady", CircuitState.FAILED: "fault", CircuitState.TUNING: "pending"}
        circuits = {circuit.cross_connect.ingress_port: circuit for circuit in self.device.model.circuits()}
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
