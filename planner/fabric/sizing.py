"""Choose circuit counts for the core and all PoDs together, so that the PoDs can carry the core's circuits. Has no side
effects.

In the allocation of a PoD, the boundary to the core is one more endpoint, with as many ports as the core has circuits
to the PoD. One endpoint suffices because all uplinks of a PoD are equivalent. If the ToRs of a PoD cannot use as many
circuits as the core assigns to the PoD, the core's limit for the PoD is lowered. As in appendix D of the paper, this is
repeated until the core and the PoDs agree.

The alternative (`direct`) considers only pairs of ToRs, in the same or in different PoDs. No packet switch lies between
two ToRs that a core circuit connects, so the number of bytes between two PoDs is not enough information. For example, a
PoD with little traffic gets a single circuit, which connects only one rail. In the alternative, Algorithm 3 assigns ToR
ports and PoD lanes at once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.fabric.allocate import AllocationProblem, algorithm3
from planner.fabric.greedy import Demanded, spend
from planner.fabric.model import EndpointId, Pair, pair_of
from planner.fabric.plan import Directed
from planner.fabric.templates import StageTemplate
from planner.fabric.topology import Site

Tors = tuple[EndpointId, EndpointId]  # the ToR in the smaller PoD first
ROUNDS = 16  # of agreement between PoDs and core; each removes circuits, and two or three suffice


@dataclass(frozen=True, slots=True)
class WantedBytes:
    """The bytes to be moved in and between the PoDs that a stage changes. `lifts` contains, by PoD, the bytes between
    its ToRs and its boundary to the core. The boundary is an endpoint with the id of the PoD."""

    tors: Mapping[EndpointId, Directed]  # by PoD, between its ToRs
    lifts: Mapping[EndpointId, Directed]
    core: Directed
    between: Mapping[Pair, Mapping[Tors, float]]  # pair of PoDs -> their ToRs
    larger_bytes: Mapping[Pair, float]  # of all these pairs of ToRs, the larger direction
    ineligible_bytes: float  # between PoDs that get no circuits in this stage
    elsewhere_bytes: float  # in or to PoDs that this stage does not touch


def wanted_of(site: Site, touched: frozenset[EndpointId], eligible: frozenset[Pair], flows: Directed) -> WantedBytes:
    tors: dict[EndpointId, dict[tuple[EndpointId, EndpointId], float]] = {pod: {} for pod in sorted(touched)}
    lifts: dict[EndpointId, dict[tuple[EndpointId, EndpointId], float]] = {
        pod: defaultdict(float) for pod in sorted(touched)
    }
    core: dict[tuple[EndpointId, EndpointId], float] = defaultdict(float)
    between: dict[Pair, dict[Tors, float]] = defaultdict(lambda: defaultdict(float))
    larger_bytes: dict[Pair, float] = {}
    ineligible_bytes = elsewhere_bytes = 0.0
    pod_of = site.pod_of
    for (source, destination), sent_bytes in flows.items():
        here, there = pod_of[source], pod_of[destination]
        if here not in touched or there not in touched:
            elsewhere_bytes += sent_bytes
            continue
        if here == there:
            tors[here][source, destination] = sent_bytes
        elif (pair := (here, there) if here < there else (there, here)) in eligible:
            core[here, there] += sent_bytes
            lifts[here][source, here] += sent_bytes
            lifts[there][there, destination] += sent_bytes
            between[pair][(source, destination) if here < there else (destination, source)] += sent_bytes
        else:
            ineligible_bytes += sent_bytes
            continue
        tors_of_pair = pair_of(source, destination)
        larger_bytes[tors_of_pair] = max(larger_bytes.get(tors_of_pair, 0.0), sent_bytes)
    return WantedBytes(tors, lifts, core, between, larger_bytes, ineligible_bytes, elsewhere_bytes)


@dataclass(frozen=True, slots=True)
class CircuitSizes:
    core: Mapping[Pair, int]
    lifts: Mapping[EndpointId, int]  # by ToR
    tors: Mapping[EndpointId, Mapping[Pair, int]]  # by PoD
    # pair of PoDs -> their ToRs, with the weights by which the core connects them
    between: Mapping[Pair, Mapping[Tors, float]]
    most: Mapping[Tors, int]  # maximum of core circuits for these pairs


def size_with(
    bridges: Iterable[Pair],
    site: Site,
    template: StageTemplate,
    wanted: WantedBytes,
    lanes: Mapping[EndpointId, int],
    ports: Mapping[EndpointId, Mapping[EndpointId, int]],
    *,
    by_tors: bool,
) -> CircuitSizes:
    """Choose circuit counts, by the traffic of pairs of ToRs if `by_tors` is True, otherwise by the traffic of pairs of
    PoDs. `lanes` contains the usable lanes of each PoD, and `ports` the usable ports of each ToR, by PoD. Each pair of
    ToRs in `bridges` first gets one circuit if ports and lanes are free. It gets further circuits only for its
    traffic."""
    left, lanes_left = {pod: dict(of_pod) for pod, of_pod in ports.items()}, dict(lanes)
    laid = []
    for pair in sorted(bridges):
        pods = [site.pod_of[tor] for tor in pair]
        room = [left.get(pod, {}).get(tor, 0) for pod, tor in zip(pods, pair, strict=True)]
        if pods[0] != pods[1]:
            room += [lanes_left.get(pod, 0) for pod in pods]
        if min(room) > 0:
            laid.append(pair)
            for pod, tor in zip(pods, pair, strict=True):
                left[pod][tor] -= 1
                lanes_left[pod] = lanes_left.get(pod, 0) - (pods[0] != pods[1])
    sizes = size_directly(site, wanted, lanes_left, left) if by_tors else size(site, template, wanted, lanes_left, left)
    return _beside(site, laid, sizes) if laid else sizes


def _beside(site: Site, bridges: Iterable[Pair], sizes: CircuitSizes) -> CircuitSizes:
    core, lifts, most = Counter(sizes.core), Counter(sizes.lifts), Counter(sizes.most)
    tors = {pod: Counter(of_pod) for pod, of_pod in sizes.tors.items()}
    between = {pods: dict(of_pods) for pods, of_pods in sizes.between.items()}
    for pair in bridges:
        (here, one), (there, other) = sorted((site.pod_of[tor], tor) for tor in pair)
        if here == there:
            tors[here][pair] += 1
            continue
        core[here, there] += 1
        lifts.update(pair)
        weights = between.setdefault((here, there), {})
        if (one, other) not in weights or (one, other) in most:
            most[one, other] += 1
        weights[one, other] = 2 * max(weights.values(), default=1.0)
    return CircuitSizes(core, lifts, tors, between, most)


def size_directly(
    site: Site,
    wanted: WantedBytes,
    lanes: Mapping[EndpointId, int],
    ports: Mapping[EndpointId, Mapping[EndpointId, int]],
) -> CircuitSizes:
    """Choose circuit counts by the traffic between ToRs."""
    room = {**lanes, **{tor: count for of_pod in ports.values() for tor, count in of_pod.items()}}
    circuits = direct(wanted.larger_bytes, site.pod_of, room)
    core: Counter[Pair] = Counter()
    lifts: Counter[EndpointId] = Counter()
    tors: dict[EndpointId, dict[Pair, int]] = {pod: {} for pod in wanted.tors}
    between: dict[Pair, dict[Tors, float]] = defaultdict(dict)
    most: dict[Tors, int] = {}
    for pair, count in circuits.items():
        (here, one), (there, other) = sorted((site.pod_of[tor], tor) for tor in pair)
        if here == there:
            tors[here][pair] = count
            continue
        core[here, there] += count
        between[here, there][one, other] = most[one, other] = count
        for tor in pair:
            lifts[tor] += count
    return CircuitSizes(core, lifts, tors, between, most)


def size(
    site: Site,
    template: StageTemplate,
    wanted: WantedBytes,
    lanes: Mapping[EndpointId, int],
    ports: Mapping[EndpointId, Mapping[EndpointId, int]],
) -> CircuitSizes:
    """Choose circuit counts by the traffic between PoDs. Algorithm 3 is applied to the core and to each PoD, repeatedly
    until both agree on the number of core circuits of each PoD."""
    eligible = template.core_pairs(site.pod[pod] for pod in wanted.tors)
    limits = {pod: lanes.get(pod, 0) for pod in wanted.tors}
    boundary: dict[EndpointId, int] = {}
    agg: dict[EndpointId, Mapping[Pair, int]] = {}
    for _ in range(ROUNDS):
        core = algorithm3(AllocationProblem(site.link_gbps, limits, wanted.core, eligible)).circuits
        needed = dict.fromkeys(wanted.tors, 0) | _incident(core)
        for pod in wanted.tors:
            if boundary.get(pod) != needed[pod]:
                demand = {**wanted.tors[pod], **wanted.lifts[pod]}
                problem = AllocationProblem(site.link_gbps, {**ports[pod], pod: needed[pod]}, demand)
                agg[pod], boundary[pod] = algorithm3(problem).circuits, needed[pod]
        lifted = {pod: _incident(agg[pod])[pod] for pod in wanted.tors}
        if lifted == needed:
            break
        limits = lifted
    return CircuitSizes(
        core=core,
        lifts={
            pair[0] if pair[1] == pod else pair[1]: count
            for pod, circuits in agg.items()
            for pair, count in circuits.items()
            if pod in pair
        },
        tors={
            pod: {pair: count for pair, count in circuits.items() if pod not in pair} for pod, circuits in agg.items()
        },
        between=wanted.between,
        most={},
    )


def _incident(circuits: Mapping[Pair, int]) -> Counter[EndpointId]:
    found: Counter[EndpointId] = Counter()
    for pair, count in circuits.items():
        for end in pair:
            found[end] += count
    return found


def spread(link_gbps: float, ports: Mapping[EndpointId, int], up: Mapping[Pair, int]) -> Mapping[Pair, int]:
    """Return the number of circuits of each pair of endpoints if spare ports are spread evenly over all pairs. If there
    are fewer ports than pairs, pairs are preferred as if the endpoints were arranged on a circle: pairs at a few near
    and far distances come first, so that any endpoint reaches any other in few hops. Among equal pairs, those that have
    circuits (`up`) come first."""
    ends = sorted(end for end, count in ports.items() if count)
    if len(ends) < 2:
        return {}
    order = _circle(len(ends), min(ports[end] for end in ends) // 2)
    demand = {
        (one, other): 1.0 - 1e-6 * order[distance] + 1e-9 * min(up.get((one, other), 0), 100)
        for place, one in enumerate(ends)
        for distance, other in enumerate(ends[place + 1 :], start=1)
    }
    return algorithm3(AllocationProblem(link_gbps, {end: ports[end] for end in ends}, demand)).circuits


def _circle(size: int, distances: int) -> list[int]:
    """Return a rank for each distance on a circle of `size` endpoints. A distance has the same rank in both directions.
    The lowest ranks belong to at most `distances` selected distances. Each selected distance is about a fixed multiple
    of the previous one, so that steps of these distances reach every endpoint."""
    chosen = [round(size ** (number / max(1, distances))) for number in range(max(1, distances))]
    shortest = [min(distance, size - distance) for distance in range(size)]
    return [chosen.index(each) if each in chosen else size + each for each in shortest]


def direct(
    sent_bytes: Mapping[Pair, float], pod_of: Mapping[EndpointId, EndpointId], room: Mapping[EndpointId, int]
) -> Mapping[Pair, int]:
    """Return the number of circuits of each served pair of ToRs. `sent_bytes` maps each pair of ToRs to the bytes of
    its larger direction. `room` maps each ToR to its number of ports and each PoD to its number of lanes."""
    ends = {
        pair: pair if pod_of[pair[0]] == pod_of[pair[1]] else (*pair, *(pod_of[tor] for tor in pair))
        for pair, each_bytes in sent_bytes.items()
        if each_bytes > 0
    }
    pairs = _served(ends, sent_bytes, pod_of, room)
    place = {end: number for number, end in enumerate(sorted({end for pair in pairs for end in ends[pair]}))}
    larger = [sent_bytes[pair] for pair in pairs]
    demanded = Demanded(
        pairs=pairs,
        ends=[tuple(place[end] for end in ends[pair]) for pair in pairs],
        larger_bytes=larger,
        total_bytes=larger,
        ports=[room[end] for end in place],
        largest_first=range(len(pairs)),
    )
    circuits = spend(demanded, range(len(pairs)))
    return {pairs[number]: count for number, count in circuits.items()}


def _served(
    ends: Mapping[Pair, tuple[EndpointId, ...]],
    sent_bytes: Mapping[Pair, float],
    pod_of: Mapping[EndpointId, EndpointId],
    room: Mapping[EndpointId, int],
) -> list[Pair]:
    """Return the pairs that get a circuit. Pairs are considered by descending traffic. A pair is included if all of its
    `ends` still have room for a circuit."""
    left = dict(room)
    served = []
    for pair in _in_turn(ends, sent_bytes, pod_of):
        if all(left.get(end, 0) for end in ends[pair]):
            for end in ends[pair]:
                left[end] -= 1
            served.append(pair)
    return sorted(served)


def _in_turn(
    pairs: Iterable[Pair], sent_bytes: Mapping[Pair, float], pod_of: Mapping[EndpointId, EndpointId]
) -> list[Pair]:
    """Sort pairs by descending bytes. Among pairs with equal bytes, the ToRs take turns, so that the pairs at the end,
    which may find no free ports, do not all belong to one ToR. For each ToR, pairs with ToRs at the same position in
    other PoDs come first, then pairs with ToRs at the next position."""
    pairs = list(pairs)
    turn = _turns({tor for pair in pairs for tor in pair}, pod_of)
    size = 1 + max(turn.values(), default=0)
    steps = {(one, other): (turn[other] - turn[one]) % size for one, other in pairs}
    pairs.sort(key=lambda pair: (-sent_bytes[pair], steps[pair], pair))
    seen: Counter[EndpointId] = Counter()
    place = {}
    for pair in pairs:
        seen.update(pair)
        place[pair] = max(seen[tor] for tor in pair)
    return sorted(pairs, key=lambda pair: (-sent_bytes[pair], place[pair], steps[pair], pair))


def _turns(tors: Iterable[EndpointId], pod_of: Mapping[EndpointId, EndpointId]) -> Mapping[EndpointId, int]:
    """Return the position of each ToR among the ToRs of its PoD."""
    places: Counter[EndpointId] = Counter()
    turn = {}
    for tor in sorted(tors):
        turn[tor] = places[pod_of[tor]]
        places[pod_of[tor]] += 1
    return turn
