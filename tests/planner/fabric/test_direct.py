"""Circuits by traffic between ToRs: against every assignment of ports and lanes, and in whole plans."""

from collections import Counter
from collections.abc import Iterator, Mapping

from fabric_sites import small_site
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, Pair, PortPair, pair_of, partners
from planner.fabric.plan import FabricPlan, FabricState
from planner.fabric.sizing import direct
from planner.fabric.topology import Site

MB = 1_000_000.0
PODS = {EndpointId(f"{pod}{number}"): EndpointId(pod) for pod in "pq" for number in range(2)}


def taken(circuits: Mapping[Pair, int]) -> Counter[EndpointId]:
    """Return the ToR ports and PoD lanes used."""
    used: Counter[EndpointId] = Counter()
    for pair, count in circuits.items():
        for tor in pair:
            used[tor] += count
            if PODS[pair[0]] != PODS[pair[1]]:
                used[PODS[tor]] += count
    return used


def fits(circuits: Mapping[Pair, int], room: Mapping[EndpointId, int]) -> bool:
    return all(count <= room[end] for end, count in taken(circuits).items())


def ways(pairs: list[Pair], room: Mapping[EndpointId, int], so_far: dict[Pair, int]) -> Iterator[dict[Pair, int]]:
    """Yield every assignment with a circuit for every pair."""
    if not pairs:
        yield dict(so_far)
        return
    for count in range(1, 5):
        so_far[pairs[0]] = count
        if fits(so_far, room):
            yield from ways(pairs[1:], room, so_far)
        del so_far[pairs[0]]


def slowest(demand: Mapping[Pair, float], circuits: Mapping[Pair, int]) -> float:
    return max((demand[pair] / count for pair, count in circuits.items()), default=0.0)


ALL_PAIRS = sorted({pair_of(one, other) for one in PODS for other in PODS if one != other})
DEMANDS = st.dictionaries(st.sampled_from(ALL_PAIRS), st.integers(1, 20).map(float), min_size=1, max_size=5)
ROOMS = st.fixed_dictionaries({end: st.integers(1, 4) for end in sorted({*PODS, *PODS.values()})})


@given(DEMANDS, ROOMS)
def test_direct_sizing_is_optimal_if_all_pairs_fit(demand: dict[Pair, float], room: dict[EndpointId, int]) -> None:
    circuits = direct(demand, PODS, room)
    assert fits(circuits, room)
    best = min((slowest(demand, each) for each in ways(sorted(demand), room, {})), default=None)
    if len(circuits) == len(demand):
        assert slowest(demand, circuits) == best
    one_each = fits(dict.fromkeys(demand, 1), room)
    assert (len(circuits) == len(demand)) == (best is not None) == one_each


@given(DEMANDS, ROOMS)
def test_sizing_by_volume_is_no_slower_than_even(demand: dict[Pair, float], room: dict[EndpointId, int]) -> None:
    """The measure is unserved bytes, then the slowest served pair."""
    by_volume, evenly = direct(demand, PODS, room), direct(dict.fromkeys(demand, 1.0), PODS, room)
    if len(by_volume) == len(demand):
        assert len(evenly) == len(demand)
        assert slowest(demand, by_volume) <= slowest(demand, evenly)


@given(DEMANDS, ROOMS)
def test_every_pair_with_room_is_served(demand: dict[Pair, float], room: dict[EndpointId, int]) -> None:
    circuits = direct(demand, PODS, room)
    left = Counter(room)
    left.subtract(taken(circuits))
    for pair in demand:  # nor one more circuit
        ends = [*pair, *(PODS[tor] for tor in pair if PODS[pair[0]] != PODS[pair[1]])]
        assert any(left[end] == 0 for end in ends)


def test_equal_pairs_are_served_round_robin() -> None:
    """Four ToRs in each PoD with one port each: all are served, each once."""
    pods = {EndpointId(f"{pod}{number}"): EndpointId(pod) for pod in "pq" for number in range(4)}
    demand = {pair_of(one, other): MB for one in pods for other in pods if pods[one] < pods[other]}
    assert len(direct(demand, pods, {**dict.fromkeys(pods, 1), EndpointId("p"): 4, EndpointId("q"): 4})) == 4


