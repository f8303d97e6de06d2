"""Regular sites: fibres spread over all switches, the fewest switches with enough ports, a slice for responses."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.generate import ImpossibleSite, SiteShape, regular_site
from planner.fabric.survey import survey
from planner.fabric.topology import RESPONSES, PodRole, Site, Switch, SwitchModel, Tier

COUNTS = {
    "train_pods": st.integers(0, 4),
    "gen_pods": st.integers(0, 6),
    "servers_per_pod": st.integers(1, 9),
    "gpus_per_server": st.sampled_from([1, 4, 8]),
    "nics_per_server": st.sampled_from([1, 2, 4, 8]),
    "rails": st.sampled_from([None, None, None, None, None, 1, 1, 2, 3]),
    "servers_per_tor": st.none() | st.integers(1, 5),
    "tor_uplinks": st.none() | st.integers(1, 12),
    "uplinks_per_pod": st.integers(1, 3),
    "core_lanes": st.sampled_from([None, 5, 6, 12, 24, 36, 48]),
    "response_lanes": st.none() | st.integers(0, 3),
    "link_gbps": st.sampled_from([100.0, 200.0, 400.0]),
    "agg_device": st.builds(SwitchModel, st.just("agg"), st.just(0.01), st.integers(4, 160)),
    "core_device": st.builds(SwitchModel, st.just("core"), st.just(0.01), st.integers(4, 160)),
    "agg_switches": st.sampled_from([None, None, 1, 2, 4]),
    "core_switches": st.sampled_from([None, None, 1, 2, 4]),
}


@st.composite
def shapes(draw: st.DrawFn) -> SiteShape | ImpossibleSite:
    try:
        return SiteShape(**{name: draw(values) for name, values in COUNTS.items()})
    except ImpossibleSite as impossible:
        return impossible


def built(shape: SiteShape | ImpossibleSite) -> Site | ImpossibleSite:
    try:
        return shape if isinstance(shape, ImpossibleSite) else regular_site(shape)
    except ImpossibleSite as impossible:
        return impossible


def least_switches(endpoints: list[int], radix: int) -> int | None:
    """Return the fewest switches, by assigning every endpoint's fibres one by one."""
    for count in range(1, min(endpoints, default=0) + 1):
        used = Counter[int]()
        for fibres in endpoints:
            used.update(fibre % count for fibre in range(fibres))
        if max(used.values()) <= radix:
            return count
    return None


def tiers(site: Site) -> list[tuple[Tier, list[Switch], list[str]]]:
    """Yield each PoD's switches and the core's, with the endpoints that must be on all of them."""
    found = [
        (
            Tier.AGG,
            list(site.agg_switches_of[pod.id]),
            [*(tor.id for tor in site.tors_of[pod.id]), *(uplink.id for uplink in site.uplinks_of[pod.id])],
        )
        for pod in site.pods
    ]
    return [*found, (Tier.CORE, list(site.core_switches), [uplink.id for uplink in site.uplinks])]


