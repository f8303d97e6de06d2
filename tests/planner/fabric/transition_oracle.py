"""Transitions by the letter of the contract: all alternatives of small problems, and a check of any transition.
Independent of the planner's methods."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from random import Random

from planner.fabric.model import Cabling, EndpointId, OcsId, PortPair, port_pair
from planner.fabric.transition import PointKind, Transition, TransitionProblem, TransitionStage

Up = frozenset[PortPair]
Sufferers = frozenset[tuple[str, ...]]  # ("a", "b") is a pair, ("a",) an endpoint


def draw_problem(
    rng: Random,
    switches: int = 2,
    ports: int = 6,
    endpoints: int = 4,
    fill: float = 0.9,
    same: float = 0.2,
    most_differences: int = 1_000_000,
) -> TransitionProblem:
    """Draw two random sets of cross-connects on random cabling, some of them in both."""
    names = [EndpointId(f"tor{number}") for number in range(endpoints)]
    cabling = Cabling(
        {OcsId(f"ocs{number}"): {port: rng.choice(names) for port in range(1, ports + 1)} for number in range(switches)}
    )
    current, target = (_draw_up(rng, cabling, fill) for _ in range(2))
    held = {(each.switch, port) for each in current for port in each.ports}
    for each in sorted(current):
        if rng.random() < same:
            own = {(each.switch, port) for port in each.ports}
            target = {other for other in target if own.isdisjoint((other.switch, port) for port in other.ports)}
            target.add(each)
    for different in (current - target, target - current):  # fewer moves if a search follows
        for each in sorted(different)[max(1, most_differences // 2) :]:
            current, target = current - {each}, target - {each}
    assert all((each.switch, port) in held for each in current for port in each.ports)
    return TransitionProblem(
        cabling,
        frozenset(current),
        frozenset(target),
        rng.choice((1, 2, 3, 4, 6, 20)),
        rng.choice((0.0, 0.3, 0.5, 0.5, 0.75, 0.9, 1.0)),
    )


def _draw_up(rng: Random, cabling: Cabling, fill: float) -> set[PortPair]:
    up = set()
    for switch, owners in cabling.ports.items():
        free = list(owners)
        rng.shuffle(free)
        while len(free) >= 2:
            one, other = free.pop(), free.pop()
            if owners[one] != owners[other] and rng.random() < fill:
                up.add(port_pair(switch, one, other))
    return up


def counts(problem: TransitionProblem, up: Up) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for each in up:
        one, other = (problem.cabling.ports[each.switch][port] for port in each.ports)
        found.update([tuple(sorted((one, other))), (one,), (other,)])
    return found


def floors(problem: TransitionProblem) -> dict[tuple[str, ...], int]:
    before, after = counts(problem, problem.current), counts(problem, problem.target)
    return {
        key: 1 if len(key) == 2 else math.floor(problem.min_fraction * min(before[key], after[key]))
        for key in before.keys() & after.keys()
    }


def suffering(problem: TransitionProblem, up: Up) -> Sufferers:
    now = counts(problem, up)
    return frozenset(key for key, floor in floors(problem).items() if now[key] < floor)


def ports_clash(up: Up) -> bool:
    used = [(each.switch, port) for each in up for port in each.ports]
    return len(used) != len(set(used))


def followed(problem: TransitionProblem, planned: Transition) -> Sufferers:
    """Follow the stages move by move; assert all rules, and return the subjects that suffer."""
    up, suffer = problem.current, frozenset[tuple[str, ...]]()
    for stage in planned.stages:
        assert 1 <= len(stage.remove) + len(stage.add) <= problem.max_moves_per_stage
        for each in stage.remove:  # an interruption here is as safe as afterwards
            assert each in up
            assert each not in problem.target
            up = up - {each}
            suffer |= suffering(problem, up)
        for each in stage.add:
            assert each in problem.target
            assert each not in up
            up = up | {each}
            assert not ports_clash(up)
    assert up == problem.target
    return suffer


def cost(suffer: Sufferers) -> tuple[int, int]:
    pairs = sum(len(key) == 2 for key in suffer)
    return pairs, len(suffer) - pairs


def least(problem: TransitionProblem) -> tuple[tuple[int, int], int]:
    """Return the fewest dark pairs with the fewest thin endpoints, and the fewest stages with as few of both."""
    fewest = _fewest_suffering(problem)
    return fewest, _fewest_stages(problem, fewest)


def _fewest_suffering(problem: TransitionProblem) -> tuple[int, int]:
    """Try every order of single moves. States are reached with sets of sufferers; supersets of others are dropped."""
    down, up = problem.current - problem.target, problem.target - problem.current
    labels: dict[Up, set[Sufferers]] = {problem.current: {frozenset()}}
    todo = {problem.current}
    while todo:
        state = min(todo, key=lambda state: (len(state & down) * -1 + len(state & up), sorted(state)))
        todo.discard(state)
        for after in [state - {each} for each in state & down] + [
            state | {each} for each in up - state if not ports_clash(state | {each})
        ]:
            for label in labels[state]:
                reached = label | suffering(problem, after)
                known = labels.setdefault(after, set())
                if not any(other <= reached for other in known):
                    known.difference_update([other for other in known if reached <= other])
                    known.add(reached)
                    todo.add(after)
    return min(map(cost, labels[problem.target]))


def _fewest_stages(problem: TransitionProblem, allowed: tuple[int, int]) -> int:
    reached: set[tuple[Up, Sufferers]] = {(problem.current, frozenset())}
    seen, stages = set(reached), 0
    while all(state != problem.target for state, _ in reached):
        fresh = set()
        for state, suffer in reached:
            for after, more in _stages_from(problem, state):
                total = suffer | more
                pairs, endpoints = cost(total)
                if pairs <= allowed[0] and endpoints <= allowed[1] and (after, total) not in seen:
                    fresh.add((after, total))
        seen |= fresh
        assert fresh, "no transition suffers as little as single moves do"
        reached, stages = fresh, stages + 1
    return stages


def _stages_from(problem: TransitionProblem, state: Up) -> Iterator[tuple[Up, Sufferers]]:
    down, up = sorted(state - problem.target), sorted(problem.target - state)
    most = problem.max_moves_per_stage
    for removed in range(min(len(down), most) + 1):
        for gone in combinations(down, removed):
            between = state - set(gone)
            suffer = suffering(problem, between)
            for added in range(min(len(up), most - removed) + 1):
                for new in combinations(up, added):
                    if (gone or new) and not ports_clash(between | set(new)):
                        yield between | set(new), suffer


class TransitionFault(ValueError):
    """A transition that must not be carried out, with all its faults."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class TransitionPoint:
    """The circuits before the first stage, and after the removals and the additions of each; `stage` counts from 1."""

    stage: int
    kind: PointKind
    up: frozenset[PortPair]


