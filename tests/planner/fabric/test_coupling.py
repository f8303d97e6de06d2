"""The check that names PoDs which cannot carry their core circuits."""

from fabric_sites import small_site

from planner.fabric.materialize import check_coupling
from planner.fabric.model import EndpointId, PortPair, port_pair
from planner.fabric.topology import Lane, Site

SITE = small_site(train_pods=1, gen_pods=1)


def lanes(pod: str) -> list[Lane]:
    return [lane for lane in SITE.lanes if SITE.pod_of[lane.uplink] == pod]


def joined(one: Lane, other: Lane) -> PortPair:
    assert one.core == other.core
    return port_pair(one.core, one.core_port, other.core_port)


def lifted(site: Site, lane: Lane, number: int) -> PortPair:
    """Lift a lane to the first port of a ToR."""
    tor = site.tors_of[site.pod_of[lane.uplink]][number].id
    return port_pair(lane.agg, lane.agg_port, site.switch[lane.agg].ports[tor][0])


def test_both_pods_must_lift_the_same_lanes() -> None:
    train, gen = lanes("train0"), lanes("gen0")
    core = {joined(train[0], gen[0]), joined(train[1], gen[1])}
    everything = {lifted(SITE, lane, number) for of_pod in (train, gen) for number, lane in enumerate(of_pod[:2])}
    assert check_coupling(SITE, core | everything) == ()
    assert check_coupling(SITE, core | everything - {lifted(SITE, gen[1], 1)}) == (
        "gen0: 2 core circuits end there, but only 1 are lifted to a ToR",
    )
    elsewhere = lifted(SITE, gen[2], 1)  # as many lifts, but of a lane that the core does not use
    assert len(check_coupling(SITE, (core | everything | {elsewhere}) - {lifted(SITE, gen[1], 1)})) == 1
    assert len(check_coupling(SITE, core)) == 2


def test_lane_connected_to_lane_is_not_lifted() -> None:
    train, gen = lanes("train0"), lanes("gen0")
    core = joined(train[0], gen[0])
    looped = port_pair(gen[0].agg, gen[0].agg_port, gen[1].agg_port)
    assert check_coupling(SITE, {core, lifted(SITE, train[0], 0), looped}) == (
        "gen0: 1 core circuits end there, but only 0 are lifted to a ToR",
    )


def test_lifts_without_core_circuits_are_valid() -> None:
    assert check_coupling(SITE, {lifted(SITE, lanes("gen0")[0], 0)}) == ()
    assert SITE.pod_of[lanes("gen0")[0].uplink] == EndpointId("gen0")
