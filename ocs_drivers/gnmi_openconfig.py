"""Read and change switches with the optical switch model proposed to OpenConfig (openconfig/public, pull request 1187).

`/optical-switch/optical-switch-topology/state` describes the device: `port-connectivity` (`INGRESS_EGRESS` or
`ANY_TO_ANY`), port counts and first indices. `/optical-switch/port-connections/port-connection[slot][port]` contains
the configured connection in `config/{peer-slot,peer-port}` and the connection in effect in `state`.
`/optical-switch/port-statuses/port-status` contains the states of ports. The driver treats one slot as one switch,
whose ports are the ports of one optical module, with the device's numbers.

The driver assumes that a connection is listed under its ingress port or, on an any-to-any device, under either port. It
assumes that `state` changes only when the mirrors have moved, as applied state does in OpenConfig. It also assumes that
the update of several entries in one SetRequest is one transaction, although the hardware may apply only a part of it.
The values of `port-status` are not specified. Ports with the values DISABLED and FAILED are treated as unusable, and
ports with other values as usable. If the device has several modules, the port counts are assumed to be per module. The
proposal was not merged, so devices may differ from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_data import Elem, Path, entries, mapping, member, path
from ocs_drivers.gnmi_session import GnmiWire
from ocs_drivers.model import (
    Action,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchFacts,
)

ROOT = "optical-switch"
TOPOLOGY = path(ROOT, "optical-switch-topology", "state")
CONNECTIONS = path(ROOT, "port-connections")
STATUSES = path(ROOT, "port-statuses")
COMPONENTS = path("components")
MODEL = "openconfig-optical-switch"

CONNECTIVITY = {kind.name: kind for kind in Connectivity}
STATUS = {"DISABLED": PortStatus.DISABLED, "FAILED": PortStatus.FAILED}


@dataclass(frozen=True, slots=True)
class OpenConfigTopology:
    """The ports of one slot and the pairs of ports that can be connected."""

    slot: str
    connectivity: Connectivity
    ingress_ports: range
    egress_ports: range

    def normal(self, port: int, peer: int) -> CrossConnect:
        """Return the cross-connect of `port` and `peer`, regardless of which of them lists the connection. The ingress
        port is first or, on an any-to-any device, the port with the smaller number."""
        is_turned = port > peer if self.connectivity is Connectivity.ANY_TO_ANY else port not in self.ingress_ports
        return CrossConnect(peer, port) if is_turned else CrossConnect(port, peer)


def topology(data: Any, slot: str) -> OpenConfigTopology:
    """Parse the container `optical-switch-topology/state` as the topology of one slot. Raises ValueError with the
    reason if the container is invalid or the device does not have the slot."""
    state = mapping(data)
    kind = str(state.get("port-connectivity", "")).rpartition(":")[2]
    if kind not in CONNECTIVITY:
        raise ValueError(f"port-connectivity must be one of {', '.join(CONNECTIVITY)}, got {kind!r}")
    modules = _number(state.get("total-optical-module-count", 1), "total-optical-module-count")
    if slot.isdecimal() and not 1 <= int(slot) <= modules:
        raise ValueError(
            f"the option `slot` must be within 1..{modules} (the optical modules of the device), got {slot!r}"
        )
    if CONNECTIVITY[kind] is Connectivity.ANY_TO_ANY:
        first = _number(state.get("ingress-start-index", 1), "ingress-start-index")
        ports = range(first, first + _number(state.get("total-port-count"), "total-port-count"))
        return OpenConfigTopology(slot, Connectivity.ANY_TO_ANY, ports, ports)
    ranges = []
    for side in ("ingress", "egress"):
        first, count = (_number(state.get(name), name) for name in (f"{side}-start-index", f"{side}-port-count"))
        ranges.append(range(first, first + count))
    return OpenConfigTopology(slot, Connectivity.INGRESS_EGRESS, *ranges)


def connection_path(topology: OpenConfigTopology, port: int) -> Path:
    """Return the path of the `port-connection` entry for a port. The path never denotes the whole list. Raises
    ValueError if the slot has no such port."""
    keys = (("port", str(_port(topology, port))), ("slot", topology.slot))
    return (*CONNECTIONS, Elem("port-connection", keys))


def circuits(topology: OpenConfigTopology, data: Any) -> dict[DeviceCircuit, set[int]]:
    """Return the circuits of the topology's slot, each with the ports under which it is listed. `data` is the container
    `port-connections`. A circuit that is configured but not applied yet is in state `tuning`."""
    ordered: dict[CrossConnect, set[int]] = {}
    applied: dict[CrossConnect, set[int]] = {}
    for entry in entries(member(data, "port-connection")):
        for name, found in (("config", ordered), ("state", applied)):
            told = {**{key: entry.get(key) for key in ("slot", "port")}, **mapping(entry.get(name))}
            if str(told["slot"]) == topology.slot and (peer := _peer(topology, told)) is not None:
                port = _port(topology, told["port"])
                found.setdefault(topology.normal(port, peer), set()).add(port)
    return {
        DeviceCircuit(pair, CircuitState.TUNED if pair in applied else CircuitState.TUNING): (
            ordered.get(pair, set()) | applied.get(pair, set())
        )
        for pair in sorted({*ordered, *applied})
    }


def port_states(topology: OpenConfigTopology, data: Any) -> list[PortState]:
    """Return the state of every port of the slot. `data` is the container `port-statuses`. A port without a reported
    status is considered enabled."""
    told = {}
    for entry in entries(member(data, "port-status")):
        state = {**entry, **mapping(entry.get("state"))}
        if str(state.get("slot")) == topology.slot:
            word = str(state.get("port-status", "")).rpartition(":")[2].upper()
            told[_port(topology, state.get("port"))] = STATUS.get(word, PortStatus.ENABLED)
    ports = sorted({*topology.ingress_ports, *topology.egress_ports})
    return [PortState(port, told.get(port, PortStatus.ENABLED)) for port in ports]


def _peer(topology: OpenConfigTopology, told: Mapping[str, Any]) -> int | None:
    if not told.get("peer-port"):
        return None
    if str(told.get("peer-slot") or topology.slot) != topology.slot:
        raise ValueError(f"peer-slot of port {told.get('port')} must be {topology.slot}, got {told.get('peer-slot')!r}")
    return _port(topology, told["peer-port"])


def _port(topology: OpenConfigTopology, value: Any) -> int:
    port = _number(value, "port")
    if port not in topology.ingress_ports and port not in topology.egress_ports:
        raise ValueError(f"port {port} does not exist in slot {topology.slot}")
    return port


def _number(value: Any, name: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise ValueError(f"{name} must be a number of 1 to 5 digits, got {text[:40]!r}")
    return int(text)


class OpenConfigWire(GnmiWire):
    """Implements the operations of `base.SwitchWire` for the model `openconfig`."""

    async def attach(self, models: Mapping[str, str]) -> None:
        self._software = models.get(MODEL, "")
        self._listed_under: dict[CrossConnect, set[int]] = {}  # from the last reading
        data = await self.tree(TOPOLOGY)
        if not data:
            raise DriverPermanent("the device has no optical-switch-topology: check the option `model`")
        self._topology = topology(data, self._options.slot)

    async def read_facts(self) -> SwitchFacts:
        known = self._topology
        chassis = await self._chassis()
        return SwitchFacts(
            vendor=str(chassis.get("mfg-name") or "OpenConfig"),
            model=str(chassis.get("part-no") or chassis.get("description") or MODEL),
            serial=str(chassis.get("serial-no") or ""),
            software=str(chassis.get("software-version") or self._software),
            connectivity=known.connectivity,
            ingress_ports=known.ingress_ports,
            egress_ports=known.egress_ports,
            reconfiguration_s=self._options.reconfiguration_s,
        )

    async def read_ports(self) -> Sequence[PortState]:
        return port_states(self._topology, await self.tree(STATUSES))

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        found = circuits(self._topology, await self.tree(CONNECTIONS))
        self._listed_under = {circuit.cross_connect: ports for circuit, ports in found.items()}
        return list(found)

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        if action is Action.REMOVE:
            ports = [port for pair in pairs for port in sorted(self._listed_under.get(pair, {pair.ingress_port}))]
            await self.transact(delete=[connection_path(self._topology, port) for port in ports])
            return
        update = []
        for pair in pairs:
            ends = {"port": str(pair.ingress_port), "peer-slot": self._options.slot, "peer-port": str(pair.egress_port)}
            where = (*connection_path(self._topology, pair.ingress_port), Elem("config"))
            update.append((where, {"slot": self._options.slot, **ends}))
        await self.transact(update=update)

    def watched(self) -> Sequence[Path]:
        return [CONNECTIONS, STATUSES]

    async def _chassis(self) -> Mapping[str, Any]:
        """Return the state of the device's chassis (model openconfig-platform). The result is empty if the device does
        not report it."""
        try:
            components = entries(member(await self.tree(COMPONENTS), "component"))
        except DriverPermanent:
            return {}
        states = [mapping(component.get("state")) for component in components]
        return next((state for state in states if str(state.get("type", "")).endswith("CHASSIS")), {})
