"""How many circuits each pair of ToRs gets, across PoDs too, by what the two send each other. Pure.

Nothing switches packets between two ToRs that a circuit of the core joins. What PoDs send each other says too little,
then: a PoD with little to send gets one circuit, though that is of one rail, and others are left without. Here
Algorithm 3 (appendix D of the paper) deals out ports of ToRs and lanes of PoDs at once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from planner.fabric.greedy import Demanded, spend
from planner.fabric.model import EndpointId, Pair


def direct(
    sent_bytes: Mapping[Pair, float], pod_of: Mapping[EndpointId, EndpointId], room: Mapping[EndpointId, int]
) -> Mapping[Pair, int]:
    """Of each pair that is served. `sent_bytes`: of pairs of ToRs, the larger direction. `room`: ports of ToRs and
    lanes of PoDs."""
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
    """Those that send most come first, as long as there is room for one circuit."""
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
    """Of pairs alike each ToR's first, then each ToR's second, so that what there is no room for is not all of one ToR;
    first among a ToR's are those to the same place of other PoDs, then one place on, and so on round."""
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
    """The place of each in its PoD."""
    places: Counter[EndpointId] = Counter()
    turn = {}
    for tor in sorted(tors):
        turn[tor] = places[pod_of[tor]]
        places[pod_of[tor]] += 1
    return turn
