"""Choose the pairs to serve if ports do not suffice for all pairs. Has no side effects.

Pairs and endpoints are numbered as in `planner/fabric/greedy.py`.

For a given choice of pairs, it is optimal to give each pair one circuit, and every further circuit to the slowest pair.
While that pair is slower than in the optimum, it has fewer circuits than in the optimum. The other pairs at its ends
have no more circuits than in the optimum, so a port is free. Algorithm 3 can thus only be beaten by serving other
pairs. Its own choice of pairs is greedy: the largest pairs first. This module improves that choice. It limits the bytes
per circuit to those of the slowest pair in that choice, and then tries lower limits.

Under a limit of bytes per circuit, a pair needs a fixed number of ports at both ends. Better choices are then found
along chains, as in matching. A chain inserts a pair. At each end without enough ports, it removes another pair, inserts
a third pair at the end that the removal frees, and so on. The highest gains are computed for all endpoints and port
counts at once, layer by layer. Each chain is then applied to the current choice, and undone if it gains nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.fabric.greedy import Demanded, evenly, spend

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LOWER = (0.5, 0.8, 0.95, 1.0)  # limits tried, as factors of the slowest pair's bytes per circuit
WORK = 6_000_000  # array elements processed in total
CIRCUIT_WORK = 200  # cost of assigning one circuit, in elements
LAYERS = 4  # pairs that a chain removes in succession on each side
WIDEST = 8  # ports at one endpoint that a chain may need
TRIED = 24  # insertions, best first, before gains are recomputed
LEAST_GAIN = 1e-12
STEP_COST = 0.05  # cost per step of a chain, in pair values: short chains succeed more often
START_WORK = 60  # cost per pair of setting up a choice and evaluating it, in elements
LOOK_WORK, STEP_WORK = 8_000, 4_000  # fixed cost of calls, in elements
NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class ServedScore:
    pairs: int
    total_bytes: float
    slowest_bytes: float  # per circuit

    @classmethod
    def of(cls, demanded: Demanded, circuits: Mapping[int, int]) -> Self:
        return cls(
            len(circuits),
            math.fsum(demanded.total_bytes[pair] for pair in circuits),
            max((demanded.larger_bytes[pair] / count for pair, count in circuits.items()), default=0.0),
        )

    def no_worse(self, other: "ServedScore") -> bool:
        return (
            self.pairs >= other.pairs
            and self.total_bytes >= other.total_bytes
            and self.slowest_bytes <= other.slowest_bytes
        )

    def rank(self, bytes_first: bool) -> tuple[float, float, float]:
        if bytes_first:
            return self.total_bytes, self.pairs, -self.slowest_bytes
        return self.pairs, -self.slowest_bytes, self.total_bytes


def reselect(demanded: Demanded, reference: Mapping[int, int]) -> Mapping[int, int]:
    """Return the number of circuits of each served pair: a better choice than `reference`, or `reference` if none is
    found. Choices are compared by the number of served pairs (more is better), then by the time (less is better), then
    by the served bytes (more is better). The result is not worse than `reference` by any of these three measures."""
    return _Search(demanded, reference, reference, bytes_first=False).searched()


def most_bytes(demanded: Demanded, reference: Mapping[int, int], known: Mapping[int, int]) -> Mapping[int, int]:
    """Return the number of circuits of each served pair, chosen to serve as many bytes as possible and no fewer than
    `known`. The choice serves no fewer pairs and bytes than `reference`, and takes no more time. `known` must meet
    these conditions too."""
    return _Search(demanded, reference, known, bytes_first=True).searched()


class _Search:
    def __init__(
        self, demanded: Demanded, reference: Mapping[int, int], known: Mapping[int, int], bytes_first: bool
    ) -> None:
        self.demanded = demanded
        self.bytes_first = bytes_first
        self.least = ServedScore.of(demanded, reference)
        self.best, self.score = known, ServedScore.of(demanded, known)
        self.chains = PairChains(demanded, WORK)
        self.sum_bytes = math.fsum(demanded.total_bytes)
        self.share = share = np.asarray(demanded.total_bytes) / self.sum_bytes
        few = 1.0 / max(1, len(share))
        # The value of a pair: pairs before bytes, both, bytes before pairs.
        self.values = [1.0 + share, few + share, 1e-6 * few + share]

    def searched(self) -> Mapping[int, int]:
        if self.least.slowest_bytes > 0:  # tiny byte counts cannot be divided
            self._try(self.least.slowest_bytes, list(self.best))
            if self.bytes_first:
                self._try(self.least.slowest_bytes, evenly(self.demanded))
        while any(self._below(fraction * self.score.slowest_bytes) for fraction in LOWER):
            pass
        return self.best

    def _below(self, limit: float) -> bool:
        """Search for a better choice of pairs in which no circuit carries more than `limit` bytes. Return whether one
        was found."""
        limit = min(limit, math.nextafter(self.score.slowest_bytes, 0.0))
        if not self._possible(limit):
            return False
        largest_first = [pair for pair in self.demanded.largest_first if pair in self.best]
        return any(self._try(limit, start) for start in (largest_first, largest_first[::-1]))

    def _possible(self, limit_bytes: float) -> bool:
        """Return False if the required pairs and bytes cannot be served with at most `limit_bytes` per circuit. A
        result of True does not guarantee that they can."""
        if limit_bytes <= 0:
            return False
        pairs = self.least.pairs if self.bytes_first else self.score.pairs
        total_bytes = self.score.total_bytes if self.bytes_first else self.least.total_bytes
        most_pairs, most_bytes = (
            self.chains.most(limit_bytes, value) for value in (np.ones_like(self.share), self.share)
        )
        return most_pairs >= pairs - 1e-6 and most_bytes * self.sum_bytes >= total_bytes * (1 - 1e-6)

    def _try(self, limit_bytes: float, start: list[int]) -> bool:
        """Improve the choice of pairs `start` by all value functions in succession and by each value function
        separately. Return whether a better choice was found."""
        better = False
        refined = start
        for number, value in enumerate(self.values):
            if self.chains.work <= 0:
                break
            refined = self.chains.improved(limit_bytes, refined, value)
            better |= self._keep(refined)
            if number > 0:
                better |= self._keep(self.chains.improved(limit_bytes, start, value))
        return better

    def _keep(self, served: list[int]) -> bool:
        circuits = spend(self.demanded, served)
        self.chains.work -= CIRCUIT_WORK * sum(circuits.values())
        score = ServedScore.of(self.demanded, circuits)
        if not score.no_worse(self.least) or score.rank(self.bytes_first) <= self.score.rank(self.bytes_first):
            return False
        self.best, self.score = circuits, score
        return True


class PairChains:
    """Improves choices of pairs by chains until its work budget is spent. Arrays that are indexed by side contain each
    pair twice, once for each end."""

    def __init__(self, demanded: Demanded, work: int) -> None:
        self.work = work
        self.larger = np.asarray(demanded.larger_bytes, dtype=np.float64)
        endpoints, ends = np.unique(np.asarray(demanded.ends, dtype=np.int64), return_inverse=True)
        self.ends: Ints = ends.reshape(-1, 2)  # [pair], endpoints that have pairs
        self.end_list: list[list[int]] = self.ends.tolist()
        self.ports: Ints = np.asarray(demanded.ports, dtype=np.int64)[endpoints]
        tails = self.ends.T.ravel()
        order = np.argsort(tails, kind="stable")
        self.tail: Ints = tails[order]  # [side]
        self.head: Ints = self.ends[:, ::-1].T.ravel()[order]  # [side]
        self.pair: Ints = np.tile(np.arange(len(self.ends)), 2)[order]  # [side]
        self.starts: Ints = np.searchsorted(self.tail, np.arange(len(endpoints)))
        self.stops: Ints = np.append(self.starts[1:], len(self.tail))

    def improved(self, limit_bytes: float, start: Iterable[int], value: Floats) -> list[int]:
        """Return an improved choice of pairs with at most `limit_bytes` per circuit. It begins with the pairs of
        `start` that fit, taken in their order, and is then improved by chains. `value` contains the value of each
        pair."""
        need = needs(self.larger, limit_bytes, int(self.ports.max()))
        served = self._fitting(start, need.tolist())
        choice = _Choice(self, need, value, served)
        self.work -= START_WORK * len(need)
        while self.work > 0 and choice.improve():
            pass
        return np.flatnonzero(choice.served).tolist()

    def most(self, limit_bytes: float, value: Floats) -> float:
        """Return an upper bound on the total value of the pairs that can be served with at most `limit_bytes` per
        circuit. The bound is half of the sum, over endpoints, of the highest value that each endpoint could serve
        alone."""
        need = needs(self.larger, limit_bytes, int(self.ports.max()))[self.pair]
        ports, fits = self.ports[self.tail], need <= self.ports[self.tail]
        worth = np.where(fits, value[self.pair], 0.0)
        order = np.lexsort((-worth / need, self.tail))  # those that do not fit are last
        need, worth = need[order], worth[order]
        before = np.cumsum(need) - need
        before -= before[self.starts][self.tail]  # [side], ports that better sides of the same endpoint use
        part = np.clip((ports - before) / need, 0.0, 1.0)
        self.work -= START_WORK * len(self.ends)
        return float((part * worth).sum()) / 2

    def _fitting(self, start: Iterable[int], need: list[int]) -> list[int]:
        free = self.ports.tolist()
        fitting = []
        for pair in start:
            a, b = self.end_list[pair]
            if need[pair] <= min(free[a], free[b]):
                free[a] -= need[pair]
                free[b] -= need[pair]
                fitting.append(pair)
        return fitting


def needs(larger_bytes: Floats, limit_bytes: float, most: int) -> Ints:
    """Return the number of circuits that each pair needs so that no circuit carries more than `limit_bytes`. The number
    is at least 1, and it is `most` + 1 if a pair needs more than `most` circuits."""
    with np.errstate(over="ignore"):
        need = np.clip(np.ceil(larger_bytes / limit_bytes), 1, most + 1)
    need -= (need > 1) & (larger_bytes / np.maximum(need - 1, 1) <= limit_bytes)  # corrects rounding of the quotient
    need += (need <= most) & (larger_bytes / need > limit_bytes)
    return need.astype(np.int64)


class _Choice:
    def __init__(self, chains: PairChains, need: Ints, value: Floats, served: list[int]) -> None:
        self.chains = chains
        self.need = need  # [pair]
        self.value = value  # [pair]
        self.served: Bools = np.zeros(len(need), dtype=bool)  # [pair]
        self.served[served] = True
        self.free: Ints = chains.ports.copy()  # [endpoint]; below 0 only while a chain is applied
        np.subtract.at(self.free, chains.ends[served], need[served, None])
        self.wide = int(min(WIDEST, need.max() + 1))  # width of the tables; larger needs cannot be met
        self.side_need: Ints = need[chains.pair]
        self.side_value: Floats = value[chains.pair]
        self.touched: Bools = np.zeros(len(need), dtype=bool)  # [pair], changed by the chain being applied
        self.step_cost = STEP_COST * float(value.mean())

    def improve(self) -> bool:
        """Apply some of the chains with the highest gains. Returns whether the choice was improved."""
        self._evaluate()
        chains = self.chains
        capped = np.minimum(self.need, self.wide + 1)
        gain = self.value + self.room[chains.ends[:, 0], capped] + self.room[chains.ends[:, 1], capped]
        gain[self.served] = NEVER
        count = min(TRIED, len(gain))
        first = np.argpartition(-gain, count - 1)[:count]
        first = first[np.lexsort((first, -gain[first]))]
        better = False
        for pair in first[gain[first] > LEAST_GAIN].tolist():
            if chains.work > 0 and not self.served[pair]:
                better |= self._carry_out(pair)
        return better

    def _evaluate(self) -> None:
        """Compute the tables `room` and `refill`, which are indexed by endpoint and number of ports.

        `room` contains the gain, 0 or less, from freeing each number of ports. More than `wide` ports are never freed.
        `refill` contains the highest gain from using each number of free ports.
        """
        chains, wide, need, value = self.chains, self.wide, self.side_need, self.side_value
        head, tail, starts = chains.head, chains.tail, chains.starts
        served = self.served[chains.pair]
        capped = np.minimum(need, wide + 1)
        given = np.minimum(wide, self.free[head] + need)  # ports at the other end after the pair is removed
        there = self.free[:, None] >= np.arange(wide + 2)
        there[:, wide + 1] = False
        room = np.where(there, 0.0, NEVER)
        refill = np.zeros_like(room)
        for _ in range(LAYERS):
            put = np.where(served, NEVER, value + room[head, capped])
            for ports in range(1, wide + 1):
                most = np.maximum.reduceat(np.where(need <= ports, put, NEVER), starts)
                refill[:, ports] = np.maximum(0.0, most)
            taken = np.where(served, refill[head, given] - value - self.step_cost, NEVER)
            deeper = room.copy()
            for ports in range(1, wide + 1):
                rest = room[tail, np.maximum(ports - need, 0)]
                deeper[:, ports] = np.maximum.reduceat(taken + rest, starts)
            room = np.where(there, 0.0, deeper)
        self.room, self.refill, self.free_then = room, refill, self.free.copy()
        chains.work -= LOOK_WORK * wide + LAYERS * (wide + 2) * 2 * len(head)

    def _carry_out(self, pair: int) -> bool:
        """Insert the pair along the best chain and return True. If the chain gains nothing, undo it and return
        False."""
        self.chain: list[int] = []
        self._put(pair, served=True)
        done = all(self._clear(end, LAYERS) for end in self.chains.end_list[pair])
        gained = sum(self.value[each] if self.served[each] else -self.value[each] for each in self.chain)
        self.touched[self.chain] = False
        if done and gained > LEAST_GAIN:
            return True
        for each in self.chain:
            self._count(each, not self.served[each])
        return False

    def _put(self, pair: int, served: bool) -> None:
        self.chain.append(pair)
        self.touched[pair] = True
        self._count(pair, served)

    def _count(self, pair: int, served: bool) -> None:
        self.served[pair] = served
        need = self.need[pair] if served else -self.need[pair]
        for end in self.chains.end_list[pair]:
            self.free[end] -= need

    def _clear(self, end: int, layers: int) -> bool:
        """Remove pairs until the endpoint `end` uses no more ports than it has. Insert other pairs where ports become
        free, to a depth of `layers` insertions. Returns False if that is impossible."""
        chains, most = self.chains, self.wide + 1
        sides = slice(chains.starts[end], chains.stops[end])
        pairs, heads, need = chains.pair[sides], chains.head[sides], self.side_need[sides]
        while self.free[end] < 0:
            put = self._put_now(heads, need)
            refill = np.maximum(0.0, np.maximum.reduceat(put, chains.starts))
            rest = np.minimum(np.maximum(self.free_then[end] - self.free[end] - need, 0), most)
            lost = refill[heads] + self.room[end, rest] - self.side_value[sides]
            lost[~self.served[pairs] | self.touched[pairs]] = NEVER
            out = int(lost.argmax())
            if lost[out] == NEVER:
                return False
            self._put(int(pairs[out]), served=False)
            freed = int(heads[out])
            if layers > 0 and refill[freed] > 0:
                side = chains.starts[freed] + int(put[chains.starts[freed] : chains.stops[freed]].argmax())
                self._put(int(chains.pair[side]), served=True)
                if not self._clear(int(chains.head[side]), layers - 1):
                    return False
        return True

    def _put_now(self, freed: Ints, ports: Ints) -> Floats:
        """Return the gain of inserting each side's pair, as an array indexed by side. The gain is calculated as if each
        endpoint of `freed` had more free ports, by the number at the same place in `ports`."""
        chains = self.chains
        free = self.free.copy()
        free[freed] += ports
        wanted = np.minimum((self.free_then - self.free)[chains.head] + self.side_need, self.wide + 1)
        put: Floats = self.side_value + self.room[chains.head, np.maximum(wanted, 0)]
        put[(self.served | self.touched)[chains.pair] | (self.side_need > free[chains.tail])] = NEVER
        chains.work -= STEP_WORK + 8 * len(put)
        return put
