"""A simple and slow implementation of the fast loop's rules, with which tests compare the real one."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median

from balance_strategies import Problem

STALLED = math.inf


@dataclass
class Bench:
    """A worker whose requests are kept in mutable lists."""

    id: str
    running: list[tuple[int, str]]
    waiting: list[tuple[int, str]]
    free: int
    max_sequences: int
    rate: float
    stalled: bool
    aside: bool = field(default=False)

    @property
    def held(self) -> list[tuple[int, str]]:
        return self.running + self.waiting

    def copy(self) -> "Bench":
        return Bench(
            self.id,
            [*self.running],
            [*self.waiting],
            self.free,
            self.max_sequences,
            self.rate,
            self.stalled,
            self.aside,
        )


class Oracle:
    def __init__(self, problem: Problem) -> None:
        positive = [w.decode_tokens_per_s for w in problem.workers if w.decode_tokens_per_s]
        unknown = median(positive) if positive else 1.0
        self.theta = problem.theta
        self.benches = [
            Bench(
                id=w.id,
                running=[(r.context_tokens, r.id) for r in w.running],
                waiting=[(r.context_tokens, r.id) for r in w.waiting],
                free=w.kv_free_tokens,
                max_sequences=w.max_sequences,
                rate=w.decode_tokens_per_s or unknown,
                stalled=w.decode_tokens_per_s == 0 and bool(w.running),
            )
            for w in problem.workers
        ]
        everything = [context for bench in self.benches for context, _ in bench.held]
        self.fleet_mean = Fraction(sum(everything), len(everything)) if everything else None

    def cap(self, bench: Bench) -> int:
        contexts = [context for context, _ in bench.held]
        mean = Fraction(sum(contexts), len(contexts)) if contexts else self.fleet_mean
        if not mean:
            return max(1, bench.max_sequences)
        return max(1, min(bench.max_sequences, len(bench.running) + math.floor(bench.free / mean)))

    def index(self, bench: Bench) -> float:
        if not bench.held:
            return 0.0
        return STALLED if bench.stalled else len(bench.held) / self.cap(bench) / bench.rate

    def spread(self, benches: list[Bench]) -> float:
        indices = [self.index(bench) for bench in benches]
        if not indices:
            return 0.0
        return STALLED if STALLED in indices else max(indices) - min(indices)

    def after(self, source: Bench, destination: Bench, request: tuple[int, str]) -> tuple[Bench, Bench]:
        source, destination = source.copy(), destination.copy()
        if request in source.waiting:
            source.waiting.remove(request)
        else:
            source.running.remove(request)
            source.free += request[0]
        if len(destination.running) < destination.max_sequences and request[0] <= destination.free:
            destination.running.append(request)
            destination.free -= request[0]
        else:
            destination.waiting.append(request)
        return source, destination

    def feasible(self, source: Bench, destination: Bench, request: tuple[int, str]) -> bool:
        if request[0] > destination.free or destination.stalled:
            return False
        left, arrived = self.after(source, destination, request)
        if self.cap(arrived) < self.cap(destination) and self.cap(arrived) < len(arrived.held):
            return False
        if source.stalled:
            return True
        others = [bench for bench in self.benches if bench.id not in (source.id, destination.id)]
        return self.spread([*others, left, arrived]) < self.spread(self.benches)

    def step(self, moved: set[str]) -> tuple[str, str, str, str] | None:
        """Apply and return the next move; return None if every worker is set aside."""
        while sources := [bench for bench in self.benches if not bench.aside]:
            source = min(sources, key=lambda bench: (-self.index(bench), bench.id))
            queue = [*sorted(source.waiting), *sorted(source.running)]
            for request in (request for request in queue if request[1] not in moved):
                others = [bench for bench in self.benches if bench.id != source.id]
                for destination in sorted(others, key=lambda bench: (self.index(bench), bench.id)):
                    if self.feasible(source, destination, request):
                        state = "waiting" if request in source.waiting else "running"
                        pair = self.after(source, destination, request)
                        self.benches = [next((b for b in pair if b.id == bench.id), bench) for bench in self.benches]
                        return request[1], source.id, destination.id, state
            source.aside = True
        return None

    def run(self) -> tuple[list[tuple[str, str, str, str]], str]:
        """Return all moves and the reason why they stopped."""
        moves: list[tuple[str, str, str, str]] = []
        moved: set[str] = set()
        while self.spread(self.benches) > self.theta:
            move = self.step(moved)
            if move is None:
                return moves, "no_feasible_move"
            moves.append(move)
            moved.add(move[0])
        return moves, "within_theta"

    def indices(self) -> dict[str, float | None]:
        return {b.id: None if self.index(b) == STALLED else self.index(b) for b in self.benches}
