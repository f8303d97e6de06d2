"""Provide the YANG data of an emulated Polatis switch for all of its protocols. Containers are plain data, without
module prefixes."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ocs_drivers import polatis_yang as yang
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.model import Action, BootBehaviour, CrossConnect, DeviceCircuit, PortState, SwitchFacts

STARTUP = {BootBehaviour.DARK: "MODE_VOLATILE", BootBehaviour.RESTORE: "MODE_PRESERVE"}


def polatis_facts(panel: DevicePanel, any_to_any: bool) -> SwitchFacts:
    size = f"{panel.ingress_ports}xCC" if any_to_any else f"{panel.ingress_ports}x{panel.egress_ports}"
    return panel.facts("Polatis", f"I-OST-{size}-LU1-DMHNS", "002414", "6.5.2.18", any_to_any=any_to_any)


def state_containers(device: EmulatedDevice, revision: str, *, has_monitors: bool) -> dict[str, Any]:
    """Return the containers of module `optical-switch` at this revision, by name, except `cross-connects`. If
    `has_monitors` is True, the containers include the optical power of each port."""
    facts, ports, is_new = device.facts, device.ports(), yang.has_port_config(revision)
    product = {"manufacturer": facts.vendor, "serial-number": facts.serial, "model-name": facts.model}
    found: dict[str, Any] = {"product-information": {**product, "software-version": facts.software}}
    if is_new:
        found["port-config"] = {"port": [{"port-id": port.port, "status": port.status.name} for port in ports]}
        if has_monitors:
            found["opm-power"] = {"port": [{"port-id": port.port, "power": _power(port)} for port in ports]}
    else:
        opm = [{"opm": {"power": _power(port)}} if has_monitors else {} for port in ports]
        statuses = [{"port-id": port.port, "port-status": f"PO_{port.status.name}"} for port in ports]
        found["ports"] = {"port": [status | more for status, more in zip(statuses, opm, strict=True)]}
    return found


class YangRefusal(Exception):
    """Raised when the switch refuses an operation. `tag` is the error-tag of RFC 6241 or RFC 8040."""

    def __init__(self, tag: str, message: str, path: str = "", kind: str = "application") -> None:
        super().__init__(message)
        self.tag = tag
        self.message = message
        self.path = path
        self.kind = kind


class PolatisStore:
    """The cross-connects of an emulated Polatis switch, keyed by ingress port, as its YANG model lists and edits
    them."""

    def __init__(self, device: EmulatedDevice, revision: str, *, lists_late: bool) -> None:
        self.device = device
        self.revision = revision
        self.list_name = yang.pair_list(revision)
        self._lists_late = lists_late

    def running(self) -> dict[int, int]:
        self.device.advance()
        return _by_ingress(self.device.circuits())

    def container(self, pairs: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return the container `cross-connects` with these pairs. If `pairs` is None, use the pairs that the switch
        lists now."""
        listed = _by_ingress(self.device.listed(late=self._lists_late)) if pairs is None else pairs
        entries = [{"ingress": ingress, "egress": egress} for ingress, egress in sorted(listed.items())]
        return {"cross-connects": {self.list_name: entries}}

    def edit(self, wanted: dict[int, int], operation: str, ingress: object, egress: object = None) -> None:
        """Apply one operation of RFC 6241 or RFC 8072 to the pairs `wanted`, in place. Raises YangRefusal if the
        operation or a port is invalid."""
        facts = self.device.facts
        port = self._port(ingress, "ingress", facts.ingress_ports)
        path = f"/cross-connects/{self.list_name}[ingress='{port}']"
        match operation:
            case "delete" if port not in wanted:
                raise YangRefusal("data-missing", "the data to delete does not exist", path)
            case "delete" | "remove":
                wanted.pop(port, None)
            case "create" if port in wanted:
                raise YangRefusal("data-exists", f"port {port} is connected", path)
            case "create" | "merge":
                pair = CrossConnect(port, self._port(egress, "egress", facts.egress_ports))
                for other in [*wanted.items()]:
                    if not set(facts.ends(pair)).isdisjoint(facts.ends(CrossConnect(*other))):
                        del wanted[other[0]]  # silently re-routed
                wanted[port] = pair.egress_port
            case "none":
                pass
            case _:
                raise YangRefusal("bad-attribute", f"unknown operation {operation}", path, kind="protocol")

    async def carry_out(self, before: Mapping[int, int], wanted: Mapping[int, int], command: str) -> None:
        """Change the device's pairs from `before` to `wanted`. Raises DriverPermanent if the device refuses a pair."""
        facts = self.device.facts
        new = [CrossConnect(*pair) for pair in wanted.items() if before.get(pair[0]) != pair[1]]
        taken = {end for pair in new for end in facts.ends(pair)}
        # Re-routed circuits disappear on their own: removing them explicitly would be a second command to the device.
        gone = [CrossConnect(*pair) for pair in before.items() if wanted.get(pair[0]) != pair[1]]
        gone = [pair for pair in gone if taken.isdisjoint(facts.ends(pair))]
        if gone:
            await self.device.set(Action.REMOVE, gone, command)
        if new:
            await self.device.set(Action.ADD, new, command)

    async def set_ports(self, asked: Mapping[str, Sequence[object]], command: str) -> None:
        """Carry out the RPC port-set-state. `asked` has the ports to enable in `port-enab` and the ports to disable in
        `port-disab`. Raises YangRefusal if a port does not exist."""
        facts = self.device.facts
        for leaf, is_enabled in (("port-enab", True), ("port-disab", False)):
            known = {*facts.ingress_ports, *facts.egress_ports}
            if ports := [self._port(port, leaf, known) for port in asked.get(leaf, ())]:
                await self.device.enable(ports, is_enabled, command)

    def _port(self, value: object, name: str, valid: Container[int]) -> int:
        try:
            port = yang.parse_port(value)
        except ValueError as error:
            raise YangRefusal("invalid-value", str(error), name) from None
        if port not in valid:
            raise YangRefusal("invalid-value", f"{name} port {port} does not exist", name)
        return port


def _by_ingress(circuits: Iterable[DeviceCircuit]) -> dict[int, int]:
    return {circuit.cross_connect.ingress_port: circuit.cross_connect.egress_port for circuit in circuits}


def _power(port: PortState) -> str:
    return f"{port.power_dbm:.2f}"