def joined(site: Site, cross_connects: frozenset[PortPair]) -> Counter[Pair]:
    """Return the circuits between ToRs, over their PoD's switches or over the core."""
    lane_at, joins, owner = site.lane_at, partners(cross_connects), site.owner
    found: Counter[Pair] = Counter()
    for each in cross_connects:
        ends = []
        for port in each.sides:
            lane = lane_at.get(port)
            end = port if lane is None else joins.get(lane.ends[0])
            ends.append(None if end is None else owner.get(end))
        tors = [end for end in ends if end is not None and end in site.tor]
        if len(set(tors)) == 2:
            found[pair_of(*tors)] += 1
    return found


def sent(site: Site, pairs: Mapping[Pair, float]) -> Intent:
    voice = {server.tors[server.nic(gpu)]: gpu for server in site.servers for gpu in server.gpus}
    return Intent(
        "period",
        Stage.TRAIN,
        tuple(
            Traffic(TrafficOperation.PP, Primitive.PIPELINE, ((int(voice[one]), int(voice[other])),), size)
            for (one, other), size in sorted(pairs.items())
        ),
    )


def planned(site: Site, pairs: Mapping[Pair, float], bridges: frozenset[Pair] = frozenset()) -> Counter[Pair]:
    plan = materialize(site, sent(site, pairs), FabricState(), bridges=bridges)
    assert isinstance(plan, FabricPlan), plan
    return joined(site, plan.cross_connects)


def small_tors() -> Site:
    """Return a site of three PoDs of two blocks, with four rails each."""
    return small_site(
        train_pods=3, gen_pods=0, servers_per_pod=4, servers_per_tor=2, tor_uplinks=4, core_lanes=32, response_lanes=0
    )


def tors_of(site: Site, pod: str) -> list[EndpointId]:
    return [tor.id for tor in site.tors if tor.pod == pod]


def test_light_pair_of_pods_gets_circuit_per_sending_rail() -> None:
    """Measured between PoDs, the second pair of PoDs would get one circuit, although eight pairs of ToRs need one."""
    site = small_tors()
    one, two, three = (tors_of(site, pod) for pod in ("train0", "train1", "train2"))
    heavy = {pair_of(*ends): 100 * MB for ends in zip(one, two, strict=True)}
    light = {pair_of(*ends): MB for ends in zip(one, three, strict=True)}
    circuits = planned(site, {**heavy, **light})
    assert {circuits[pair] for pair in heavy} == {3}
    assert {circuits[pair] for pair in light} == {1}


def test_lanes_go_to_sending_tors() -> None:
    """Pairs of ToRs send unevenly; no core circuit connects two ToRs without traffic."""
    site = small_tors()
    one, two = tors_of(site, "train0"), tors_of(site, "train1")
    wanted = {pair_of(*ends): (1 + number % 3) * MB for number, ends in enumerate(zip(one, two, strict=True))}
    inside = {pair_of(*ends): MB for ends in zip(one[:4], one[4:], strict=True)}
    circuits = planned(site, {**wanted, **inside})
    across = {pair for pair in circuits if site.pod_of[pair[0]] != site.pod_of[pair[1]]}
    assert across == set(wanted)
    assert all(circuits[pair] for pair in inside)


def test_bridge_gets_one_circuit_regardless_of_room() -> None:
    site = small_tors()
    one, two, three = (tors_of(site, pod) for pod in ("train0", "train1", "train2"))
    wanted = {pair_of(*ends): MB for ends in zip(one, two, strict=True)}
    bridge = pair_of(two[3], three[3])
    circuits = planned(site, wanted, frozenset({bridge}))
    assert circuits[bridge] == 1
    assert all(circuits[pair] for pair in wanted)
    assert sum(circuits[pair] for pair in wanted) == 8 * 4 - 1  # one of these ToR ports is the bridge's
