"""Implement the devices of the emulated gNMI servers. Each device provides a tree for Get, rows for Subscribe, and
transactions for Set.

One device has the tables of SONiC-OCS, with the configuration in CONFIG_DB and its effect in STATE_DB. The other has
the model proposed to OpenConfig.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from pygnmi.spec.v080 import gnmi_pb2

from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_data import Elem, Path, path, shown
from ocs_drivers.gnmi_openconfig import CONNECTIONS, MODEL, ROOT, OpenConfigTopology
from ocs_drivers.gnmi_sonic import CONFIG, CROSS_CONNECTS, HOST, METADATA, PORTS, STATE, SonicPorts
from ocs_drivers.model import Action, CircuitState, CrossConnect, PortStatus, SwitchFacts

Row = dict[str, Any]
Operation = gnmi_pb2.UpdateResult.Operation


@dataclass(frozen=True, slots=True)
class GnmiChange:
    op: int  # an Operation
    path: Path
    value: Any = None


class GnmiRefusal(Exception):
    """Raised to end a gNMI call with a status code and a message."""

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(text)
        self.code = code


class GnmiTarget(ABC):
    """An emulated device whose circuits are configured in one subtree and reported in another subtree."""

    models: dict[str, str]  # versions by name
    origins: frozenset[str]  # accepted origins of paths
    keeps_leftovers = False  # circuits that the hardware refused stay in the configuration
    refused_as = grpc.StatusCode.ABORTED  # status for refusals by the hardware

    def __init__(self, facts: SwitchFacts, panel: DevicePanel, clock: DeviceClock | None) -> None:
        self.device = EmulatedDevice(facts, panel, clock)
        self.ordered: set[CrossConnect] = set()
        self._session = self.device.session()

    @abstractmethod
    def tree(self) -> dict[str, Any]: ...

    @abstractmethod
    def entries(self) -> Iterator[tuple[Path, Row]]:
        """Yield every table row or list entry, with its path."""

    def rows(self, below: Path) -> dict[Path, Row]:
        """Return the rows at or below the path `below`. A subscription to this path receives them."""
        return {elems: row for elems, row in self.entries() if elems[: len(below)] == below}

    @abstractmethod
    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        """Carry out the changes of one SetRequest in the given order. All changes are validated before the first is
        carried out."""

    def notice_restart(self) -> None:
        if not self.device.is_alive(self._session):
            self._session = self.device.session()
            self.ordered = self.device.present

    async def carry_out(
        self, changes: Sequence[GnmiChange], wanted: set[CrossConnect], gone: set[CrossConnect], new: set[CrossConnect]
    ) -> None:
        """Apply the changes to the device: disconnect `gone`, then connect `new`. Afterwards, the configuration
        contains the circuits of `wanted` that the device has applied and, if `keeps_leftovers` is True, the refused
        circuits. Raises GnmiRefusal if the device refuses a circuit."""
        command = " ".join(f"{Operation.Name(change.op).lower()} {shown(change.path)}" for change in changes)
        is_broken = False
        try:
            if removed := sorted(gone & self.device.present - new):
                await self.device.set(Action.REMOVE, removed, command)
            if missing := sorted(new - self.device.present):
                await self.device.set(Action.ADD, missing, command)
        except ConnectionBroken:
            is_broken = True
            raise
        except DriverPermanent as error:
            raise GnmiRefusal(f"Failed to apply patch: {error.answer}", self.refused_as) from None
        finally:
            kept = new if self.keeps_leftovers and not is_broken else set()
            self.ordered = (wanted | (self.ordered if is_broken else set())) & self.device.present | kept


NAMES = {"design": ("", "state", "status"), "image": ("_TABLE", "config_status", "oper_status")}


class SonicTarget(GnmiTarget):
    """A SONiC-OCS device. `tables` selects the tables of SONiC's OCS design ("design") or of the image `ocs-kvm`
    ("image"). Like the image, the device removes from CONFIG_DB the circuits that the hardware refuses. If `leftovers`
    is True, they stay in CONFIG_DB and are reported as blocked."""

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
        ports = {self._sides.name(state.port): state.status for state in self.device.ports()}
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

    def entries(self) -> Iterator[tuple[Path, Row]]:
        for database, hosts in self.tree().items():
            for table, rows in hosts[HOST].items():
                yield from ((path(database, HOST, table, key), row) for key, row in rows.items())

    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        self.notice_restart()
        wanted, named, gone = set(self.ordered), set[CrossConnect](), set[CrossConnect]()
        for change in changes:
            names = [elem.name for elem in change.path]
            if names[:3] != [CONFIG, HOST, CROSS_CONNECTS] or len(names) != 4:
                raise GnmiRefusal(f"{shown(change.path)} cannot be set")
            pair = self._pair(names[3])
            if change.op == Operation.DELETE:
                wanted.discard(pair)
                gone.add(pair)
                continue
            if not isinstance(change.value, Mapping) or dict(change.value) != self._ends(pair):
                sides = "must have its sides as a_side and b_side"
                raise GnmiRefusal(f"{names[3]} {sides}")
            wanted.add(pair)
            named.add(pair)
        await self.carry_out(changes, wanted, gone - wanted, named)

    def _pair(self, key: str) -> CrossConnect:
        try:
            return self._sides.cross_connect(key)
        except ValueError as error:
            raise GnmiRefusal(str(error)) from None

    def _ends(self, pair: CrossConnect) -> dict[str, str]:
        return {"a_side": self._sides.name(pair.ingress_port), "b_side": self._sides.name(pair.egress_port)}

    def _shown(self) -> dict[str, dict[str, str]]:
        rows = {}
        for circuit in self.device.circuits():
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
        for circuit in self.device.circuits():
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


SLOT = "1"


class OpenConfigTarget(GnmiTarget):
    """A device with the OpenConfig model. `config` contains the configured circuits, and `state` shows a circuit's peer
    only when its mirrors are in place. If `mirrored` is True, a connection is listed under both of its ports."""

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
            for state in self.device.ports()
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

    def entries(self) -> Iterator[tuple[Path, Row]]:
        tree = self.tree()[ROOT]
        for container, name in (("port-connections", "port-connection"), ("port-statuses", "port-status")):
            for entry in tree[container][name]:
                keys = (("port", entry["port"]), ("slot", entry["slot"]))
                yield (*path(ROOT, container), Elem(name, keys)), entry

    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        self.notice_restart()
        listed = {port: pair for pair in self.ordered | self.device.present for port in self._ports_of(pair)}
        gone, new = set[CrossConnect](), dict[int, int]()
        for change in changes:
            port = self._port_of(change)
            if change.op != Operation.DELETE:
                new[port] = self._peer_of(change)
            elif port in listed:
                gone.add(listed[port])
        added = {self._topology.normal(*pair) for pair in new.items()}
        await self.carry_out(changes, (self.ordered - gone) | added, gone, added)

    def _connections(self) -> list[dict[str, Any]]:
        states = {circuit.cross_connect: circuit.state for circuit in self.device.circuits()}
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
        """Return the port whose connection a change sets. Raises GnmiRefusal unless the path of the change names one
        connection of an existing port."""
        if change.path[: len(CONNECTIONS)] != CONNECTIONS or len(change.path) == len(CONNECTIONS):
            raise GnmiRefusal(f"{shown(change.path)} cannot be set")
        keys = dict(change.path[len(CONNECTIONS)].keys)
        if keys.get("slot") != SLOT:
            raise GnmiRefusal(f"slot {keys.get('slot')} does not exist")
        return self._known_port(keys.get("port", ""))

    def _peer_of(self, change: GnmiChange) -> int:
        """Return the peer port in a change that updates a connection or its `config`. Raises GnmiRefusal if the peer
        port is missing or does not exist."""
        value = change.value
        if len(change.path) == len(CONNECTIONS) + 1 and isinstance(value, dict):
            value = value.get("config")
        if not isinstance(value, dict) or "peer-port" not in value:
            raise GnmiRefusal("peer-port is missing")
        return self._known_port(str(value["peer-port"]))

    def _known_port(self, text: str) -> int:
        known = {*self._topology.ingress_ports, *self._topology.egress_ports}
        if not text.isdecimal() or int(text) not in known:
            raise GnmiRefusal(f"Requested port-number {text} is not in a valid range.")
        return int(text)
