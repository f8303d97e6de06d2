"""Prices of a network by component, and of a GPU.

Prices of network components are those of table 4 (appendix G) of the OrchestrRL paper, arXiv 2601.01209, by link rate:
indicative, from market listings, no vendor's quotes. Each fabric counts its own components
(`SimulatedFabric.inventory`). A network's cost here holds all NICs and every component between them. Not in it: racks,
cabling work, power, spares.
"""

from collections.abc import Mapping
from dataclasses import asdict

from orchestrrl.lab.sim.net.fabrics.base import Inventory

# US dollars a piece, by the field of an Inventory. An OCS port or a port of a patch panel costs the same at any rate.
PRICES_USD: Mapping[int, Mapping[str, float]] = {
    100: {"transceivers": 249, "nics": 736, "electrical_ports": 215, "fibers": 25},
    200: {"transceivers": 499, "nics": 1291, "electrical_ports": 876, "fibers": 45},
    400: {"transceivers": 799, "nics": 1710, "electrical_ports": 1392, "fibers": 65},
    800: {"transceivers": 1599, "nics": 2347, "electrical_ports": 1731, "fibers": 92},
}
OCS_PORT_USD = 350.0
PATCH_PANEL_PORT_USD = 100.0

# Of a GPU, for reference beside a network's price. An H100, which differs from the H800 in its links: the middle of
# 25,000 to 30,000 as Raymond James estimated (August 2023, https://www.techspot.com/news/99839). By the ratio of
# RollArt's table 2 an H20, at 12,000 to 13,000 (SemiAnalysis, July 2024), would make an H800 35,600: the figure is good
# to a third, no more.
H800_USD = 27_500.0


def network_cost_usd(inventory: Inventory, nic_gbps: float) -> dict[str, float]:
    """By the field of the inventory; those that there are none of are left out. Raises ValueError for a link rate that
    no prices are known of."""
    if nic_gbps not in PRICES_USD:
        rates = ", ".join(str(rate) for rate in PRICES_USD)
        raise ValueError(f"nic_gbps must be one of {rates}, whose prices are known, got {nic_gbps:g}")
    prices = {**PRICES_USD[int(nic_gbps)], "ocs_ports": OCS_PORT_USD, "patch_panel_ports": PATCH_PANEL_PORT_USD}
    return {part: count * prices[part] for part, count in asdict(inventory).items() if count}
