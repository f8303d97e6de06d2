"""Order the requests of an instance for admission if they cannot all run at once, so that few iterations are needed.

Admission is strictly first come, first served.

A request that waits for room blocks all requests behind it. The order is therefore taken from a schedule without
blocking, which starts the first fitting request whenever a request ends. If requests are admitted in the order in which
they begin in that schedule, each is admitted no later than in the schedule, because its predecessors begin and end no
later either. A schedule reversed in time is again a schedule, so it can be compacted alternately from both ends.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

BLOCK = 16  # requests that are skipped together if none of them fits
TURNS = 2  # times that a schedule is compacted from both ends
ENOUGH = 1.001  # sufficient ratio of the iterations to their lower bound


def admit(remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int) -> float:
    """Return the number of iterations until the last request ends; inf if a request does not fit even alone.

    Requests are admitted first come, first served. `footprint` and `capacity` are in KV tokens. At most `slots`
    requests run at once.
    """
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
    """Return the iteration at which the last of all running and waiting requests ends.

    `running` lists (end iteration, footprint) of each running request; `remaining` and `footprint` describe the waiting
    requests. `so_far` contains the current iteration, the number of free tokens, and the latest end of all requests
    that have begun.
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
    """Return a lower bound on the number of iterations for any order of admission."""
    area = sum(map(int.__mul__, remaining, footprint))
    return max(max(remaining), -(-area // capacity), -(-sum(remaining) // slots))


def without_blocking(
    remaining: Sequence[int], footprint: Sequence[int], capacity: int, slots: int
) -> tuple[list[int], list[int]]:
    """Return a schedule without blocking: request indices in starting order, and the end iteration of each of these
    requests.

    The first waiting request that fits starts as soon as it fits. Each request must fit alone.
    """
    count = len(remaining)
    never = capacity + 1
    waiting = list(footprint)
    least_of = [min(waiting[start : start + BLOCK]) for start in range(0, count, BLOCK)]
    order: list[int] = []
    ended: list[int] = []
    ends: list[tuple[int, int]] = []  # end iteration, footprint
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
    """Yield candidate orders of admission as (number of iterations, request indices).

    Later orders are rarely better, so the caller decides when to stop. The requests must be sorted longest first.
    """
    by_area = sorted(range(len(remaining)), key=lambda place: (-remaining[place] * footprint[place], place))
    for start in (list(range(len(remaining))), by_area):
        order = start
        for turn in range(2 * TURNS + 1):
            begun, ended = without_blocking(
                [remaining[place] for place in order], [footprint[place] for place in order], capacity, slots
            )
            if turn % 2 == 0:
                yield float(max(ended)), [order[place] for place in begun]
            # Reversed in time, the request that ended last begins first.
            last_first = sorted(range(len(ended)), key=lambda at: (-ended[at], at))
            order = [order[begun[at]] for at in last_first]
