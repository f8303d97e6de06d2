"""What the optics of a network draw, where data sheets say so.

Transceivers are most of what fabrics differ in beside switches. No data sheet's figure is at hand for what a port of
the switches, the NICs and the OCSs of table 4 draws: those are named, not guessed. Fibres and panels draw nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from orchestrrl.lab.sim.net.fabrics.base import Inventory

# Watts at most, by link rate: 100GBASE-CWDM4 QSFP28 (data sheets give 3.5 W, e.g. lcfibercable.com/100g-qsfp28-cwdm4),
# NVIDIA MMS4X00-NS400 at 200 and 400 Gbps and the twin-port MMS4X00-NS at 800 (docs.nvidia.com/networking).
TRANSCEIVER_W: Mapping[int, float] = {100: 3.5, 200: 5.0, 400: 9.0, 800: 17.0}
PASSIVE = frozenset({"fibers", "patch_panel_ports"})


@dataclass(frozen=True, slots=True)
class Power:
    parts_w: Mapping[str, float]  # by the field of an Inventory
    unknown: tuple[str, ...]  # parts that there are some of, and that draw what nobody here knows

    @property
    def known_w(self) -> float:
        return sum(self.parts_w.values())


def network_power_w(inventory: Inventory, nic_gbps: float) -> Power:
    """Raises ValueError for a link rate that no data sheet is known of."""
    if nic_gbps not in TRANSCEIVER_W:
        rates = ", ".join(str(rate) for rate in TRANSCEIVER_W)
        raise ValueError(f"nic_gbps must be one of {rates}, whose data sheets are known, got {nic_gbps:g}")
    parts = {part: count for part, count in asdict(inventory).items() if count}
    return Power(
        {"transceivers": parts.get("transceivers", 0) * TRANSCEIVER_W[int(nic_gbps)]},
        tuple(part for part in parts if part != "transceivers" and part not in PASSIVE),
    )
