"""Circuits on switch ports: what a placement costs, and how many changes it makes when the demand of a PoD moves on."""

import random
from collections.abc import Iterator
from itertools import combinations

from orchestrrl.lab.bench.figure import Figure, side_by_side
from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, port_pair
from planner.fabric.place import PlacedCircuits, PlacingProblem, place

SEED = 1
TORS, SWITCHES, PORTS = 64, 16, 2  # of each ToR on each switch
PARTNERS = 24  # other ToRs that a ToR has demand with
MOVED = 0.1  # of the demanded pairs, in the next period


def cabling(tors: int) -> Cabling:
    return Cabling(
        {
            OcsId(f"ocs{switch:02}"): {
                tor * PORTS + port: EndpointId(f"tor{tor:04}") for tor in range(tors) for port in range(PORTS)
            }
            for switch in range(SWITCHES)
        }
    )


def periods(tors: int, moved: float, seed: int) -> Iterator[dict[Pair, int]]:
    """Circuits of two periods, dealt by demand until ports are out; part of the pairs have new demand in the second."""
    rng = random.Random(seed)
    pairs = list(combinations([EndpointId(f"tor{tor:04}") for tor in range(tors)], 2))
    weights = {pair: rng.lognormvariate(0, 1) for pair in rng.sample(pairs, tors * PARTNERS // 2)}
    yield _dealt(weights)
    for pair in rng.sample(sorted(weights), round(moved * len(weights))):
        del weights[pair]
        weights[rng.choice(pairs)] = rng.lognormvariate(0, 1)
    yield _dealt(weights)


def _dealt(weights: dict[Pair, float]) -> dict[Pair, int]:
    """By weight, in rounds of one more circuit for each pair, the heavier ones longer."""
    free = {endpoint: SWITCHES * PORTS for pair in weights for endpoint in pair}
    counts: dict[Pair, int] = {}
    order = sorted((-weight / (nth + 1), pair) for pair, weight in weights.items() for nth in range(SWITCHES))
    for _, pair in order:
        if all(free[endpoint] for endpoint in pair):
            counts[pair] = counts.get(pair, 0) + 1
            for endpoint in pair:
                free[endpoint] -= 1
    return counts


def first_fit(problem: PlacingProblem) -> list[PortPair]:
    """Keep what is wanted, then each circuit on the first switch where both ends have a port."""
    missing = dict(problem.circuits)
    placed: list[PortPair] = []
    for each in sorted(problem.current):
        pair = problem.cabling.ends(each)
        if pair is not None and missing.get(pair, 0):
            missing[pair] -= 1
            placed.append(each)
    used = {(each.switch, port) for each in placed for port in each.ports}
    free: dict[tuple[OcsId, EndpointId], list[int]] = {}
    for switch, owners in problem.cabling.ports.items():
        for port, endpoint in owners.items():
            if (switch, port) not in used:
                free.setdefault((switch, endpoint), []).append(port)
    for (one, other), count in sorted(missing.items()):
        for switch in sorted(problem.cabling.ports):
            here = (free.get((switch, one), []), free.get((switch, other), []))
            while count and all(here):
                placed.append(port_pair(switch, here[0].pop(0), here[1].pop(0)))
                count -= 1
    return placed


def changes(problem: PlacingProblem, placed: PlacedCircuits) -> int:
    """Cross-connects removed and added."""
    return len(problem.current) + len(placed.cross_connects) - 2 * len(placed.kept)


def least_changes(problem: PlacingProblem, placed: PlacedCircuits) -> int:
    """No placement with as many circuits makes fewer."""
    return len(problem.current) + len(placed.cross_connects) - 2 * placed.bound_kept


def _moved(tors: int) -> tuple[PlacingProblem, PlacingProblem]:
    """The first period from nothing, and the second from the first."""
    site = cabling(tors)
    before, after = periods(tors, MOVED, SEED)
    first = PlacingProblem(site, before)
    return first, PlacingProblem(site, after, frozenset(place(first).cross_connects))


def fabric_place() -> list[Figure]:
    """A PoD placed from nothing against first fit, which leaves circuits out; and the changes of its next period."""
    first, then = _moved(TORS)
    wanted = sum(first.circuits.values())
    place_s, fit_s = side_by_side(lambda: place(first), lambda: first_fit(first), repetitions=7)
    out, left = (wanted - len(found) for found in (place(first).cross_connects, first_fit(first)))
    quick, placed = place(then, work=0.0), place(then)
    quick_s, whole_s = side_by_side(lambda: place(then, work=0.0), lambda: place(then), repetitions=3)
    fitted = len(first_fit(then))
    site = f"{TORS} ToRs of {SWITCHES * PORTS} ports on {SWITCHES} switches, {wanted:,} circuits"
    nothing = f"{site} from nothing: {out} left out, by first fit {left}"
    made, quickly, least = changes(then, placed), changes(then, quick), least_changes(then, placed)
    moved = (
        f"{MOVED:.0%} of the pairs moved on, {len(placed.cross_connects):,} of {sum(then.circuits.values()):,}"
        f" placed (first fit, which breaks nothing: {fitted:,}); {quickly} without trying again"
    )
    again = f"the same change, with trying again to keep more ({quickly - made} fewer)"
    bound = "a bound that no placement beats, and perhaps none meets"
    return [
        Figure("fabric_place", place_s, "s", "first fit", fit_s, nothing),
        Figure("fabric_place_changes", made, "cross-connects", bound, least, moved),
        Figure("fabric_place_again", whole_s, "s", "chains of moves alone", quick_s, again),
    ]
