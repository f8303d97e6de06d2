"""What an emulated Polatis says of itself in YANG, whatever carries it: containers as plain data, without modules."""

from collections.abc import Iterable
from typing import Any

from ocs_drivers import polatis_yang as yang
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.model import BootBehaviour, CrossConnect, PortState, PortStatus, SwitchFacts

STATUS = {PortStatus.ENABLED: "ENABLED", PortStatus.DISABLED: "DISABLED", PortStatus.FAILED: "FAILED"}
STARTUP = {BootBehaviour.DARK: "MODE_VOLATILE", BootBehaviour.RESTORE: "MODE_PRESERVE"}


def polatis_facts(panel: DevicePanel, any_to_any: bool) -> SwitchFacts:
    size = f"{panel.ingress_ports}xCC" if any_to_any else f"{panel.ingress_ports}x{panel.egress_ports}"
    return panel.facts("Polatis", f"I-OST-{size}-LU1-DMHNS", "002414", "6.5.2.18", any_to_any=any_to_any)


def state_containers(device: EmulatedDevice, revision: str, *, has_monitors: bool) -> dict[str, Any]:
    """Return the containers of module `optical-switch` at this revision, but for the cross-connects."""
    facts, ports, is_new = device.facts, device.model.ports(), yang.has_port_config(revision)
    product = {"manufacturer": facts.vendor, "serial-number": facts.serial, "model-name": facts.model}
    found: dict[str, Any] = {"product-information": {**product, "software-version": facts.software}}
    if is_new:
        found["port-config"] = {"port": [{"port-id": port.port, "status": STATUS[port.status]} for port in ports]}
        if has_monitors:
            found["opm-power"] = {"port": [{"port-id": port.port, "power": _power(port)} for port in ports]}
    else:
        opm = [{"opm": {"power": _power(port)}} if has_monitors else {} for port in ports]
        statuses = [{"port-id": port.port, "port-status": f"PO_{STATUS[port.status]}"} for port in ports]
        found["ports"] = {"port": [status | more for status, more in zip(statuses, opm, strict=True)]}
    return found


def cross_connects_container(pairs: Iterable[CrossConnect], revision: str) -> dict[str, Any]:
    entries = [{"ingress": pair.ingress_port, "egress": pair.egress_port} for pair in sorted(pairs)]
    return {"cross-connects": {yang.pair_list(revision): entries}}


def _power(port: PortState) -> str:
    return f"{port.power_dbm:.2f}"
