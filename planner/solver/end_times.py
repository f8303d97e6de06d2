"""Calculate when the engines of a candidate fleet finish, for sampled output lengths. Has no side effects.

Each engine admits its requests in order: the next request is admitted when a slot is free and its whole KV footprint
fits. Engines admit and complete requests independently of each other, so many engines are advanced together in each
step.
"""

import numpy as np
from numpy.typing import NDArray

from planner.solver.admission_order import admit_onwards
from planner.solver.candidates import CandidateFleet, added_s
from planner.solver.problem import RUNNING, ProblemRequests

Ints = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
FEW = 32  # up to this many engines, processing one after the other is as fast as joint steps
CARRIED = 0.7  # share of unfinished engines below which finished ones are removed from the arrays


def decode_s(
    fleet: CandidateFleet,
    context_tokens: NDArray[np.int64],
    remaining_tokens: NDArray[np.int64],
    *,
    roughly: bool = False,
) -> NDArray[np.float64]:
    """Return the time in seconds until each instance's last request ends, as an array indexed by sample and instance.

    `context_tokens` is indexed by request, and `remaining_tokens` by sample and request. A request larger than the KV
    cache runs alone. If `roughly` is True, instances whose requests do not fit at once are assumed to use all slots or
    all KV room throughout, which is much faster to compute.
    """
    starts, order = fleet.starts, fleet.order
    filled = np.flatnonzero(np.diff(starts))
    ends_s = np.zeros((len(remaining_tokens), len(starts) - 1))
    if not len(filled):
        return ends_s
    limits = [fleet.limits[place] for place in filled.tolist()]
    alpha_s, beta_s, gamma_s = (
        np.array([getattr(limit, name) for limit in limits]) for name in ("alpha_s", "beta_s", "gamma_s")
    )
    slots = np.array([limit.max_sequences for limit in limits])
    room = np.array([limit.kv_capacity_tokens for limit in limits])
    cuts, sizes = starts[filled], np.diff(starts)[filled]
    at = np.repeat(np.arange(len(filled)), sizes)
    context, remaining = context_tokens[order], remaining_tokens[:, order]
    footprint = context + remaining
    work_s = np.add.reduceat(added_s(beta_s[at], gamma_s[at], context, remaining), cuts, axis=1)
    steps = np.maximum.reduceat(remaining, cuts, axis=1)  # [sample, filled instance]
    if roughly:
        by_slots = np.add.reduceat(remaining, cuts, axis=1) / slots
        by_room = np.add.reduceat(remaining * footprint, cuts, axis=1) / room
        ends_s[:, filled] = alpha_s * np.maximum(steps, np.maximum(by_slots, by_room)) + work_s
        return ends_s
    short = (sizes > slots) | (np.add.reduceat(footprint, cuts, axis=1) > room)
    if short.any():
        held = short[:, at]
        engine = np.nonzero(short)[1]
        begins = np.concatenate([[0], np.cumsum(sizes[engine])])
        steps[short] = iterations(footprint[held], remaining[held], begins, slots[engine], room[engine])
    ends_s[:, filled] = alpha_s * steps + work_s
    return ends_s


def ends_if_later_s(
    fleet: CandidateFleet,
    now: CandidateFleet,
    columns: ProblemRequests,
    remaining_tokens: NDArray[np.int64],
    wait_s: float,
    correction: float,
) -> NDArray[np.float64]:
    """Return, for each sample, the time in seconds until all requests end if `fleet` replaces the fleet `now` after
    `wait_s`.

    Requests that end during `wait_s` are not moved. The contexts of the other running requests grow during that time.
    If all requests end within `wait_s`, the result is `wait_s`. `remaining_tokens` is indexed by sample and request,
    and `correction` multiplies decoding times.
    """
    context_tokens = columns.context_tokens
    grown = np.zeros(len(context_tokens), dtype=np.int64)
    for place, limit in enumerate(now.limits):
        held = now.requests_of(place)
        held = held[columns.state[held] == RUNNING]
        grown[held] = int(wait_s / (limit.step_s(len(held), int(context_tokens[held].sum())) * correction))
    at, instances = np.repeat(np.arange(len(fleet.instances)), np.diff(fleet.starts)), len(fleet.instances)
    before = np.bincount(at, context_tokens[fleet.order], minlength=instances)
    ends_s = np.full(len(remaining_tokens), wait_s)
    for row, sample in enumerate(remaining_tokens):
        left = np.maximum(sample - grown, 0)
        if not left.any():
            continue
        context = np.where(left > 0, context_tokens + grown, 0)
        decoding_s = decode_s(fleet, context, left[None])[0] * correction
        moved = np.bincount(at, context[fleet.order], minlength=instances) / np.maximum(before, 1.0)
        ends_s[row] += float((decoding_s + fleet.migration_s * moved + fleet.switch_s).max())
    return ends_s


