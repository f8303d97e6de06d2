"""Lookups of a site: where parts are, and where fibres end."""

import pytest

from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.model import EndpointId, OcsId
from planner.fabric.topology import (
    DEVICES,
    RESPONSES,
    Pod,
    PodRole,
    Reservation,
    Server,
    ServerId,
    Site,
    Switch,
    SwitchModel,
    Tier,
    Tor,
    Uplink,
)
from planner.model import GpuId

TRAIN, GEN = EndpointId("train0"), EndpointId("gen0")
LAB = SwitchModel("lab", 0.012, 16)


def small() -> Site:
    """Return two PoDs of a server each; the lanes of train0 end on two switches at either end."""

    def switch(name: str, tier: Tier, pod: EndpointId | None, **ports: tuple[int, ...]) -> Switch:
        return Switch(OcsId(name), tier, pod, LAB, {EndpointId(id.replace("_", "/")): own for id, own in ports.items()})

    return Site(
        link_gbps=200.0,
        nic_gbps=200.0,
        pods=(Pod(TRAIN, PodRole.TRAIN), Pod(GEN, PodRole.GEN)),
        tors=(
            Tor(EndpointId("train0/r0"), TRAIN, 0),
            Tor(EndpointId("train0/r1"), TRAIN, 1),
            Tor(EndpointId("gen0/r"), GEN),
        ),
        uplinks=(Uplink(EndpointId("train0/up"), TRAIN), Uplink(EndpointId("gen0/up"), GEN)),
        servers=(
            Server(
                ServerId("s0"),
                TRAIN,
                tuple(map(GpuId, (4, 5, 6, 7))),
                (EndpointId("train0/r0"), EndpointId("train0/r1")),
            ),
            Server(ServerId("s1"), GEN, (GpuId(0),), (EndpointId("gen0/r"), EndpointId("gen0/r"))),
        ),
        switches=(
            switch("b", Tier.AGG, TRAIN, train0_r0=(1,), train0_r1=(2,), train0_up=(9, 3)),
            switch("a", Tier.AGG, TRAIN, train0_r0=(4, 5), train0_up=(6,)),
            switch("c", Tier.AGG, GEN, gen0_r=(1, 2), gen0_up=(3, 4)),
            switch("core1", Tier.CORE, None, train0_up=(1,), gen0_up=(2,)),
            switch("core0", Tier.CORE, None, train0_up=(7, 8), gen0_up=(9,)),
        ),
        reservations=(Reservation(RESPONSES, OcsId("core1"), frozenset({1, 2})),),
    )


def test_gpus_share_their_servers_nics_evenly_in_order() -> None:
    site = small()
    assert [site.tor_of(GpuId(gpu)) for gpu in (4, 5, 6, 7)] == ["train0/r0", "train0/r0", "train0/r1", "train0/r1"]
    assert site.server_of[GpuId(0)].nic(GpuId(0)) == 0  # more NICs than GPUs


def test_uplink_ends_form_lanes_by_switch_in_listed_order() -> None:
    assert [(lane.agg, lane.agg_port, lane.core, lane.core_port) for lane in small().lanes] == [
        ("a", 6, "core0", 7),
        ("b", 9, "core0", 8),
        ("b", 3, "core1", 1),
        ("c", 3, "core0", 9),
        ("c", 4, "core1", 2),
    ]


def test_missing_far_end_is_an_error() -> None:
    site = small()
    short = Site(**{**vars(site), "switches": site.switches[:-1]})
    with pytest.raises(ValueError, match="zip"):
        _ = short.lanes


def test_parts_are_grouped_by_pod() -> None:
    site = small()
    assert [tor.id for tor in site.tors_of[TRAIN]] == ["train0/r0", "train0/r1"]
    assert [uplink.id for uplink in site.uplinks_of[GEN]] == ["gen0/up"]
    assert [server.id for server in site.servers_of[GEN]] == ["s1"]
    assert [switch.id for switch in site.agg_switches_of[TRAIN]] == ["b", "a"]
    assert [switch.id for switch in site.core_switches] == ["core1", "core0"]


def test_cabling_of_pod_and_core() -> None:
    site = small()
    inside = site.cabling
    assert inside.endpoint(OcsId("a"), 6) == "train0/up"
    assert inside.endpoint(OcsId("nowhere"), 1) is None
    core = {each.id: inside.ports[each.id] for each in site.core_switches}
    assert core == {
        "core0": {7: TRAIN, 8: TRAIN, 9: GEN},
        "core1": {1: TRAIN, 2: GEN},
    }
    assert site.reserved == {("core1", 1): RESPONSES, ("core1", 2): RESPONSES}


def test_devices_match_table_2() -> None:
    assert {name: (device.reconfiguration_s, device.ports) for name, device in DEVICES.items()} == {
        "rotornet_infocus": (1e-5, 128),
        "mems_3d_calient": (0.010, 320),
        "piezo_polatis": (0.025, 576),
        "liquid_crystal_coherent": (0.100, 512),
        "robotic_telescent": (120.0, 1008),
    }


@pytest.mark.parametrize(("reconfiguration_s", "ports"), [(0.0, 4), (float("nan"), 4), (float("inf"), 4), (0.1, 1)])
def test_invalid_device_is_rejected(reconfiguration_s: float, ports: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        SwitchModel("odd", reconfiguration_s, ports)


def test_lookups_of_large_site_scan_each_part_once() -> None:
    """The site has 16,384 GPUs; frequent lookups are cached."""
    site = regular_site(SiteShape(train_pods=24, gen_pods=40, servers_per_pod=32))
    assert len(site.server_of) == 16_384
    assert len(site.lanes) == 64 * 128
    assert site.lanes is site.lanes
    assert site.cabling is site.cabling
    assert site.tor_of(GpuId(16_383)) == "gen39/r7"
