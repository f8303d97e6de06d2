"""The tree of an emulated switch with the optical switch model proposed to OpenConfig.

`config` is what was ordered, `state` follows the mirrors. `mirrored`: a connection is listed under both of its ports.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.gnmi_target import GnmiChange, GnmiOp, GnmiRefusal, GnmiTarget, Row
from ocs_drivers.gnmi_data import Elem, Path, path, shown
from ocs_drivers.gnmi_openconfig import CONNECTIONS, MODEL, ROOT, OpenConfigTopology
from ocs_drivers.model import CircuitState, CrossConnect

SLOT = "1"


class OpenConfigTarget(GnmiTarget):
    origins = frozenset({"", "openconfig"})

    def __init__(self, panel: DevicePanel, clock: Any, any_to_any: bool, mirrored: bool, first_index: int) -> None:
        if first_index < 0:
            raise ValueError(f"first_index must be >= 0, got {first_index}")
        known = panel.facts("OrchestrRL", "openconfig-ocs", "oc-1", "1.0", any_to_any=any_to_any, first=first_index)
        super().__init__(known, panel, clock)
        self.models = {MODEL: "0.1.0"}
        self._topology = OpenConfigTopology(SLOT, known.connectivity, known.ingress_ports, known.egress_ports)
        self._mirrored = mirrored

    def tree(self) -> dict[str, Any]:
        self.notice_restart()
        known = self.device.facts
        statuses = [
            {"slot": SLOT, "port": str(state.port), "state": {"port-status": state.status.name}}
            for state in self.device.model.ports()
        ]
        topology = {
            "port-connectivity": known.connectivity.name,
            "total-port-count": known.ports,
            "total-optical-module-count": 1,
            "ingress-port-count": len(known.ingress_ports),
            "egress-port-count": len(known.egress_ports),
            "ingress-start-index": known.ingress_ports[0],
            "egress-start-index": known.egress_ports[0],
            "inter-module-connection-support": False,
        }
        chassis = {"type": "openconfig-platform-types:CHASSIS", "mfg-name": known.vendor, "part-no": known.model}
        chassis |= {"serial-no": known.serial, "software-version": known.software}
        return {
            ROOT: {
                "optical-switch-topology": {"state": topology},
                "port-connections": {"port-connection": self._connections()},
                "port-statuses": {"port-status": statuses},
            },
            "components": {"component": [{"name": "chassis", "state": {"name": "chassis", **chassis}}]},
        }

    def rows(self, below: Path) -> dict[Path, Row]:
        """Entries of lists at or below a path."""
        found = {}
        for container, name in (("port-connections", "port-connection"), ("port-statuses", "port-status")):
            for entry in self.tree()[ROOT][container][name]:
                keys = (("port", entry["port"]), ("slot", entry["slot"]))
                elems = (*path(ROOT, container), Elem(name, keys))
                if elems[: len(below)] == below:
                    found[elems] = entry
        return found

    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        self.notice_restart()
        listed = {port: pair for pair in self.ordered | self.device.model.present for port in self._ports_of(pair)}
        gone, new = set[CrossConnect](), dict[int, int]()
        for change in changes:
            port = self._port_of(change)
            if change.op is not GnmiOp.DELETE:
                new[port] = self._peer_of(change)
            elif port in listed:
                gone.add(listed[port])
        added = {self._topology.normal(*pair) for pair in new.items()}
        await self.carry_out(changes, (self.ordered - gone) | added, gone, added)

    def _connections(self) -> list[dict[str, Any]]:
        states = {circuit.cross_connect: circuit.state for circuit in self.device.model.circuits()}
        found = []
        for pair in sorted({*states, *self.ordered}):
            for port in self._ports_of(pair):
                peer = pair.egress_port if port == pair.ingress_port else pair.ingress_port
                ends = {"slot": SLOT, "port": str(port), "peer-slot": SLOT, "peer-port": str(peer)}
                entry: dict[str, Any] = {"slot": SLOT, "port": str(port), "state": {"slot": SLOT, "port": str(port)}}
                if pair in self.ordered:
                    entry["config"] = ends
                if states.get(pair) is CircuitState.TUNED:
                    entry["state"] = ends
                found.append(entry)
        return found

    def _ports_of(self, pair: CrossConnect) -> tuple[int, ...]:
        return (pair.ingress_port, pair.egress_port) if self._mirrored else (pair.ingress_port,)

    def _port_of(self, change: GnmiChange) -> int:
        """The port whose connection is meant: connections are set one by one."""
        if change.path[: len(CONNECTIONS)] != CONNECTIONS or len(change.path) == len(CONNECTIONS):
            raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"{shown(change.path)} cannot be set")
        keys = dict(change.path[len(CONNECTIONS)].keys)
        if keys.get("slot") != SLOT:
            raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"there is no slot {keys.get('slot')}")
        return self._known_port(keys.get("port", ""))

    def _peer_of(self, change: GnmiChange) -> int:
        """Of the update of an entry, or of its `config`."""
        value = change.value
        if len(change.path) == len(CONNECTIONS) + 1 and isinstance(value, dict):
            value = value.get("config")
        if not isinstance(value, dict) or "peer-port" not in value:
            raise GnmiRefusal(grpc.StatusCode.INVALID_ARGUMENT, "peer-port is missing")
        return self._known_port(str(value["peer-port"]))

    def _known_port(self, text: str) -> int:
        known = {*self._topology.ingress_ports, *self._topology.egress_ports}
        if not text.isdecimal() or int(text) not in known:
            raise GnmiRefusal(
                grpc.StatusCode.INVALID_ARGUMENT, f"Requested port-number {text} is not in a valid range."
            )
        return int(text)
