"""Measure and reduce the violation of equation 2 of the paper. By this equation, the ratio of each instance's KV
footprint to its KV capacity should lie in the band mu ± delta."""

import numpy as np

from planner.solver.columns import Floats, Ints, ProblemColumns
from planner.solver.evaluate import FleetPlacement, InstanceLoads, moves_s, place

STEPS = 400  # maximum number of requests moved
PARTNERS = 4  # instances tried as partner of the worst one


def violation(columns: ProblemColumns, placement: FleetPlacement) -> float:
    """Return the largest distance of an instance from the band. The result is 0 if all instances are in the band, or if
    the problem does not have a band."""
    if columns.problem.kv_balance is None or not len(placement.fleet):
        return 0.0
    return max(0.0, float(_Band(columns, placement, 0.0).misses().max()))


def balanced(columns: ProblemColumns, placement: FleetPlacement, limit_s: float) -> FleetPlacement:
    """Return a placement that violates the band less than `placement` and finishes by `limit_s`. Return `placement` if
    no such placement is found."""
    before = violation(columns, placement)
    if not before > 0:
        return placement
    band = _Band(columns, placement, limit_s)
    steps = 0
    while steps < STEPS and band.mend():
        steps += 1
    if not steps:
        return placement
    found = place(columns, placement.fleet, band.at)
    return found if found.makespan_s <= limit_s and violation(columns, found) < before else placement


class _Band(InstanceLoads):
    def __init__(self, columns: ProblemColumns, placement: FleetPlacement, limit_s: float) -> None:
        assert columns.problem.kv_balance is not None
        self.columns, self.fleet, self.limit_s = columns, placement.fleet, limit_s
        self.mu, self.delta = columns.problem.kv_balance.mu, columns.problem.kv_balance.delta
        self.at = placement.assigned()
        super().__init__(columns, placement.fleet, self.at)
        self.finish_s = placement.finish_s.copy()

    def misses(self) -> Floats:
        """Return the distance of each instance from the band. The distance is negative inside the band."""
        missed: Floats = np.abs(self.held / self.capacity - self.mu) - self.delta
        return missed

    def mend(self) -> bool:
        """Move one request to another instance, so that both instances then violate the band less than the worst
        instance did before.

        Return False if no such move is found.
        """
        missed = self.misses()
        worst = int(missed.argmax())
        if missed[worst] <= 0:
            return False
        loads = self.held / self.capacity
        over = bool(loads[worst] > self.mu)
        for partner in np.argsort(loads if over else -loads, kind="stable")[:PARTNERS].tolist():
            source, destination = (worst, partner) if over else (partner, worst)
            if partner != worst and self._move(source, destination, float(missed[worst])):
                return True
        return False

    def _move(self, source: int, destination: int, worst: float) -> bool:
        columns = self.columns
        here = np.flatnonzero(self.at == source)
        room = columns.footprint[here]
        after = [
            np.abs((self.held[instance] + sign * room) / self.capacity[instance] - self.mu) - self.delta
            for instance, sign in ((source, -1), (destination, 1))
        ]
        miss = np.maximum(*after)
        ends_s = self._ends_s(here, destination)
        fits = (self.held[destination] + room <= self.capacity[destination]) & (
            self.here[destination] < self.slots[destination]
        )
        possible = np.flatnonzero(fits & (miss < worst) & (ends_s <= self.limit_s))
        if not len(possible):
            return False
        best = int(possible[np.argmin(miss[possible])])
        request = int(here[best])
        self.at[request] = destination
        self.finish_s[destination] = ends_s[best]
        self.longest[destination] = max(self.longest[destination], columns.remaining[request])
        for instance, sign in ((source, -1), (destination, 1)):
            self.held[instance] += sign * columns.footprint[request]
            self.here[instance] += sign
        return True

    def _ends_s(self, requests: Ints, destination: int) -> Floats:
        """Return, for each request, the time at which the destination finishes if that request is added to it."""
        columns, kind = self.columns, self.fleet.configuration[destination]
        longer = np.maximum(columns.remaining[requests] - self.longest[destination], 0)
        moved_s = moves_s(columns, self.fleet, requests, np.full(len(requests), destination))
        ends_s: Floats = (
            self.finish_s[destination] + columns.work_s[kind, requests] + moved_s + columns.alpha_s[kind] * longer
        )
        return ends_s
