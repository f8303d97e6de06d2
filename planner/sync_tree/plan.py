"""Plan the sync of a weight version as waves of pieces over trees, with a lower bound and the duration of direct
sending for comparison. Has no side effects.

Several ways to cut shards and fill waves are planned in full, and the plan with the shortest predicted time is used.
Pieces that are small compared with a chunk would mostly wait for the edges above them. They are sent in separate rounds
without these waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from planner.sync_tree.bounds import lower_bound_s, naive_s
from planner.sync_tree.model import Shard, ShardPairs, SyncPlan, SyncProblem, Wave
from planner.sync_tree.pieces import by_pod
from planner.sync_tree.rounds import rounds
from planner.sync_tree.waves import BroadcastStrategy, waves

MOST_WORK = 230_000  # limit over all strategies: two or three for a site of 2,048 endpoints
MOST_ROUNDS_WORK = 60_000  # limit of rounds tried instead of the best strategy
_SMALL_CHUNKS = 8  # a shard of at most this many chunks is small
_MORE_PIECES = 192  # additional pieces that shards may be cut into for rounds
_CLEARLY = 0.9  # required ratio to the other time: rounds are many waves, each with other circuits
_MORE_PIECES_OF_PAIRS, _CLEARLY_OF_PAIRS = 384, 0.97  # for fixed circuits
# Pieces that an endpoint receives at once, stripes of each, parts of the largest shard; usually best ones first.
_TRIED = ((4, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 1), (8, 1, 1), (1, 4, 1), (4, 1, 2), (1, 1, 4), (1, 2, 4), (4, 1, 4))
# an endpoint receives one piece at once
_TRIED_SCARCE = ((1, 1, 1), (1, 2, 1), (1, 1, 4), (1, 2, 4), (2, 1, 1), (1, 1, 8), (4, 1, 1))

Waves = tuple[Wave, ...]
Cost = Callable[[Waves], float]  # seconds


def make_plan(problem: SyncProblem, *, wave_s: float = 0.0) -> SyncPlan:
    """Return the plan of a weight sync. `wave_s` is an overhead per wave, in seconds, that the estimate does not
    include; a larger value favours plans with fewer waves. Raises Unreachable if no plan exists."""
    problem = _with_boundaries(_with_islands(problem))
    bound_s = lower_bound_s(problem)

    def cost_s(found: Waves) -> float:
        return _seconds(found) + wave_s * len(found)

    best = _best(problem, cost_s)
    return SyncPlan(best, _seconds(best), bound_s, max(bound_s, naive_s(problem)))


def _best(problem: SyncProblem, cost_s: Cost) -> Waves:
    needed = [shard.bytes for shard in problem.shards if shard.receivers]
    small = [size for size in needed if size <= _SMALL_CHUNKS * problem.chunk_bytes]
    if not small:
        return _or_rounds(problem, _in_trees(problem, MOST_WORK, cost_s), cost_s) if needed else ()
    alone, rest = _only(problem, 0, max(small)), _only(problem, max(small), np.inf)
    work = (MOST_WORK - _rounds_work(alone, max(small))) // 2
    best: Waves = tuple(rounds(alone, max(small)))
    if len(small) < len(needed):
        best += _or_rounds(rest, _in_trees(rest, work, cost_s), cost_s)
    together = _in_trees(problem, work, cost_s, needs_one=False)
    return _or_rounds(problem, min(best, together or best, key=cost_s), cost_s)


def _or_rounds(problem: SyncProblem, best: Waves, cost_s: Cost) -> Waves:
    """Return a plan in rounds, with the smallest pieces that the work limit allows, if that plan is clearly faster than
    `best`; otherwise return `best`."""
    needed = [shard.bytes for shard in problem.shards if shard.receivers]
    more_pieces, clearly = _MORE_PIECES, _CLEARLY
    if problem.pairs is not None:
        more_pieces, clearly = _MORE_PIECES_OF_PAIRS, _CLEARLY_OF_PAIRS
    for parts in (64, 16, 4, 1):
        size = -(-max(needed) // parts)
        pieces = sum(-(-each // size) for each in needed)
        if pieces <= len(needed) + more_pieces and _rounds_work(problem, size) <= MOST_ROUNDS_WORK:
            found = tuple(rounds(problem, size))
            return found if cost_s(found) < clearly * cost_s(best) else best
    return best


def _seconds(found: Waves) -> float:
    return float(sum(wave.seconds for wave in found))


def _only(problem: SyncProblem, above: float, most: float) -> SyncProblem:
    """Return the problem restricted to shards with sizes in (above, most] bytes."""
    shards = (
        shard if above < shard.bytes <= most else replace(shard, holders=(), receivers=()) for shard in problem.shards
    )
    return replace(problem, shards=tuple(shards))


def _in_trees(problem: SyncProblem, most_work: int, cost_s: Cost, *, needs_one: bool = True) -> Waves:
    """Return the waves of the best strategy within the work limit. If `needs_one` is True, at least one strategy is
    tried regardless of the limit."""
    tried = (tuple(waves(problem, style)) for style in _styles(problem, most_work, needs_one))
    return min(tried, key=cost_s, default=())


def _rounds_work(problem: SyncProblem, piece_bytes: int) -> int:
    """Return an estimate of the work of planning rounds, in which the copies of a piece in a pod double with each
    wave."""
    work = 0
    for shard in problem.shards:
        if shard.receivers:
            pods = len(np.unique(problem.pod[list(shard.receivers)]))
            doublings = (len(shard.receivers) // pods).bit_length()
            work += -(-shard.bytes // piece_bytes) * pods * 4 * (doublings + 2)
    return work


def _with_islands(problem: SyncProblem) -> SyncProblem:
    """Return the problem with each ToR that has no circuits in a separate pod, which has no circuits either."""
    islands = np.flatnonzero(problem.tor_gbps <= 0)
    if not len(islands):
        return problem
    pod_of = {int(tor): len(problem.pods) + number for number, tor in enumerate(islands)}
    pods = [pod_of.get(tor, pod) for tor, pod in zip(problem.tor.tolist(), problem.pod.tolist(), strict=True)]
    pairs, more = problem.pairs, (0, len(islands))
    return replace(
        problem,
        pods=(*problem.pods, *(f"(ToR {problem.tors[tor]})" for tor in islands)),
        boundary_circuits=np.concatenate([problem.boundary_circuits, np.zeros(len(islands), dtype=np.int64)]),
        pod=np.array(pods, dtype=np.int64),
        pairs=pairs and ShardPairs(np.pad(pairs.circuits, more), np.pad(pairs.gbps, more)),
    )


def _with_boundaries(problem: SyncProblem) -> SyncProblem:
    """Return the problem without the fixed connections of pods that have no boundary circuits. The boundary circuits of
    each pod are limited to the number that its remaining connections can use. A problem without fixed connections is
    returned unchanged."""
    if problem.pairs is None:
        return problem
    is_open = problem.boundary_circuits > 0
    circuits = np.where(is_open & is_open[:, None], problem.pairs.circuits, 0)
    boundary_circuits = np.minimum(problem.boundary_circuits, 2 * circuits.sum(axis=1))
    return replace(problem, boundary_circuits=boundary_circuits, pairs=replace(problem.pairs, circuits=circuits))


def _styles(problem: SyncProblem, most_work: int, needs_one: bool) -> Iterator[BroadcastStrategy]:
    needed = [shard for shard in problem.shards if shard.receivers]
    if not needed:
        return
    largest = max(shard.bytes for shard in needed)
    crossing = _crossing(problem)
    at_once = crossing / _kinds(problem)  # pieces that each endpoint can receive, by circuits
    if at_once >= 2:
        tried = [(crossing, *each) for each in sorted(_TRIED, key=lambda each: each[0] > at_once)]
    else:
        tried = [(crossing, *each) for each in _TRIED_SCARCE]
    work = 0
    for entering, together, stripes, parts in tried:
        size = max(1, -(-largest // parts))
        more = sum(-(-shard.bytes // size) * _work(problem, shard, stripes) for shard in needed)
        if (work or not needs_one) and work + more > most_work:
            continue
        work += more
        yield BroadcastStrategy(size, entering, stripes, together)


def _work(problem: SyncProblem, shard: Shard, stripes: int) -> int:
    """Return an estimate of the work of planning one piece: the number of possible source pods, summed over the pods
    that the piece enters, plus the number of its edges."""
    pods = len(np.unique(problem.pod[list(shard.receivers)]))
    return pods * (len(problem.pods) + 16) + len(shard.receivers) * stripes


def _kinds(problem: SyncProblem) -> int:
    """Return the maximum number of distinct sets of receivers in one pod. At least this many pieces must enter the pod
    at once if all receivers of the pod are to receive at the same time."""
    kinds: dict[int, set[tuple[int, ...]]] = {}
    for receivers in {shard.receivers for shard in problem.shards}:
        for pod, ends in by_pod(problem, receivers).items():
            kinds.setdefault(pod, set()).add(tuple(ends.tolist()))
    return max((len(each) for each in kinds.values()), default=1)


def _crossing(problem: SyncProblem) -> float:
    """Return the average number of pieces that can enter each receiving pod at once, with all circuits used at both
    ends."""
    entered, useful = set(), set()
    for shard in problem.shards:
        pods = set(problem.pod[list(shard.receivers)].tolist())
        held = set(problem.pod[list(shard.holders)].tolist())
        entered |= pods - held
        useful |= pods | held
    if not entered:
        return 1.0
    circuits = int(problem.boundary_circuits[sorted(useful)].sum())
    least = int(problem.boundary_circuits[sorted(entered)].min())
    return max(1.0, min(circuits / (2 * len(entered)), least))
