"""Better choices of pairs under a limit of bytes per circuit, found along chains as in matching.

Under such a limit a pair needs a fixed number of ports at both ends. A chain puts a pair in; at each end that lacks the
ports it takes one out, puts another one in at the end that this frees, and so on. What the best chains gain is found
for all endpoints and all numbers of ports at once, layer by layer; each is then carried out on the choice as it is, and
undone where it does not gain.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from planner.fabric.greedy import Demanded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LAYERS = 4  # of a chain: so many pairs are taken out, one after the other, on each side
WIDEST = 8  # ports that a pair may need to be put in
TRIED = 32  # insertions, the best first, before what chains gain is found anew
LEAST_GAIN = 1e-12
STEP_WORK = 2_000  # what a step of carrying out a chain counts for, in elements of arrays
NEVER = -np.inf


class Chains:
    """Improves choices until its work is spent. All arrays of sides have each pair twice, as seen from either end."""

    def __init__(self, demanded: Demanded, work: int) -> None:
        self.work = work
        self.larger = np.asarray(demanded.larger_bytes, dtype=np.float64)
        endpoints, ends = np.unique(np.asarray(demanded.ends, dtype=np.int64), return_inverse=True)
        self.ends: Ints = ends.reshape(-1, 2)  # [pair], endpoints that have pairs
        self.ports: Ints = np.asarray(demanded.ports, dtype=np.int64)[endpoints]
        tails = self.ends.T.ravel()
        order = np.argsort(tails, kind="stable")
        self.tail: Ints = tails[order]  # [side]
        self.head: Ints = self.ends[:, ::-1].T.ravel()[order]  # [side]
        self.pair: Ints = np.tile(np.arange(len(self.ends)), 2)[order]  # [side]
        self.starts: Ints = np.searchsorted(self.tail, np.arange(len(endpoints)))
        self.stops: Ints = np.append(self.starts[1:], len(self.tail))

    def improved(self, limit_bytes: float, start: Iterable[int], value: Floats) -> list[int]:
        """The pairs served: those of `start` that fit in their order, improved. `value` is what each counts for."""
        choice = _Choice(self, needs(self.larger, limit_bytes, int(self.ports.max())), value)
        for pair in start:
            a, b = self.ends[pair]
            if choice.need[pair] <= min(choice.free[a], choice.free[b]):
                choice.put(pair, True)
        while self.work > 0 and choice.improve():
            pass
        return np.flatnonzero(choice.served).tolist()


def needs(larger_bytes: Floats, limit_bytes: float, most: int) -> Ints:
    """[pair] the fewest circuits, at least one, that each carry no more than the limit; `most` + 1: more than that."""
    with np.errstate(over="ignore"):
        need = np.clip(np.ceil(larger_bytes / limit_bytes), 1, most + 1)
    need -= (need > 1) & (larger_bytes / np.maximum(need - 1, 1) <= limit_bytes)  # the quotient was rounded
    need += (need <= most) & (larger_bytes / need > limit_bytes)
    return need.astype(np.int64)


class _Choice:
    def __init__(self, chains: Chains, need: Ints, value: Floats) -> None:
        self.chains = chains
        self.need = need  # [pair]
        self.value = value  # [pair]
        self.served: Bools = np.zeros(len(need), dtype=bool)  # [pair]
        self.free: Ints = chains.ports.copy()  # [endpoint]; below 0 only while a chain is carried out
        self.wide = int(min(WIDEST, need.max()))
        self.side_need: Ints = need[chains.pair]
        self.side_value: Floats = value[chains.pair]

    def put(self, pair: int, served: bool) -> None:
        self.served[pair] = served
        self.free[self.chains.ends[pair]] -= self.need[pair] if served else -self.need[pair]

    def improve(self) -> bool:
        self._look()
        chains, wide = self.chains, self.wide
        gain = np.where(self.served | (self.need > wide), NEVER, self.value)
        capped = np.minimum(self.need, wide)
        gain += self.room[chains.ends[:, 0], capped] + self.room[chains.ends[:, 1], capped]
        count = min(TRIED, len(gain))
        first = np.argpartition(-gain, count - 1)[:count]
        first = first[np.lexsort((first, -gain[first]))]
        better = False
        for pair in first[gain[first] > LEAST_GAIN].tolist():
            if self.chains.work > 0 and not self.served[pair]:
                better |= self._carried_out(pair)
        return better

    def _look(self) -> None:
        """`room` [endpoint, ports]: the most that giving up so many ports leaves, 0 or less where they are taken from
        others; `refill` [endpoint, ports]: the most that can be gained with so many ports."""
        chains, wide, need, value = self.chains, self.wide, self.side_need, self.side_value
        head, tail, starts = chains.head, chains.tail, chains.starts
        served = self.served[chains.pair]
        puttable = ~served & (need <= wide)
        capped = np.minimum(need, wide)
        given = np.minimum(wide, self.free[head] + need)  # ports at the other end once the pair is taken out
        there = self.free[:, None] >= np.arange(wide + 1)
        room = np.where(there, 0.0, NEVER)
        refill = np.zeros_like(room)
        for _ in range(LAYERS):
            put = np.where(puttable, value + room[head, capped], NEVER)
            for ports in range(1, wide + 1):
                most = np.maximum.reduceat(put if ports == wide else np.where(need <= ports, put, NEVER), starts)
                refill[:, ports] = np.maximum(0.0, most)
            taken = np.where(served, refill[head, given] - value, NEVER)
            deeper = room.copy()
            for ports in range(1, wide + 1):
                rest = room[tail, np.maximum(ports - need, 0)]
                deeper[:, ports] = np.maximum.reduceat(taken + rest, starts)
            room = np.where(there, 0.0, deeper)
        self.room, self.refill, self.free_then = room, refill, self.free.copy()
        chains.work -= LAYERS * (wide + 2) * 2 * len(head)

    def _carried_out(self, pair: int) -> bool:
        """Put the pair in along the best chain, if that gains."""
        touched = {pair}
        self.put(pair, True)
        done = all(self._clear(int(end), touched, LAYERS) for end in self.chains.ends[pair])
        moved = np.fromiter(touched, dtype=np.int64)
        gained = float(np.where(self.served[moved], self.value[moved], -self.value[moved]).sum())
        if done and gained > LEAST_GAIN:
            return True
        for each in touched:
            self.put(each, not self.served[each])
        return False

    def _clear(self, end: int, touched: set[int], layers: int) -> bool:
        """Take pairs out until the endpoint uses no more ports than it has, and put others in where that frees some."""
        chains, wide = self.chains, self.wide
        sides = slice(chains.starts[end], chains.stops[end])
        pairs, heads, need = chains.pair[sides], chains.head[sides], self.side_need[sides]
        while self.free[end] < 0:
            chains.work -= STEP_WORK
            given = np.clip(self.free[heads] + need, 0, wide)
            rest = np.clip(self.free_then[end] - self.free[end] - need, 0, wide)
            lost = self.refill[heads, given] + self.room[end, rest] - self.side_value[sides]
            lost[~self.served[pairs] | np.isin(pairs, list(touched))] = NEVER
            out = int(lost.argmax())
            if lost[out] == NEVER:
                return False
            touched.add(int(pairs[out]))
            self.put(int(pairs[out]), False)
            if layers > 0 and not self._fill(int(heads[out]), touched, layers):
                return False
        return True

    def _fill(self, end: int, touched: set[int], layers: int) -> bool:
        """Put in what gains the most at an endpoint with ports. False where that did not work out."""
        chains, wide = self.chains, self.wide
        sides = slice(chains.starts[end], chains.stops[end])
        pairs, heads, need = chains.pair[sides], chains.head[sides], self.side_need[sides]
        wanted = np.clip(self.free_then[heads] - self.free[heads] + need, 0, wide)
        gain = self.side_value[sides] + self.room[heads, wanted]
        gain[self.served[pairs] | (need > min(wide, self.free[end])) | np.isin(pairs, list(touched))] = NEVER
        best = int(gain.argmax())
        if gain[best] <= 0:
            return True
        touched.add(int(pairs[best]))
        self.put(int(pairs[best]), True)
        return self._clear(int(heads[best]), touched, layers - 1)
