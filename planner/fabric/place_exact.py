"""Placing as an integer program: exact where few switches take part.

Deciding which switch carries which circuit is edge colouring once every endpoint has one port on each, so no fast way
finds every optimum. The search stops after work that is the same on every machine, never after a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from planner.fabric.place_counts import CircuitLayout

WHOLE_WORK = 2.0  # for each of the two aims; a unit takes about a second
SEED = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """No placement has more; `most_kept` is that of those with `most_placed` circuits."""

    placed: int
    kept: int


class _Program:
    """Which switches carry the circuits."""

    def __init__(self, layout: CircuitLayout) -> None:
        self.layout = layout
        self.model = cp_model.CpModel()
        self.on: dict[tuple[int, int], cp_model.IntVar] = {}  # circuits of (pair, switch)
        self.kept: list[cp_model.IntVar] = []
        self.short = any(layout.missing)  # then any pair may be the one that has to miss a circuit
        counting = layout.counting
        users: dict[tuple[int, int], list[cp_model.IntVar]] = {}  # of the ports of (endpoint, switch)
        for pair, (one, other) in enumerate(counting.ends):
            wanted = counting.wanted[pair]
            mine = []
            for switch in range(counting.switches):
                most = min(wanted, counting.ports[one][switch], counting.ports[other][switch])
                if not most:
                    continue
                placed = self._variable(most, layout.placed[pair][switch])
                self.on[pair, switch] = placed
                mine.append(placed)
                for endpoint in (one, other):
                    users.setdefault((endpoint, switch), []).append(placed)
                self._keep(placed, most, min(most, counting.up[pair][switch]), layout.placed[pair][switch])
            if mine:
                self.model.add(sum(mine) <= wanted if self.short else sum(mine) == wanted)
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

    def solve(self, counted: Sequence[cp_model.IntVar], achieved: Callable[[], int], work: float) -> int | None:
        """The layout takes over what is found for the largest sum of `counted`, which is `achieved` by it. Return a
        bound on that sum."""
        self.model.maximize(cp_model.LinearExpr.sum(list(counted)))
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = SEED
        parameters.linearization_level = 2
        parameters.max_deterministic_time = work
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        now = achieved()
        before = [(pair, switch, self.layout.placed[pair][switch]) for pair, switch in self.on]
        self._take_over([(*place, int(solver.value(variable))) for place, variable in self.on.items()])
        if achieved() < now:  # it stops before it comes to the hint
            self._take_over(before)
        return int(solver.best_objective_bound + 1e-6)

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
    if layout.total < bounds.placed:
        program = _Program(layout)
        if (bound := program.solve([*program.on.values()], lambda: layout.total, WHOLE_WORK)) is not None:
            bounds = Bounds(min(bounds.placed, bound), bounds.kept)
    if layout.kept < bounds.kept:
        program = _Program(layout)
        if program.short:
            program.model.add(sum(program.on.values()) >= layout.total)
        if (bound := program.solve(program.kept, lambda: layout.kept, WHOLE_WORK)) is not None:
            bounds = Bounds(bounds.placed, min(bounds.kept, bound))
    return bounds
