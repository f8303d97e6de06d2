"""In which order an instance admits requests that do not all run at once: few iterations, strictly first come first
served.

Whoever waits for room blocks all behind, so the order is that in which requests begin in a schedule without blocking:
listed so, each is admitted no later than there, as those before it have begun, and ended, no later either. Such a
schedule takes, whenever a request ends, the first that fits. Turned about in time it stays one, so that it can be
pushed together from either end in turn.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

BLOCK = 16  # requests that are passed over at once where none of them fits
TURNS = 2  # times for which a schedule is pushed together from both ends
ENOUGH = 1.001  # of the iterations that there must be at least


def admit(remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int) -> float:
    """Iterations until the last ends, first come first served: a walk over admissions and completions."""
    if max(footprint) > capacity:
        return math.inf
    held = list(accumulate(footprint))
    first = min(bisect_right(held, capacity), slots)
    ends = list(zip(remaining[:first], footprint, strict=False))
    so_far = 0, capacity - held[first - 1], max(remaining[:first])
    return float(admit_onwards(ends, remaining[first:], footprint[first:], slots, so_far))


def admit_onwards(
    running: list[tuple[int, int]],
    remaining: Sequence[int],
    footprint: Sequence[int],
    slots: int,
    so_far: tuple[int, int, int],
) -> int:
    """Return the iteration at which the last request ends that is `running` or still waits.

    `running`: (iteration at which it ends, footprint) of each. `so_far`: the iteration, the tokens that are free, and
    the last iteration of all that have begun.
    """
    now, free, last = so_far
    heapify(running)
    for left, room in zip(remaining, footprint, strict=True):
        while room > free or len(running) >= slots:
            now, freed = heappop(running)
            free += freed
        end = now + left
        heappush(running, (end, room))
        free -= room
        if end > last:
            last = end
    return last


def least(remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int) -> int:
    """Iterations that any order takes."""
    area = sum(map(int.__mul__, remaining, footprint))
    return max(max(remaining), -(-area // capacity), -(-sum(remaining) // slots))


def without_blocking(
    remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int
) -> tuple[list[int], list[int]]:
    """The places of the requests in the order in which they begin, and the iteration at which each then ends: of those
    that wait, always the first that fits. Each has to fit alone."""
    count = len(remaining)
    never = capacity + 1
    waiting = list(footprint)
    least_of = [min(waiting[start : start + BLOCK]) for start in range(0, count, BLOCK)]
    order: list[int] = []
    ended: list[int] = []
    ends: list[tuple[int, int]] = []  # iteration at which it ends, footprint
    now, free, first = 0, capacity, 0
    while len(order) < count:
        block = first
        while len(ends) < slots and block < len(least_of):
            if least_of[block] > free:
                block += 1
                continue
            start = block * BLOCK
            for place in range(start, min(start + BLOCK, count)):
                room = waiting[place]
                if room <= free:
                    free -= room
                    waiting[place] = never
                    order.append(place)
                    ended.append(now + remaining[place])
                    heappush(ends, (ended[-1], room))
                    if len(ends) >= slots:
                        break
            least_of[block] = min(waiting[start : start + BLOCK])
        while first < len(least_of) and least_of[first] == never:
            first += 1
        if len(order) < count:
            now, freed = heappop(ends)
            free += freed
            while ends and ends[0][0] == now:
                free += heappop(ends)[1]
    return order, ended


def orders(
    remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int
) -> Iterator[tuple[float, list[int]]]:
    """Iterations and the order that takes them, one try after another: most come to nothing, so the caller says when
    to stop. The requests come longest first; orders are of their places."""
    by_area = sorted(range(len(remaining)), key=lambda place: (-remaining[place] * footprint[place], place))
    for start in (list(range(len(remaining))), by_area):
        order = start
        for turn in range(2 * TURNS + 1):
            begun, ended = without_blocking(
                [remaining[place] for place in order], [footprint[place] for place in order], capacity, slots
            )
            if turn % 2 == 0:
                yield float(max(ended)), [order[place] for place in begun]
            # Turned about in time, what ended last begins first.
            last_first = sorted(range(len(ended)), key=lambda at: (-ended[at], at))
            order = [order[begun[at]] for at in last_first]