@given(shapes())
def test_any_two_endpoints_share_every_switch_evenly(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(site, ImpossibleSite):
        return
    for _, switches, endpoints in tiers(site):
        for endpoint in endpoints:
            counts = [len(switch.ports[endpoint]) for switch in switches]
            assert min(counts) >= 1
            assert max(counts) - min(counts) <= 1
        for switch in switches:
            ports = [port for numbers in switch.ports.values() for port in numbers]
            assert sorted(ports) == list(range(1, len(ports) + 1))
            assert len(ports) <= switch.device.ports
            assert set(switch.ports) == set(endpoints)


@given(shapes())
def test_switch_count_is_minimal(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(site, ImpossibleSite) or isinstance(shape, ImpossibleSite):
        return
    for tier, switches, endpoints in tiers(site):
        wanted = shape.agg_switches if tier is Tier.AGG else shape.core_switches
        device = shape.agg_device if tier is Tier.AGG else shape.core_device
        fibres = [sum(len(switch.ports[endpoint]) for switch in switches) for endpoint in endpoints]
        if endpoints:
            assert len(switches) == (wanted or least_switches(fibres, device.ports))


@given(shapes())
def test_servers_are_rail_aligned(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(site, ImpossibleSite) or isinstance(shape, ImpossibleSite):
        return
    assert list(site.server_of) == list(range(shape.pods * shape.servers_per_pod * shape.gpus_per_server))
    for server in site.servers:
        rails = [site.tor[tor].rail for tor in server.tors]
        assert all(site.tor[tor].pod == server.pod for tor in server.tors)
        assert rails == list(range(len(server.tors))) or set(rails) == {None}
        assert len(set(server.tors)) == (shape.rails or shape.nics_per_server)
    nics = Counter(tor for server in site.servers for tor in server.tors)
    assert set(nics) == {tor.id for tor in site.tors}
    if shape.servers_per_tor:
        assert max(nics.values()) <= shape.servers_per_tor * shape.nics_per_rail


@given(shapes())
def test_response_lanes_are_paired_and_leave_others(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(site, ImpossibleSite) or isinstance(shape, ImpossibleSite):
        return
    role = {pod.id: pod.role for pod in site.pods}
    lanes = Counter(site.pod_of[lane.uplink] for lane in site.lanes)
    kept = Counter[str]()
    for each in site.reservations:
        assert each.purpose == RESPONSES
        pods = [site.cabling.ports[each.switch][port] for port in each.ports]
        assert Counter(role[pod] for pod in pods) == dict.fromkeys(PodRole, len(pods) // 2)
        kept.update(pods)
    assert all(kept[pod] < lanes[pod] for pod in kept)
    gen = {kept[pod.id] for pod in site.pods if pod.role is PodRole.GEN}
    assert len(gen) <= 1
    if shape.response_lanes is not None and shape.train_pods and shape.gen_pods:
        assert gen == {shape.response_lanes}
    train = [kept[pod.id] for pod in site.pods if pod.role is PodRole.TRAIN]
    assert not train or max(train) - min(train) <= 1


@given(shapes())
def test_impossible_shape_names_parameters_and_values(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(site, ImpossibleSite):
        assert site.faults
        for fault in site.faults:
            assert fault.parameter in COUNTS
            assert fault.message


@given(shapes())
def test_rejected_radix_is_insufficient(shape: SiteShape | ImpossibleSite) -> None:
    site = built(shape)
    if isinstance(shape, ImpossibleSite) or not isinstance(site, ImpossibleSite):
        return
    tors = [shape.tor_fibres] * (shape.blocks * shape.rail_count)
    uplinks = [shape.uplink_lanes] * shape.uplinks
    for fault in site.faults:
        if fault.parameter == "agg_device":
            assert least_switches(tors + uplinks, shape.agg_device.ports) is None
        if fault.parameter == "core_device":
            assert least_switches(uplinks * shape.pods, shape.core_device.ports) is None


def test_default_tors_are_not_oversubscribed_and_half_of_capacity_leaves_pod() -> None:
    found = survey(regular_site(SiteShape(train_pods=2, gen_pods=4, servers_per_pod=8)))
    assert {each.tor_ratio for each in found.pods} == {1.0}
    assert {each.uplink_ratio for each in found.pods} == {2.0}
    assert {(each.gpus, each.lanes) for each in found.pods} == {(64, 32)}
    assert [each.switch.id for each in found.switches if each.switch.tier is Tier.CORE] == ["core0"]
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("shape", "gpus"),
    [
        (SiteShape(train_pods=4, gen_pods=4, servers_per_pod=32), 2_048),
        (SiteShape(train_pods=24, gen_pods=40, servers_per_pod=32), 16_384),
        (SiteShape(train_pods=4, gen_pods=4, servers_per_pod=256), 16_384),
    ],
)
def test_large_sites(shape: SiteShape, gpus: int) -> None:
    site = regular_site(shape)
    assert len(site.server_of) == gpus
    assert survey(site).warnings == ()


def test_all_faults_of_a_shape_are_reported_at_once() -> None:
    with pytest.raises(ImpossibleSite) as raised:
        SiteShape(train_pods=-1, gen_pods=2, servers_per_pod=0, rails=0, link_gbps=float("nan"))
    assert {fault.parameter for fault in raised.value.faults} == {"train_pods", "servers_per_pod", "rails", "link_gbps"}


def test_too_small_switch_suggests_changes() -> None:
    tiny = SwitchModel("tiny", 0.01, 8)
    shape = SiteShape(train_pods=1, gen_pods=1, servers_per_pod=8, agg_device=tiny)
    with pytest.raises(ImpossibleSite, match=r"needs 12; take fewer servers_per_pod, more servers_per_tor"):
        regular_site(shape)
    assert regular_site(replace(shape, agg_device=SwitchModel("enough", 0.01, 16)))


def test_too_many_response_lanes_are_rejected() -> None:
    with pytest.raises(ImpossibleSite, match=r"lower it \(0 reserves none\) or raise core_lanes"):
        regular_site(SiteShape(train_pods=1, gen_pods=4, servers_per_pod=1, core_lanes=4, response_lanes=1))