def points(problem: TransitionProblem, stages: tuple[TransitionStage, ...]) -> Iterator[TransitionPoint]:
    """Yield the circuits at each point. Between two points there are never fewer than at the one with fewer."""
    up = problem.current
    yield TransitionPoint(0, "start", up)
    for number, stage in enumerate(stages, start=1):
        up = up - set(stage.remove)
        yield TransitionPoint(number, "removed", up)
        up = up | set(stage.add)
        yield TransitionPoint(number, "added", up)


def check(problem: TransitionProblem, planned: Transition) -> None:
    """Raise TransitionFault unless the stages lead from current to target, every point is safe, and all side effects
    are reported."""
    faults = list(_wrong_moves(problem, planned)) or list(_wrong_points(problem, planned))
    if faults:
        raise TransitionFault(faults)


def _wrong_moves(problem: TransitionProblem, planned: Transition) -> Iterator[str]:
    for what, moved, due in (
        ("removed", [each for stage in planned.stages for each in stage.remove], problem.current - problem.target),
        ("added", [each for stage in planned.stages for each in stage.add], problem.target - problem.current),
    ):
        times = Counter(moved)
        for each in sorted(times.keys() | due):
            if each not in due:
                yield f"{each} must not be {what}"
            elif times[each] != 1:
                yield f"{each} must be {what} once, got {times[each]} times"
    for number, stage in enumerate(planned.stages, start=1):
        if not 1 <= len(stage.remove) + len(stage.add) <= problem.max_moves_per_stage:
            yield (
                f"stage {number} must have 1 to {problem.max_moves_per_stage} moves,"
                f" got {len(stage.remove) + len(stage.add)}"
            )


def _wrong_points(problem: TransitionProblem, planned: Transition) -> Iterator[str]:
    used = {(each.switch, port) for each in problem.current for port in each.ports}
    for number, moved in enumerate(planned.stages, start=1):
        used.difference_update((each.switch, port) for each in moved.remove for port in each.ports)
        for each in moved.add:
            for port in each.ports:
                if (each.switch, port) in used:
                    yield f"stage {number}, added: port {port} of {each.switch} is used twice"
                used.add((each.switch, port))
    reported = {*planned.dark_pairs, *((endpoint,) for endpoint in planned.thin_endpoints)}
    for subject, (stage, kind) in _below(problem, planned.stages).items():
        if subject not in reported:
            yield f"stage {stage}, {kind}: {'-'.join(subject)} has fewer circuits than its floor, which is not reported"


def _below(
    problem: TransitionProblem, stages: tuple[TransitionStage, ...]
) -> dict[tuple[str, ...], tuple[int, PointKind]]:
    """Return the subjects below their floors at some point, with the first such point."""
    found: dict[tuple[str, ...], tuple[int, PointKind]] = {}
    for point in points(problem, stages):
        for subject in sorted(suffering(problem, point.up)):
            found.setdefault(subject, (point.stage, point.kind))
    return found
