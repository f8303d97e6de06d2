"""Make room for circuits by chains of moves, in which each circuit moves into the port that the next circuit leaves.

The search uses only counts of ports and circuits, because the healthy ports of one endpoint on one switch differ only
in the cross-connects that are up. A pair can keep as many circuits on a switch as it has there now.

A chain begins with a circuit on a switch where one of its endpoints has no free port. Another circuit of that endpoint
moves from this switch to one where the endpoint has a free port. If the far end of the moved circuit has no free port
there, a circuit of the far end moves next. The chain ends at a far end with a free port. With two switches, these
chains are the Kempe chains of edge colouring. If no chain of moves is found, a chain may also drop a circuit and put a
missing circuit in its place, like an augmenting path of a matching. The search prefers chains that drop the fewest kept
circuits.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

NOWHERE = -1
BATCH = 8  # pairs per search
Move = tuple[int, int, int]  # pair, from switch, to switch; NOWHERE means not placed
# an endpoint, the switch on which it is one port short, and the switch that it has just left
_State = tuple[int, int, int]
_Came = dict[_State, tuple[_State | None, tuple[Move, ...]]]
LOSS = 1 << 12  # cost of dropping a kept circuit, in moves: always more than a longer chain
MOST_LOST = (0, 1, 2, 1 << 20)  # limits on kept circuits dropped per chain, tried in ascending order


@dataclass(frozen=True, slots=True)
class Counting:
    """The wanted circuits, healthy ports and current circuits of one part of a placing problem. Pairs, endpoints and
    switches are numbered. Pairs are distinct, and all current circuits are on healthy ports."""

    ends: Sequence[tuple[int, int]]  # [pair], its endpoints
    wanted: Sequence[int]  # [pair], circuits
    ports: Sequence[Sequence[int]]  # [endpoint][switch], healthy ports
    up: Sequence[Sequence[int]]  # [pair][switch], circuits that are up

    @property
    def switches(self) -> int:
        return len(self.ports[0]) if self.ports else 0

    def most_placed(self) -> int:
        """Return an upper bound on the number of circuits that can be placed: the lowest of the bounds by pairs, by
        endpoints and by switches."""
        sums = [sum(row) for row in self.ports]
        by_pair = sum(map(self._room, range(len(self.ends))))
        demand = [0] * len(self.ports)
        for pair, (one, other) in enumerate(self.ends):
            demand[one] += self._room(pair)
            demand[other] += self._room(pair)
        by_endpoint = sum(map(min, demand, sums)) // 2
        by_switch = sum(
            sum(min(row[switch], need) for row, need in zip(self.ports, demand, strict=True)) // 2
            for switch in range(self.switches)
        )
        return min(by_pair, by_endpoint, by_switch)

    def most_kept(self) -> int:
        """Return an upper bound on the number of current circuits that can be kept."""
        return sum(min(wanted, sum(up)) for wanted, up in zip(self.wanted, self.up, strict=True))

    def _room(self, pair: int) -> int:
        one, other = self.ends[pair]
        return min(self.wanted[pair], sum(map(min, self.ports[one], self.ports[other])))


class CircuitLayout:
    """The number of circuits of each pair on each switch during placement."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting
        self.placed = [[0] * counting.switches for _ in counting.ends]  # [pair][switch], circuits
        self.missing = list(counting.wanted)  # [pair], circuits
        # [endpoint][switch], ports; below 0 while a port is being freed
        self.free = [list(row) for row in counting.ports]
        # [endpoint][switch], the pairs there in order of arrival
        self.there: list[list[dict[int, None]]] = [[{} for _ in row] for row in counting.ports]
        self.short: list[dict[int, None]] = [{} for _ in counting.ports]  # [endpoint], pairs that lack a circuit
        for pair, ends in enumerate(counting.ends):
            for endpoint in ends:
                self.short[endpoint][pair] = None
        self.kept = 0
        self.total = 0
        # pair, switch and whether it was added, since the caller cleared it
        self.moves: list[tuple[int, int, bool]] = []

    def go_back(self) -> None:
        """Undo the changes that are recorded in the attribute `moves`."""
        for pair, switch, came in reversed(self.moves.copy()):
            (self.take if came else self.add)(pair, switch)
        self.moves = []

    def add(self, pair: int, switch: int) -> None:
        row = self.placed[pair]
        self.kept += row[switch] < self.counting.up[pair][switch]
        row[switch] += 1
        self.missing[pair] -= 1
        self.moves.append((pair, switch, True))
        self.total += 1
        for endpoint in self.counting.ends[pair]:
            self.free[endpoint][switch] -= 1
            self.there[endpoint][switch][pair] = None
            if not self.missing[pair]:
                del self.short[endpoint][pair]

    def take(self, pair: int, switch: int) -> None:
        row = self.placed[pair]
        row[switch] -= 1
        self.kept -= row[switch] < self.counting.up[pair][switch]
        self.missing[pair] += 1
        self.moves.append((pair, switch, False))
        self.total -= 1
        for endpoint in self.counting.ends[pair]:
            if self.missing[pair] > 0:
                self.short[endpoint][pair] = None
            self.free[endpoint][switch] += 1
            if not row[switch]:
                del self.there[endpoint][switch][pair]

    def lost(self, pair: int, source: int, target: int) -> int:
        """Return how many fewer circuits are kept if a circuit of the pair moves from switch `source` to switch
        `target`: -1, 0 or 1."""
        row, up = self.placed[pair], self.counting.up[pair]
        return (row[source] <= up[source]) - (row[target] < up[target])

    def lost_by_swap(self, pair: int, other: int, switch: int) -> int:
        """Return how many fewer circuits are kept if a circuit of the pair `other` replaces a circuit of `pair` on the
        switch: -1, 0 or 1."""
        up = self.counting.up
        return (self.placed[pair][switch] <= up[pair][switch]) - (self.placed[other][switch] < up[other][switch])


