"""How many circuits of each pair run over each switch: what is left of a placing problem once ports are only counted.

The healthy ports of one endpoint on one switch differ in nothing but the cross-connects that are up, and those use each
port once: of the circuits that a pair has on a switch, as many are kept as are up there. So counts decide everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counting:
    """Pairs and switches by number. Pairs differ from each other; every circuit that is up lies on healthy ports."""

    ends: Sequence[tuple[int, int]]  # [pair], endpoints
    wanted: Sequence[int]  # [pair], circuits
    ports: Sequence[Sequence[int]]  # [endpoint][switch], healthy ones
    up: Sequence[Sequence[int]]  # [pair][switch], circuits that are up

    @property
    def switches(self) -> int:
        return len(self.ports[0]) if self.ports else 0

    def most_placed(self) -> int:
        """No more circuits than this can be placed: by pair, by endpoint, and by switch."""
        sums = [sum(row) for row in self.ports]
        by_pair = sum(map(self._room, range(len(self.ends))))
        asked = [0] * len(self.ports)
        for pair, (one, other) in enumerate(self.ends):
            asked[one] += self._room(pair)
            asked[other] += self._room(pair)
        by_endpoint = sum(map(min, asked, sums)) // 2
        by_switch = sum(
            sum(min(row[switch], asks) for row, asks in zip(self.ports, asked, strict=True)) // 2
            for switch in range(self.switches)
        )
        return min(by_pair, by_endpoint, by_switch)

    def most_kept(self) -> int:
        """No more circuits than this can be kept."""
        return sum(min(wanted, sum(up)) for wanted, up in zip(self.wanted, self.up, strict=True))

    def _room(self, pair: int) -> int:
        one, other = self.ends[pair]
        return min(self.wanted[pair], sum(map(min, self.ports[one], self.ports[other])))


class CircuitLayout:
    """Circuits of each pair on each switch, as they are being placed."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting
        self.placed = [[0] * counting.switches for _ in counting.ends]  # [pair][switch], circuits
        self.missing = list(counting.wanted)  # [pair], circuits
        self.free = [list(row) for row in counting.ports]  # [endpoint][switch], ports; below 0 while one is being made
        # [endpoint][switch], the pairs there in the order in which they came
        self.there: list[list[dict[int, None]]] = [[{} for _ in row] for row in counting.ports]
        self.short: list[dict[int, None]] = [{} for _ in counting.ports]  # [endpoint], pairs that miss a circuit
        for pair, ends in enumerate(counting.ends):
            for endpoint in ends:
                self.short[endpoint][pair] = None
        self.kept = 0
        self.total = 0
        self.moves: list[tuple[int, int, bool]] = []  # pair, switch and whether it came, since somebody emptied it

    def go_back(self) -> None:
        """Undo `moves`."""
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
        """Kept circuits fewer once one of the pair moves: -1, 0 or 1."""
        row, up = self.placed[pair], self.counting.up[pair]
        return (row[source] <= up[source]) - (row[target] < up[target])

    def lost_by_swap(self, pair: int, other: int, switch: int) -> int:
        """Kept circuits fewer once one of the pair gives its place to another: -1, 0 or 1."""
        up = self.counting.up
        return (self.placed[pair][switch] <= up[pair][switch]) - (self.placed[other][switch] < up[other][switch])
