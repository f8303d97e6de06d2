"""Tests of building fabrics by name, and of the reported faults."""

import pytest

from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build, options_of
from orchestrrl.lab.sim.net.model import Servers
from planner.fabric.generate import ImpossibleSite


def faults(kind: str, servers: Servers | None = None, **options: object) -> dict[str, object]:
    with pytest.raises(ImpossibleSite) as caught:
        build(kind, servers or Servers(8), **options)
    return {each.parameter: each.value for each in caught.value.faults}


def test_unknown_kind_lists_known_kinds() -> None:
    with pytest.raises(
        ImpossibleSite, match="kind: must be one of fat_tree, oversubscribed, rail_optimized, topoopt, mixnet, rfabric"
    ):
        build("torus", Servers(8))


def test_unknown_options_are_reported_with_the_known_options() -> None:
    with pytest.raises(ImpossibleSite, match="radix, servers_per_pod, servers_per_tor") as caught:
        build("fat_tree", Servers(8), radius=3, tears=2)
    assert [each.parameter for each in caught.value.faults] == ["radius", "tears"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_builds_without_options(kind: str) -> None:
    assert build(kind, Servers(8)).name == kind
    assert "servers" not in options_of(kind)


def test_invalid_options_are_reported_together() -> None:
    assert faults("fat_tree", radix=1, servers_per_pod=0) == {"servers_per_pod": 0, "radix": 1}
    assert faults("fat_tree", radix=True) == {"radix": True}
    assert faults("fat_tree", radix=8) == {"radix": 8}
    assert faults("oversubscribed", ratio=0.5) == {"ratio": 0.5}
    assert faults("oversubscribed", ratio="3") == {"ratio": "3"}
    assert faults("rail_optimized", servers_per_pod=0, radix=0) == {"servers_per_pod": 0, "radix": 0}
    assert faults("topoopt", ring_nics=9) == {"ring_nics": 9}
    assert faults("topoopt", ring_nics=0) == {"ring_nics": 0}
    assert faults("mixnet", eps_nics=8) == {"eps_nics": 8}
    assert faults("mixnet", servers_per_region=97) == {"servers_per_region": 97}
    assert faults("mixnet", device="mirror", eps_nics=0) == {"eps_nics": 0, "device": "mirror"}
    assert faults("rfabric", servers_per_pod=0, allocation="none", device="x", train_servers=-1) == {
        "servers_per_pod": 0,
        "train_servers": -1,
        "device": "x",
        "allocation": "none",
    }
    assert faults("mixnet", eps_nics=0, radix=1) == {"eps_nics": 0, "radix": 1}
    assert faults("topoopt", demand="all", ring_nics=0) == {"ring_nics": 0, "demand": "all"}
    assert faults("rfabric", servers_per_tor="4") == {"servers_per_tor": "4"}
    for kind, most in (("fat_tree", 4), ("oversubscribed", 6), ("rail_optimized", 32), ("mixnet", 16)):
        assert build(kind, Servers(8), servers_per_tor=most).servers.count == 8
        assert faults(kind, servers_per_tor=most + 1) == {"servers_per_tor": most + 1}
        assert faults(kind, servers_per_tor=0) == {"servers_per_tor": 0}
    assert faults("topoopt", servers_per_tor=4) == {"servers_per_tor": 4}
    assert faults("rfabric", train_servers=9) == {"train_servers": 9}
