"""Compute the price of a network from its components. The module also defines the price of a GPU.

Prices of network components are those of table 4 (appendix G) of the OrchestrRL paper, arXiv 2601.01209, by link rate.
They are indicative prices from market listings, not vendors' quotes. Each fabric counts its own components
(`SimulatedFabric.inventory`). A network's cost includes all NICs and every component between them. It excludes racks,
cabling work, power and spares.
"""

from collections.abc import Mapping
from dataclasses import asdict

from orchestrrl.lab.sim.net.fabrics.base import Inventory

# US dollars per piece, by the field of an Inventory. OCS ports and patch panel ports cost the same at any rate.
PRICES_USD: Mapping[int, Mapping[str, float]] = {
    100: {"transceivers": 249, "nics": 736, "electrical_ports": 215, "fibers": 25},
    200: {"transceivers": 499, "nics": 1291, "electrical_ports": 876, "fibers": 45},
    400: {"transceivers": 799, "nics": 1710, "electrical_ports": 1392, "fibers": 65},
    800: {"transceivers": 1599, "nics": 2347, "electrical_ports": 1731, "fibers": 92},
}
OCS_PORT_USD = 350.0
PATCH_PANEL_PORT_USD = 100.0

# Price of a GPU, for comparison with a network's price. It is that of an H100, which differs from the H800 in its
# links: the middle of 25,000 to 30,000 as Raymond James estimated (August 2023,
# https://www.techspot.com/news/99839). An H20 at 12,000 to 13,000 (SemiAnalysis, July 2024) and the ratio of RollArt's
# table 2 would give 35,600 for an H800, so that the figure is accurate to about a third.
H800_USD = 27_500.0


def network_cost_usd(inventory: Inventory, nic_gbps: float) -> dict[str, float]:
    """Return the cost of each type of component in US dollars. Raises ValueError if no prices are defined for the link
    rate `nic_gbps`."""
    if nic_gbps not in PRICES_USD:
        rates = ", ".join(str(rate) for rate in PRICES_USD)
        raise ValueError(f"nic_gbps must be one of {rates}, for which prices exist, got {nic_gbps:g}")
    prices = {**PRICES_USD[int(nic_gbps)], "ocs_ports": OCS_PORT_USD, "patch_panel_ports": PATCH_PANEL_PORT_USD}
    return {part: count * prices[part] for part, count in asdict(inventory).items() if count}
