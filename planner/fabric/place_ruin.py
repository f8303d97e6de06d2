"""More circuits kept where a problem is too large to be solved exactly: ruin and recreate, again and again.

Circuits that are up and were given up are put back by force, what stands in their way is taken off and finds room
anew by chains of moves. What is no worse stays (Schrimpf et al., Record Breaking Optimization Results Using the Ruin
and Recreate Principle, 2000).
"""

import random

from planner.fabric.place_chains import Chains
from planner.fabric.place_counts import Layout

SEED = 1
MOST_FORCED = 8  # circuits put back at once
WORK = 600_000  # looks at a circuit that might move, in about a second


def ruin_and_recreate(layout: Layout, most_kept: int, work: float) -> None:
    """At least as many circuits, and of as many at least as many kept. `work` is in about seconds."""
    rng = random.Random(SEED)
    chains = Chains(layout, round(work * WORK))
    while chains.work_left > 0 and layout.kept < most_kept:
        given_up = _given_up(layout)
        if not given_up:
            return
        before = (layout.total, layout.kept)
        layout.moves = []
        for pair, home in rng.sample(given_up, min(rng.randint(1, MOST_FORCED), len(given_up))):
            _force(layout, pair, home, rng)
        chains.work_left -= len(layout.counting.ends)  # for looking what was given up
        chains.refill()
        if (layout.total, layout.kept) < before:
            layout.go_back()


def _given_up(layout: Layout) -> list[tuple[int, int]]:
    """Pairs that might keep more, with the switches on which they might."""
    counting = layout.counting
    return [
        (pair, home)
        for pair, (row, up) in enumerate(zip(layout.placed, counting.up, strict=True))
        if any(up) and sum(map(min, row, up)) < counting.wanted[pair]
        for home, there in enumerate(up)
        if there > row[home]
    ]


def _force(layout: Layout, pair: int, home: int, rng: random.Random) -> None:
    up = layout.counting.up
    if layout.placed[pair][home] >= up[pair][home]:
        return
    away = [switch for switch, count in enumerate(layout.placed[pair]) if count > up[pair][switch]]
    if away:
        layout.take(pair, rng.choice(away))
    elif not layout.missing[pair]:
        return
    for endpoint in layout.counting.ends[pair]:
        if layout.free[endpoint][home] < 1:
            others = list(layout.there[endpoint][home])
            loose = [other for other in others if layout.placed[other][home] > up[other][home]]
            layout.take(rng.choice(loose or others), home)
    layout.add(pair, home)
