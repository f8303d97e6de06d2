"""Safe transitions: how many stages a site of 16 switches takes, how many no way avoids, and how long that takes.

The baseline of the stages is the proven bound; that of the time is counting what is up at each point, which has to look
at each move.
"""

from random import Random

from orchestrrl.lab.bench.figure import Figure, side_by_side
from planner.fabric.model import Cabling, EndpointId, OcsId, PortPair, port_pair
from planner.fabric.transition import Transition, TransitionProblem, circuits_up, transition

SWITCHES, PORTS, ENDPOINTS = 16, 320, 160
MAX_MOVES, MIN_FRACTION = 64, 0.5
SEED = 1
REPETITIONS = 3


def site() -> TransitionProblem:
    """Every port of a site of MEMS switches lit, and then another random matching of all of them."""
    draw = Random(SEED)
    owners = {
        OcsId(f"ocs{switch:02}"): {port: EndpointId(f"tor{port % ENDPOINTS:03}") for port in range(PORTS)}
        for switch in range(SWITCHES)
    }
    return TransitionProblem(Cabling(owners), _matching(draw, owners), _matching(draw, owners), MAX_MOVES, MIN_FRACTION)


def _matching(draw: Random, owners: dict[OcsId, dict[int, EndpointId]]) -> frozenset[PortPair]:
    up = set()
    for switch, ports in owners.items():
        free = sorted(ports)
        draw.shuffle(free)
        up |= {
            port_pair(switch, one, other)
            for one, other in zip(free[::2], free[1::2], strict=True)
            if ports[one] != ports[other]
        }
    return frozenset(up)


def fabric_transition() -> list[Figure]:
    problem = site()
    found: list[Transition] = []
    spent_s, counted_s = side_by_side(
        lambda: found.append(transition(problem)), lambda: circuits_up(problem, found[-1]), REPETITIONS
    )
    planned = found[-1]
    moves = sum(len(stage.remove) + len(stage.add) for stage in planned.stages)
    shape = f"{SWITCHES} switches of {PORTS} ports, {moves:,} moves, at most {MAX_MOVES} a stage"
    proven = "as few as can be" if planned.fewest_suffer else "not proven to be fewest"
    suffer = f"{len(planned.dark_pairs)} dark pairs, {len(planned.thin_endpoints)} thin endpoints ({proven})"
    stages, note = len(planned.stages), f"{shape}; {suffer}"
    return [
        Figure("fabric_transition_stages", stages, "stages", "proven bound", planned.stages_at_least, note),
        Figure("fabric_transition", spent_s, "s", "counting what is up at each point", counted_s, f"CPU; {shape}"),
    ]