def iterations(footprint: Ints, remaining: Ints, starts: Ints, slots: Ints, room: Ints) -> Ints:
    """Return, for each engine, the number of iterations until its last request ends.

    `footprint` and `remaining` are token counts indexed by request. `slots` and `room` (KV tokens) are indexed by
    engine. Engine i has the requests at `starts[i]:starts[i + 1]`, at least one, in order of admission. A footprint
    larger than the engine's `room` is treated as equal to it.
    """
    sizes = np.diff(starts)
    at = np.repeat(np.arange(len(sizes)), sizes)
    footprint = np.minimum(footprint, room[at])
    # Requests that find room and a slot immediately begin at iteration 0.
    together = np.cumsum(footprint)
    together -= np.repeat(together[starts[:-1]] - footprint[starts[:-1]], sizes)
    rank = np.arange(len(at)) - starts[at]
    begins = (together <= room[at]) & (rank < slots[at])
    first = np.add.reduceat(begins, starts[:-1], dtype=np.int64)
    last = np.maximum.reduceat(np.where(begins, remaining, 0), starts[:-1])
    walking = np.flatnonzero(first < sizes)
    if len(walking):
        place = np.full(len(sizes), -1)
        place[walking] = np.arange(len(walking))
        runs = np.flatnonzero(begins & (place[at] >= 0))
        walks = _Walks(footprint, remaining, len(walking), int(first[walking].max()))
        walks.enter(rank[runs], place[at[runs]], remaining[runs], footprint[runs])
        walks.count, walks.slots = first[walking], slots[walking]
        walks.free_tokens = room[walking] - together[starts[walking] + first[walking] - 1]
        walks.at, walks.stop, walks.last = starts[walking] + first[walking], starts[walking + 1], last[walking]
        last[walking] = walks.through()
    return last


class _Walks:
    """The state of the unfinished engines, with one column per engine. In each column, the first `count` rows are the
    running requests."""

    def __init__(self, footprint: Ints, remaining: Ints, engines: int, most: int) -> None:
        """Create the state of `engines` engines, each with initially at most `most` running requests."""
        self._footprint, self._remaining = footprint, remaining  # [request]
        self._rows = 1 << most.bit_length()
        # [row, engine], end iteration times number of rows, plus row: the minimum gives the first end and its row.
        # NEVER in free rows.
        self._ends = np.full((self._rows, engines), NEVER)
        self._held = np.zeros((self._rows, engines), dtype=np.int64)  # [row, engine], footprint
        self._now = np.zeros(engines, dtype=np.int64)  # [engine], like the following arrays
        self.count = self.slots = self.free_tokens = self.last = self._now
        self.at = self.stop = self._now  # the next request, and the end of the engine's requests

    def enter(self, row: Ints, engine: Ints, ends: Ints, footprint: Ints) -> None:
        self._ends[row, engine] = ends * self._rows + row
        self._held[row, engine] = footprint

    def through(self) -> Ints:
        """Run the remaining iterations, and return for each engine the iteration at which its last request ends."""
        ended = self.last.copy()
        engines = np.arange(len(ended))
        while len(engines) > FEW:
            going = self.at < self.stop
            if np.count_nonzero(going) < CARRIED * len(engines):
                ended[engines] = self.last
                engines = engines[going]
                self._keep(going)
                continue
            self._step(going)
        ended[engines] = self.last
        for place, engine in enumerate(engines.tolist()):
            ended[engine] = self._alone(place)
        return ended

    def _step(self, going: NDArray[np.bool_]) -> None:
        """Start the next request of each engine in the mask `going` that has a slot and KV room for it. An engine
        without a slot or room first ends one running request."""
        needs = self._footprint[np.minimum(self.at, len(self._footprint) - 1)]
        full = np.flatnonzero(going & ((needs > self.free_tokens) | (self.count >= self.slots)))
        if len(full):
            self._end_first(full)
        enters = np.flatnonzero(going & (needs <= self.free_tokens) & (self.count < self.slots))
        if not len(enters):
            return
        row, tokens = self.count[enters], needs[enters]
        if int(row.max()) == self._rows:
            self._double_rows()
        ends = self._now[enters] + self._remaining[self.at[enters]]
        self.enter(row, enters, ends, tokens)
        self.count[enters] += 1
        self.at[enters] += 1
        self.free_tokens[enters] -= tokens
        self.last[enters] = np.maximum(self.last[enters], ends)

    def _end_first(self, engines: Ints) -> None:
        """End, on each of `engines`, the running request that ends first, and move the engine's last occupied row into
        the freed row."""
        self._now[engines], row = np.divmod(self._ends.min(axis=0)[engines], self._rows)
        self.count[engines] -= 1
        rest = self.count[engines]
        self.free_tokens[engines] += self._held[row, engines]
        self._ends[row, engines] = self._ends[rest, engines] - rest + row
        self._held[row, engines] = self._held[rest, engines]
        self._ends[rest, engines] = NEVER

    def _double_rows(self) -> None:
        until, row = np.divmod(self._ends, self._rows)
        ends = np.where(self._ends == NEVER, NEVER, until * (2 * self._rows) + row)
        self._ends = np.concatenate([ends, np.full_like(ends, NEVER)])
        self._held = np.concatenate([self._held, np.zeros_like(self._held)])
        self._rows *= 2

    def _keep(self, engines: NDArray[np.bool_]) -> None:
        self._ends, self._held = self._ends[:, engines], self._held[:, engines]
        for name in ("_now", "count", "slots", "free_tokens", "at", "stop", "last"):
            setattr(self, name, getattr(self, name)[engines])

    def _alone(self, place: int) -> int:
        """Run the engine at index `place` by itself, and return the iteration at which its last request ends."""
        count, span = int(self.count[place]), slice(self.at[place], self.stop[place])
        ends = (self._ends[:count, place] // self._rows).tolist()
        return admit_onwards(
            list(zip(ends, self._held[:count, place].tolist(), strict=True)),
            self._remaining[span].tolist(),
            self._footprint[span].tolist(),
            int(self.slots[place]),
            (int(self._now[place]), int(self.free_tokens[place]), int(self.last[place])),
        )
