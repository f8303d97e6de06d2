"""What an emulated Polatis says of itself in YANG, whatever carries it. Pure."""

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.model import Connectivity, SwitchFacts


def polatis_facts(panel: DevicePanel, any_to_any: bool) -> SwitchFacts:
    ingress = range(1, panel.ingress_ports + 1)
    egress = ingress if any_to_any else range(ingress[-1] + 1, ingress[-1] + 1 + panel.egress_ports)
    size = f"{panel.ingress_ports}xCC" if any_to_any else f"{panel.ingress_ports}x{panel.egress_ports}"
    return SwitchFacts(
        vendor="Polatis",
        model=f"I-OST-{size}-LU1-DMHNS",
        serial="002414",
        software="6.5.2.18",
        connectivity=Connectivity.ANY_TO_ANY if any_to_any else Connectivity.INGRESS_EGRESS,
        ingress_ports=ingress,
        egress_ports=egress,
        reconfiguration_s=panel.reconfiguration_s,
        boot=panel.boot,
    )
