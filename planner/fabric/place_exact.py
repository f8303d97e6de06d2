"""Placing as an integer program: exact where few switches take part, and otherwise on a few switches at a time.

Deciding which switch carries which circuit is edge colouring once every endpoint has one port on each, so no fast way
finds every optimum. The search stops after work that is the same on every machine, never after a time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from planner.fabric.place_counts import CircuitLayout

WHOLE_WORK = 2.0  # for each of the two aims; a unit takes about a second
GROUP = 5  # switches that exchange circuits
GROUP_WORK = 0.1
BUILD_WORK = 4e-5  # by (pair, switch), for putting the program together
SEED = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """No placement has more; `most_kept` is that of those with `most_placed` circuits."""

    placed: int
    kept: int


class _Program:
    """Which of `switches` carry the circuits that the layout has on them, and those that it misses."""

    def __init__(self, layout: CircuitLayout, switches: Sequence[int]) -> None:
        self.layout = layout
        self.model = cp_model.CpModel()
        self.on: dict[tuple[int, int], cp_model.IntVar] = {}  # circuits of (pair, switch)
        self.kept: list[cp_model.IntVar] = []
        self.short = any(layout.missing)  # then any pair may be the one that has to miss a circuit
        counting = layout.counting
        users: dict[tuple[int, int], list[cp_model.IntVar]] = {}  # of the ports of (endpoint, switch)
        for pair, (one, other) in enumerate(counting.ends):
            movable = layout.missing[pair] + sum(layout.placed[pair][switch] for switch in switches)
            mine = []
            for switch in switches if movable else ():
                most = min(movable, counting.ports[one][switch], counting.ports[other][switch])
                if not most:
                    continue
                placed = self._variable(most, layout.placed[pair][switch])
                self.on[pair, switch] = placed
                mine.append(placed)
                for endpoint in (one, other):
                    users.setdefault((endpoint, switch), []).append(placed)
                self._keep(placed, most, min(most, counting.up[pair][switch]), layout.placed[pair][switch])
            if mine:
                self.model.add(sum(mine) <= movable if self.short else sum(mine) == movable)
        for (endpoint, switch), variables in users.items():
            self.model.add(sum(variables) <= counting.ports[endpoint][switch])

    def _variable(self, most: int, hint: int) -> cp_model.IntVar:
        variable = self.model.new_int_var(0, most, "")
        self.model.add_hint(variable, min(most, hint))
        return variable

    def _keep(self, placed: cp_model.IntVar, most: int, up: int, now: int) -> None:
        if up == most and up:
            self.kept.append(placed)
        elif up:
            kept = self._variable(up, now)
            self.model.add(kept <= placed)
            self.kept.append(kept)

    def solve(self, each_placed: int, work: float, each_kept: int = 1) -> tuple[int | None, float]:
        """The layout takes over what is found. A bound on the sum of what circuits placed and circuits kept count, and
        the work spent."""
        counted = [(each_placed, variable) for variable in self.on.values()] if each_placed else []
        counted += [(each_kept, variable) for variable in self.kept] if each_kept else []
        self.model.maximize(
            cp_model.LinearExpr.weighted_sum([variable for _, variable in counted], [weight for weight, _ in counted])
        )
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = SEED
        parameters.linearization_level = 2
        parameters.max_deterministic_time = work
        status = solver.solve(self.model)
        spent = float(solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, spent
        bound = int(solver.best_objective_bound + 1e-6)
        now = each_placed * self._placed() + each_kept * self.layout.kept
        before = [(pair, switch, self.layout.placed[pair][switch]) for pair, switch in self.on]
        self._take_over([(*place, int(solver.value(variable))) for place, variable in self.on.items()])
        if each_placed * self._placed() + each_kept * self.layout.kept < now:  # it stops before it comes to the hint
            self._take_over(before)
        return bound, spent

    def _placed(self) -> int:
        return sum(self.layout.placed[pair][switch] for pair, switch in self.on)

    def _take_over(self, counts: list[tuple[int, int, int]]) -> None:
        """For each pair and switch, how many circuits."""
        for pair, switch, count in counts:
            for _ in range(self.layout.placed[pair][switch] - count):
                self.layout.take(pair, switch)
        for pair, switch, count in counts:
            for _ in range(count - self.layout.placed[pair][switch]):
                self.layout.add(pair, switch)


def settle(layout: CircuitLayout, bounds: Bounds) -> Bounds:
    """The best layout, first by circuits placed and then by those kept, and what is proven of it."""
    everywhere = range(layout.counting.switches)
    if layout.total < bounds.placed:
        program = _Program(layout, everywhere)
        bound, _ = program.solve(1, WHOLE_WORK, each_kept=0)
        if bound is not None:
            bounds = Bounds(min(bounds.placed, bound), bounds.kept)
    if layout.kept < bounds.kept:
        program = _Program(layout, everywhere)
        if program.short:
            program.model.add(sum(program.on.values()) >= layout.total)
        bound, _ = program.solve(0, WHOLE_WORK)
        if bound is not None:
            bounds = Bounds(bounds.placed, min(bounds.kept, bound))
    return bounds


def exchange(layout: CircuitLayout, bounds: Bounds, work: float) -> None:
    """Better layouts, by placing anew what a few switches carry, group after group, until the work is done."""
    rng = random.Random(SEED)
    order = list(range(layout.counting.switches))
    while work > 0:
        rng.shuffle(order)
        for start in range(0, len(order), GROUP):
            if work <= 0 or (layout.total, layout.kept) >= (bounds.placed, bounds.kept):
                return
            program = _Program(layout, order[start : start + GROUP])
            each_placed = layout.counting.circuits_up + 1 if program.short else 0
            work -= program.solve(each_placed, GROUP_WORK)[1] + BUILD_WORK * len(program.on)