class CircuitChains:
    """Adds circuits to a layout by chains of moves. The search is limited by the number of inspected circuits
    (`work_left`), not by time, so its result is the same on every machine."""

    def __init__(self, layout: CircuitLayout, work: int) -> None:
        self.layout = layout
        self.work_left = work
        self.most_placed = layout.counting.most_placed()
        self._most_lost = MOST_LOST[0]
        self._swapping = False

    def keep(self) -> None:
        """Keep current circuits that are wanted. If a pair has more circuits than are wanted, keep those on the
        switches with the most circuits of the pair."""
        layout = self.layout
        for pair, up in enumerate(layout.counting.up):
            if not any(up):
                continue
            order = sorted(range(len(up)), key=lambda switch: (-up[switch], switch))
            for switch in order:
                for _ in range(min(up[switch], layout.missing[pair])):
                    layout.add(pair, switch)

    def fill(self, gently: bool = True) -> None:
        """Place every missing circuit that fits, directly or after a chain of moves. If `gently` is True, chains that
        drop no kept circuit are tried first, which may leave less room for other circuits."""
        for pair in sorted(range(len(self.layout.missing)), key=self._narrowness):
            while self.layout.missing[pair] and self._put(pair):
                pass
        self.refill(range(len(self.layout.missing)), MOST_LOST if gently else MOST_LOST[-1:])

    def refill(self, pairs: Sequence[int], most_lost: Sequence[int] = MOST_LOST) -> None:
        """Place the missing circuits of `pairs` by chains of moves. `most_lost` lists limits on the number of kept
        circuits that a chain may drop, in the order in which they are tried."""
        for self._swapping, self._most_lost in product((False, True), most_lost):
            # otherwise this is much work for little gain
            between = not self._swapping or self._most_lost == most_lost[-1]
            while self._insert_batches(pairs) or (between and self._insert_first_between(pairs)):
                pass

    def _insert_batches(self, pairs: Sequence[int]) -> bool:
        short = [pair for pair in pairs if self.layout.missing[pair] > 0]
        found = False
        for start in range(0, len(short), BATCH):
            while self._insert_some(short[start : start + BATCH]):
                found = True
        return found

    def _insert_some(self, pairs: Sequence[int]) -> bool:
        """Place one missing circuit of `pairs`, directly if possible, otherwise by the chain that drops the fewest kept
        circuits. Return whether a circuit was placed."""
        layout = self.layout
        if self.done:
            return False
        starts: dict[_State, Move] = {}
        for pair in pairs:
            if layout.missing[pair] < 1:
                continue
            one, other = layout.counting.ends[pair]
            for full, free in ((other, one), (one, other)):
                for switch, ports in enumerate(layout.free[free]):
                    if ports > 0 and layout.counting.ports[full][switch]:
                        if layout.free[full][switch] > 0:
                            layout.add(pair, switch)
                            return True
                        starts.setdefault((full, switch, NOWHERE), (pair, NOWHERE, switch))
        chain = self._chain(starts)
        return chain is not None and self._apply(chain, None)

    @property
    def done(self) -> bool:
        return self.layout.total >= self.most_placed or self.work_left <= 0

    def _insert_first_between(self, pairs: Sequence[int]) -> bool:
        return any(self.layout.missing[pair] > 0 and not self.done and self._insert_between(pair) for pair in pairs)

    def _narrowness(self, pair: int) -> tuple[int, int]:
        one, other = self.layout.counting.ends[pair]
        free = self.layout.free
        return sum(map(min, free[one], free[other])), pair

    def _put(self, pair: int) -> bool:
        """Place one circuit of the pair on the switch with the most free ports at both ends. Return False if no switch
        has free ports at both ends."""
        one, other = (self.layout.free[endpoint] for endpoint in self.layout.counting.ends[pair])
        best, most = NOWHERE, 0
        for switch, ports in enumerate(one):
            if ports > 0 and other[switch] > 0 and ports + other[switch] > most:
                best, most = switch, ports + other[switch]
        if best == NOWHERE:
            return False
        self.layout.add(pair, best)
        return True

    def _insert_between(self, pair: int) -> bool:
        """Place one circuit of the pair on a switch where neither end has a free port, after freeing a port at each
        end. Return False if this is possible on no switch."""
        one, other = self.layout.counting.ends[pair]
        both = map(min, self.layout.counting.ports[one], self.layout.counting.ports[other])
        return any(some and self._put_between(pair, switch) for switch, some in enumerate(both))

    def _put_between(self, pair: int, switch: int) -> bool:
        """Place one circuit of the pair on the switch, and free a port at each end that has none. If that fails, undo
        all changes and return False."""
        done: list[Move] = []
        self._do((pair, NOWHERE, switch), done)
        ends = self.layout.counting.ends[pair]
        for endpoint in ends:
            if self.layout.free[endpoint][switch] < 0:
                chain = self._chain({(endpoint, switch, NOWHERE): None})
                if chain is None or not self._apply(chain, done):
                    break
        if min(self.layout.free[endpoint][switch] for endpoint in ends) < 0:
            self._undo(done)
            return False
        return True

    def _chain(self, starts: Mapping[_State, Move | None]) -> list[Move] | None:
        """Return the chain that begins in one of the states `starts` and drops the fewest kept circuits; among equals,
        the shortest one. Return None if no chain is found. `starts` maps each of these states to the first move of the
        chain, or to None if that move is already made."""
        layout = self.layout
        ends, free, there, ports = layout.counting.ends, layout.free, layout.there, layout.counting.ports
        queue: list[tuple[int, int, int, int, int]] = []
        came: _Came = {}
        cost: dict[tuple[int, int, int], int] = {}
        pushed = 0
        for state, first in starts.items():
            cost[state], came[state] = 0, (None, (first,) if first else ())
            heapq.heappush(queue, (0, pushed, *state))
            pushed += 1
        while queue and self.work_left > 0:
            spent, _, at, full, left = heapq.heappop(queue)
            state = (at, full, left)
            if at == NOWHERE:
                return self._trace(came, state)
            if cost[state] < spent:
                continue
            room = [switch for switch, some in enumerate(free[at]) if some > 0 and switch != full]
            if left != NOWHERE and left not in room and left != full:
                room.append(left)
            for pair in there[at][full]:
                one, other = ends[pair]
                far = other if one == at else one
                for switch in room:
                    self.work_left -= 1
                    if not ports[far][switch]:
                        continue
                    next_cost = spent + 1 + LOSS * max(0, layout.lost(pair, full, switch))
                    # Solved if the far end has a port; otherwise the far end is one port short on that switch.
                    then = (NOWHERE, pair, switch) if free[far][switch] > 0 else (far, switch, full)
                    if next_cost < min(cost.get(then, 1 << 60), LOSS * (self._most_lost + 1)):
                        cost[then], came[then] = next_cost, (state, ((pair, full, switch),))
                        heapq.heappush(queue, (next_cost, pushed, *then))
                        pushed += 1
                # Or the circuit is dropped, and one that its far end lacks takes its place.
                for other in layout.short[far] if self._swapping else ():
                    self.work_left -= 1
                    one, last = ends[other]
                    last = one if last == far else last
                    if other == pair or not ports[last][full]:
                        continue
                    next_cost = spent + 2 + LOSS * max(0, layout.lost_by_swap(pair, other, full))
                    then = (NOWHERE, other, full) if free[last][full] > 0 else (last, full, NOWHERE)
                    if next_cost < min(cost.get(then, 1 << 60), LOSS * (self._most_lost + 1)):
                        cost[then] = next_cost
                        came[then] = (state, ((pair, full, NOWHERE), (other, NOWHERE, full)))
                        heapq.heappush(queue, (next_cost, pushed, *then))
                        pushed += 1
        return None

    def _trace(self, came: _Came, state: _State | None) -> list[Move]:
        moves: list[Move] = []
        while state is not None:
            state, step = came[state]
            moves += reversed(step)
        return moves[::-1]

    def _apply(self, moves: list[Move], done: list[Move] | None) -> bool:
        """Apply the moves, append them to `done` if it is given, and return True. If the chain crosses itself, so that
        it uses a circuit or a port twice, change nothing and return False."""
        made: list[Move] = []
        for move in moves:
            if move[1] != NOWHERE and not self.layout.placed[move[0]][move[1]]:
                self._undo(made)
                return False
            self._do(move, made)
        for pair, _, target in moves if done is None else moves[1:]:
            ends = self.layout.counting.ends[pair] if target != NOWHERE else ()
            if self.layout.missing[pair] < 0 or any(self.layout.free[endpoint][target] < 0 for endpoint in ends):
                self._undo(made)
                return False
        if done is not None:
            done += made
        return True

    def _do(self, move: Move, done: list[Move]) -> None:
        pair, source, target = move
        if source != NOWHERE:
            self.layout.take(pair, source)
        if target != NOWHERE:
            self.layout.add(pair, target)
        done.append(move)

    def _undo(self, done: list[Move]) -> None:
        while done:
            pair, source, target = done.pop()
            self._do((pair, target, source), [])
