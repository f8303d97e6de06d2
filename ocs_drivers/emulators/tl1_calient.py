"""The TL1 commands of an emulated Calient switch. tl1.py implements the server."""

from collections.abc import Sequence

from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, calient_port
from ocs_drivers.emulators.tl1_devices import Tl1Command, Tl1Device, Tl1Refusal
from ocs_drivers.model import Action, CircuitState, CrossConnect, EventKind, PortStatus, SwitchEvent, SwitchFacts


class CalientTl1Device(Tl1Device):
    """The commands of a Calient switch: connections are provisioned by name, then activated."""

    name = "CALIENT01TS"
    reports_at_first = True
    reports_on, reports_off = "ALW-MSG", "INH-MSG"

    def __init__(self, device: EmulatedDevice, semicolons: bool) -> None:
        super().__init__(device, semicolons)
        self._groups: dict[CrossConnect, str] = {}  # provisioned connections, active or not
        self._held: dict[tuple[str, int], CrossConnect] = {}  # by either port
        self._ports = {calient_port(port): port for port in device.facts.ingress_ports}
        self._session = device.session()
        self._alias = '\\"row B; rack 3, unit 5\\"' if semicolons else "NONE"

    @classmethod
    def facts(cls, panel: DevicePanel) -> SwitchFacts:
        return panel.mirrored_facts("Calient", "S320", "C00002227", "6.0-3")

    async def answer(self, command: Tl1Command) -> Sequence[str]:
        self._forget_after_restart()
        self._take_over()
        facts, verb = self.device.facts, command.verb
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
        raise Tl1Refusal("ICNV", "Input, Command Not Valid")

    def report(self, event: SwitchEvent) -> tuple[str, str, str]:
        if event.kind is EventKind.PORT and event.port is not None:
            return "*C", "REPT ALM PORT", f'"{calient_port(event.port)}:CR,{event.text.upper()},NSA"'
        assert event.cross_connect is not None
        return "A", "REPT DBCHG CRS", f'"{_name(event.cross_connect)}:{event.text}"'

    def _forget_after_restart(self) -> None:
        """Delete the provisioned connections whose circuits the device has lost in a restart."""
        if not self.device.is_alive(self._session):
            self._session = self.device.session()
            for pair in self._groups.keys() - self.device.present:
                self._forget(pair)

    def _take_over(self) -> None:
        """Add provisioned connections for circuits that exist on the device but were not made by TL1 commands."""
        for pair in sorted(self.device.present - self._groups.keys()):
            for held in {self._held[end] for end in self.device.facts.ends(pair) if end in self._held}:
                self._forget(held)
            self._provide(pair, "OPERATOR")

    def _provide(self, pair: CrossConnect, group: str) -> None:
        self._groups[pair] = group
        self._held |= dict.fromkeys(self.device.facts.ends(pair), pair)

    def _forget(self, pair: CrossConnect) -> None:
        del self._groups[pair]
        for end in self.device.facts.ends(pair):
            del self._held[end]

    def _lit(self) -> dict[CrossConnect, CircuitState]:
        return {circuit.cross_connect: circuit.state for circuit in self.device.circuits()}

    def _port(self, name: str) -> int:
        if name not in self._ports:
            raise Tl1Refusal("IIAC", f"Input, Invalid Access Identifier: no port {name}")
        return self._ports[name]

    def _provision(self, command: Tl1Command) -> Sequence[str]:
        source, _, destination = command.aid.partition(",")
        pair = CrossConnect(self._port(source), self._port(destination))
        if command.block(1).upper() != "1WAY":
            raise Tl1Refusal("IDNV", "Input, Data Not Valid: this emulator supports 1WAY only")
        for end in self.device.facts.ends(pair):
            if end in self._held:
                raise Tl1Refusal("SROF", f"Invalid Connection: port already in connection {_name(self._held[end])}")
        self._provide(pair, command.block(0))
        return []

    def _named(self, command: Tl1Command) -> CrossConnect:
        """Return the connection that a command names. Clients send the name as the first parameter of ACT-CRS, and as
        the first or third parameter of other commands. Raises Tl1Refusal if there is no connection of that name."""
        for index in (0, 2):
            source, arrow, destination = command.block(index).partition(">")
            if arrow and source in self._ports and destination in self._ports:
                pair = CrossConnect(self._ports[source], self._ports[destination])
                if pair in self._groups:
                    return pair
        raise Tl1Refusal("IIAC", "Invalid Connection: no connection of that name")

    async def _change(self, verb: str, pair: CrossConnect, command: Tl1Command) -> Sequence[str]:
        if verb == "ACT-CRS":
            await self.set(Action.ADD, [pair], command)
        elif verb == "CANC-CRS":
            await self.set(Action.REMOVE, [pair], command)
        elif pair in self.device.present:
            raise Tl1Refusal("SROF", f"Invalid Connection: {_name(pair)} is active")
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
        source, destination, name = calient_port(pair.ingress_port), calient_port(pair.egress_port), _name(pair)
        ends = f"SRCPORT={source},DSTPORT={destination},GRPNAME={self._groups[pair]}"
        return f'"{name}:{ends},CONNNAME={name},CONNTYPE=1WAY,{shown},PS=UPR,AL=CL"'

    def _summaries(self, ports: Sequence[int]) -> Sequence[str]:
        powers = {state.port: state.power_dbm for state in self.device.ports()}
        held = {port: pair for pair in self._groups for port in (pair.ingress_port, pair.egress_port)}
        lit, lines = self._lit(), []
        for port in ports:
            name = _name(held[port]) if port in held else "NONE"
            state = "ACT" if held.get(port) in lit else "NONE"
            measured = f"INPWR={powers[port]:.2f},OUTPWR={powers[port]:.2f}"
            more = f"CONNNAME1={name},CONNSTATE1={state},CONNNAME2=NONE,CONNSTATE2=NONE"
            lines.append(f'"{calient_port(port)}:ALIAS={self._alias},{measured},{more}"')
        return lines

    def _states(self, ports: Sequence[int]) -> Sequence[str]:
        status, lines = {state.port: state.status for state in self.device.ports()}, []
        for port in ports:
            administrative = "OOS-MA" if status[port] is PortStatus.DISABLED else "IS"
            works = "FAIL" if status[port] is PortStatus.FAILED else "OK"
            sides = (f"{side}AS={administrative},{side}OS=IS,{side}OC={works},{side}RS=NPR" for side in ("IN", "OUT"))
            lines.append(f'"{calient_port(port)}:WX,NONE,NONE:{",".join(sides)}"')
        return lines


def _name(pair: CrossConnect) -> str:
    return f"{calient_port(pair.ingress_port)}>{calient_port(pair.egress_port)}"
