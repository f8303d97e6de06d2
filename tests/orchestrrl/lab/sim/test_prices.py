"""What networks cost: table 4 by hand, and beside the figures of section 7.2.3."""

import pytest

from orchestrrl.lab.sim.cost import H800_USD, network_cost_usd
from orchestrrl.lab.sim.net.fabrics.base import Inventory
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fabrics.rfabric import RFabric
from orchestrrl.lab.sim.net.model import Servers


def ratio(kind: str, gbps: float) -> float:
    """To a fat tree, at 2,048 GPUs."""
    costs = [
        sum(network_cost_usd(build(each, Servers(256, nic_gbps=gbps)).inventory(), gbps).values())
        for each in (kind, "fat_tree")
    ]
    return costs[0] / costs[1]


def test_each_part_at_its_price() -> None:
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


def test_what_there_is_none_of_is_left_out() -> None:
    assert dict(network_cost_usd(Inventory(nics=2), 100)) == {"nics": 1472}
    assert sum(network_cost_usd(Inventory(), 100).values()) == 0


def test_a_fat_tree_by_hand() -> None:
    """Of each GPU at 200 Gbps: a NIC, six transceivers, five ports, three fibres."""
    cost = network_cost_usd(build("fat_tree", Servers(256)).inventory(), 200)
    assert sum(cost.values()) == 2048 * (1291 + 6 * 499 + 5 * 876 + 3 * 45)


@pytest.mark.parametrize(
    ("kind", "paper", "within"),
    [("rail_optimized", 1.0, 0.01), ("oversubscribed", 0.54, 0.15), ("topoopt", 0.21, 0.15)],
)
@pytest.mark.parametrize("gbps", [200, 400])
def test_ratios_that_agree_with_the_paper(kind: str, paper: float, within: float, gbps: int) -> None:
    assert ratio(kind, gbps) == pytest.approx(paper, rel=within)


def test_rfabric_is_dearer_than_the_paper_has_it() -> None:
    """The paper: 0.51 to 0.52 of a fat tree. Ours has as many fibres above a ToR as below, a port of an OCS for each
    end of each fibre, and lanes to the core for half of them. At 200 Gbps that port is two fifths of a packet switch's,
    which is over 15 % more in all; at 400 a quarter."""
    assert ratio("rfabric", 400) == pytest.approx(0.52, rel=0.15)
    assert 0.52 * 1.15 < ratio("rfabric", 200) < 0.62


def simpler_usd(kind: str, gbps: int) -> float:
    """With one transceiver on the link between a NIC and its ToR, and no ports and fibres for lanes to the core."""
    fabric = build(kind, Servers(256, nic_gbps=gbps))
    lanes = len(fabric.site.lanes) if isinstance(fabric, RFabric) else 0
    found = fabric.inventory()
    alike = Inventory(transceivers=-2048, ocs_ports=-2 * lanes, fibers=-lanes)
    return sum(network_cost_usd(found + alike, gbps).values())


def test_what_the_paper_seems_to_count() -> None:
    """It does not say what a fabric has of each part. Simpler counts meet its figures 15 and 16: 0.54 of a fat tree for
    3 to 1, 0.51 to 0.52 for RFabric, and as many times the throughput per dollar as 1.53 (at 100 Gbps) to 2.06 (800)
    where throughput is the fat tree's. Our counts stay with what has to be bought."""
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
def test_a_fat_tree_beside_its_gpus(gbps: int, paper: float, within: float) -> None:
    """The paper names no price of a GPU; its two shares would go with 23,800 and 23,200 dollars, ours is 27,500."""
    cost = network_cost_usd(build("fat_tree", Servers(256, nic_gbps=gbps)).inventory(), gbps)
    assert sum(cost.values()) / (2048 * H800_USD) == pytest.approx(paper, rel=within)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 100, 200, 400, 800, whose prices are known, got 50"):
        network_cost_usd(Inventory(nics=1), 50)
