"""Tests of network costs against table 4 by hand, and against the figures of section 7.2.3."""

import pytest

from orchestrrl.lab.sim.cost import H800_USD, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.base import Inventory
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fabrics.rfabric import RFabric
from orchestrrl.lab.sim.net.model import Servers


def ratio(kind: str, gbps: float) -> float:
    """Return the cost of a fabric relative to a fat tree, at 2,048 GPUs."""
    costs = [
        sum(network_cost_usd(build(each, Servers(256, nic_gbps=gbps)).inventory(), gbps).values())
        for each in (kind, "fat_tree")
    ]
    return costs[0] / costs[1]


def test_cost_is_count_times_price() -> None:
    one = Inventory(
        transceivers=1, nics=10, electrical_ports=100, ocs_ports=1000, patch_panel_ports=10_000, fibers=100_000
    )
    cost = network_cost_usd(one, 400.0)
    assert dict(cost) == {
        "transceivers": 799,
        "nics": 17_100,
        "electrical_ports": 139_200,
        "ocs_ports": 350_000,
        "patch_panel_ports": 1_000_000,
        "fibers": 6_500_000,
    }
    assert sum(cost.values()) == 799 + 17_100 + 139_200 + 350_000 + 1_000_000 + 6_500_000


def test_cost_omits_absent_components() -> None:
    assert dict(network_cost_usd(Inventory(nics=2), 100)) == {"nics": 1472}
    assert sum(network_cost_usd(Inventory(), 100).values()) == 0


def test_cost_of_a_fat_tree() -> None:
    """Each GPU at 200 Gbps has a NIC, six transceivers, five ports and three fibres."""
    cost = network_cost_usd(build("fat_tree", Servers(256)).inventory(), 200)
    assert sum(cost.values()) == 2048 * (1291 + 6 * 499 + 5 * 876 + 3 * 45)


@pytest.mark.parametrize(
    ("kind", "paper", "within"),
    [("rail_optimized", 1.0, 0.01), ("oversubscribed", 0.54, 0.15), ("topoopt", 0.21, 0.15)],
)
@pytest.mark.parametrize("gbps", [200, 400])
def test_cost_ratios_agree_with_the_paper(kind: str, paper: float, within: float, gbps: int) -> None:
    assert ratio(kind, gbps) == pytest.approx(paper, rel=within)


def test_rfabric_costs_more_than_in_the_paper() -> None:
    """The paper has 0.51 to 0.52 of a fat tree. Our RFabric has as many fibres above a ToR as below, an OCS port at
    each end of each fibre, and lanes to the core for half of them. At 200 Gbps an OCS port costs two fifths of a packet
    switch's port, which makes the total over 15 % more expensive; at 400 Gbps it costs a quarter."""
    assert ratio("rfabric", 400) == pytest.approx(0.52, rel=0.15)
    assert 0.52 * 1.15 < ratio("rfabric", 200) < 0.62


def simpler_usd(kind: str, gbps: int) -> float:
    """Return the cost with one transceiver per NIC link, and without ports and fibres for lanes to the core."""
    fabric = build(kind, Servers(256, nic_gbps=gbps))
    lanes = len(fabric.site.lanes) if isinstance(fabric, RFabric) else 0
    found = fabric.inventory()
    alike = Inventory(transceivers=-2048, ocs_ports=-2 * lanes, fibers=-lanes)
    return sum(network_cost_usd(found + alike, gbps).values())


def test_simpler_counts_match_the_papers_ratios() -> None:
    """The paper does not list the components of a fabric. Simpler counts match its figures 15 and 16: 0.54 of a fat
    tree for 3:1, 0.51 to 0.52 for RFabric, and 1.53 (at 100 Gbps) to 2.06 (at 800) times the throughput per dollar if
    the throughput is the fat tree's. Our counts include all components that must be bought."""
    share = {
        (kind, gbps): simpler_usd(kind, gbps) / simpler_usd("fat_tree", gbps)
        for kind in ("oversubscribed", "rfabric")
        for gbps in (100, 200, 400, 800)
    }
    for gbps in (200, 400):
        assert share["oversubscribed", gbps] == pytest.approx(0.54, rel=0.04)
        assert share["rfabric", gbps] == pytest.approx(0.515, rel=0.06)
    assert 1 / share["rfabric", 100] == pytest.approx(1.53, rel=0.03)
    assert 1 / share["rfabric", 800] == pytest.approx(2.06, rel=0.03)


@pytest.mark.parametrize(("gbps", "paper", "within"), [(200, 0.37, 0.15), (400, 0.59, 0.17)])
def test_cost_of_a_fat_tree_relative_to_gpus(gbps: int, paper: float, within: float) -> None:
    """The paper gives no price of a GPU. Its two ratios imply 23,800 and 23,200 dollars; ours is 27,500."""
    cost = network_cost_usd(build("fat_tree", Servers(256, nic_gbps=gbps)).inventory(), gbps)
    assert sum(cost.values()) / (2048 * H800_USD) == pytest.approx(paper, rel=within)


def test_link_rate_without_prices_is_rejected() -> None:
    with pytest.raises(ValueError, match="one of 100, 200, 400, 800, for which prices exist, got 50"):
        network_cost_usd(Inventory(nics=1), 50)
