"""The tables of an emulated SONiC-OCS: what is ordered in CONFIG_DB, what the glass makes of it in STATE_DB.

`tables` "design" are those of SONiC's OCS design, "image" those of the image `ocs-kvm`. What the hardware does not take
disappears from CONFIG_DB, as the image cleans up invalid circuits; with `leftovers` it stays ordered, and blocked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.gnmi_target import GnmiChange, GnmiOp, GnmiRefusal, GnmiTarget, Row
from ocs_drivers.gnmi_data import Path, path, shown
from ocs_drivers.gnmi_sonic import CONFIG, CROSS_CONNECTS, HOST, METADATA, PORTS, STATE, SonicPorts
from ocs_drivers.model import CircuitState, CrossConnect, PortStatus

NAMES = {"design": ("", "state", "status"), "image": ("_TABLE", "config_status", "oper_status")}


class SonicTarget(GnmiTarget):
    refused_as = grpc.StatusCode.UNKNOWN

    def __init__(self, panel: DevicePanel, clock: Any, tables: str, origin: str, leftovers: bool) -> None:
        if tables not in NAMES:
            raise ValueError(f"tables must be one of {', '.join(NAMES)}, got {tables!r}")
        super().__init__(panel.facts("SONiC", "OCS-V", "", "0.1.0"), panel, clock)
        self.models = {origin: "0.1.0"}
        self.origins = frozenset({origin})
        self.keeps_leftovers = leftovers
        self._is_image = tables == "image"
        self._suffix, self._override, self._status = NAMES[tables]
        self._sides = SonicPorts(panel.ingress_ports, panel.egress_ports)

    def tree(self) -> dict[str, Any]:
        self.notice_restart()
        ports = {self._sides.name(state.port): state.status for state in self.device.model.ports()}
        blocked = {PortStatus.DISABLED: "force_blocked"}
        config = {
            METADATA: {HOST: {"hwsku": "OCS-V", "platform": "x86_64-ocs-kvm_x86_64-r0", "switch_type": "ocs"}},
            PORTS: {
                name: {"label": f"port{name}", self._override: blocked.get(status, "normal")}
                for name, status in ports.items()
            },
            CROSS_CONNECTS: {self._sides.key(pair): self._ends(pair) for pair in sorted(self.ordered)},
        }
        state = {CROSS_CONNECTS + self._suffix: self._shown(), PORTS + self._suffix: self._port_states(ports)}
        return {CONFIG: {HOST: config}, STATE: {HOST: state}}

    def rows(self, below: Path) -> dict[Path, Row]:
        """Rows of tables at or below a path."""
        found = {}
        for database, hosts in self.tree().items():
            for table, entries in hosts[HOST].items():
                for key, row in entries.items():
                    elems = path(database, HOST, table, key)
                    if elems[: len(below)] == below:
                        found[elems] = row
        return found

    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        self.notice_restart()
        wanted, named, gone = set(self.ordered), set[CrossConnect](), set[CrossConnect]()
        for change in changes:
            names = [elem.name for elem in change.path]
            if names[:3] != [CONFIG, HOST, CROSS_CONNECTS] or len(names) != 4:
                raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"{shown(change.path)} cannot be set")
            pair = self._pair(names[3])
            if change.op is GnmiOp.DELETE:
                wanted.discard(pair)
                gone.add(pair)
                continue
            if not isinstance(change.value, Mapping) or dict(change.value) != self._ends(pair):
                sides = "must have its sides as a_side and b_side"
                raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"{names[3]} {sides}")
            wanted.add(pair)
            named.add(pair)
        await self.carry_out(changes, wanted, gone - wanted, named)

    def _pair(self, key: str) -> CrossConnect:
        try:
            return self._sides.cross_connect(key)
        except ValueError as error:
            raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def _ends(self, pair: CrossConnect) -> dict[str, str]:
        return {"a_side": self._sides.name(pair.ingress_port), "b_side": self._sides.name(pair.egress_port)}

    def _shown(self) -> dict[str, dict[str, str]]:
        rows = {}
        for circuit in self.device.model.circuits():
            words = {CircuitState.TUNED: "tuned", CircuitState.TUNING: "tuning", CircuitState.FAILED: "failed"}
            image = {CircuitState.TUNED: "enabled", CircuitState.TUNING: "disabled", CircuitState.FAILED: "invalid"}
            word = words[circuit.state]
            rows[self._sides.key(circuit.cross_connect)] = (
                {"physical_path": "", "status": image[circuit.state], "insertion_loss_dB": "N/A"}
                if self._is_image
                else {**self._ends(circuit.cross_connect), "a_side_status": word, "b_side_status": word}
            )
        return rows

    def _port_states(self, ports: Mapping[str, PortStatus]) -> dict[str, dict[str, str]]:
        words = {CircuitState.TUNED: "connected" if self._is_image else "tuned", CircuitState.TUNING: "tuning"}
        of_circuits = {}
        for circuit in self.device.model.circuits():
            one, other = self._ends(circuit.cross_connect).values()
            of_circuits[one], of_circuits[other] = (circuit.state, other), (circuit.state, one)
        rows = {}
        for name, status in ports.items():
            state, target = of_circuits.get(name, (CircuitState.FAILED, ""))
            word = "failed" if status is PortStatus.FAILED else words.get(state, "blocked")
            if status is PortStatus.DISABLED:
                word = "blocked"
            rows[name] = {"target_simplex_port_id": target, self._status: word, "connector_type": "LC UPC"}
        return rows
