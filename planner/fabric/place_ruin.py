"""More circuits placed and kept where a problem is too large to be solved exactly: ruin and recreate.

Circuits that are missing, or are up and were given up, are put in by force; what stands in their way is taken off and
finds room anew by chains of moves. What is no worse stays (Schrimpf et al., Record Breaking Optimization Results Using
the Ruin and Recreate Principle, 2000).
"""

import random

from planner.fabric.place_chains import CircuitChains
from planner.fabric.place_counts import CircuitLayout

SEED = 1
MOST_FORCED = 8  # circuits put back at once
WORK = 600_000  # looks at a circuit that might move, in about a second


def ruin_and_recreate(layout: CircuitLayout, most_placed: int, most_kept: int, work: float) -> None:
    """At least as many circuits, and of as many at least as many kept. `work` is in about seconds."""
    rng = random.Random(SEED)
    chains = CircuitChains(layout, round(work * WORK))
    while chains.work_left > 0 and (layout.total, layout.kept) < (most_placed, most_kept):
        missing = _missing(layout) if layout.total < most_placed else []
        wanting = missing or _improvable(layout)
        if not wanting:
            return
        before = (layout.total, layout.kept)
        layout.moves = []
        for pair, switch in rng.sample(wanting, min(rng.randint(1, MOST_FORCED), len(wanting))):
            _force(layout, pair, switch, rng)
        chains.work_left -= len(layout.counting.ends)  # for looking what was given up
        chains.refill(sorted({pair for pair, _, _ in layout.moves}))
        if (layout.total, layout.kept) < before:
            layout.go_back()


def _missing(layout: CircuitLayout) -> list[tuple[int, int]]:
    """Pairs that miss a circuit, with the switches on which both ends have ports."""
    counting = layout.counting
    return [
        (pair, switch)
        for pair, missing in enumerate(layout.missing)
        if missing
        for switch, some in enumerate(map(min, *(counting.ports[end] for end in counting.ends[pair])))
        if some > layout.placed[pair][switch]
    ]


def _improvable(layout: CircuitLayout) -> list[tuple[int, int]]:
    """Pairs that might keep more, with the switches on which they might."""
    counting = layout.counting
    return [
        (pair, home)
        for pair, (row, up) in enumerate(zip(layout.placed, counting.up, strict=True))
        if any(up) and sum(map(min, row, up)) < counting.wanted[pair]
        for home, there in enumerate(up)
        if there > row[home]
    ]


def _force(layout: CircuitLayout, pair: int, home: int, rng: random.Random) -> None:
    """A circuit of the pair on `home`, whatever has to go for it."""
    up = layout.counting.up
    away = [switch for switch, count in enumerate(layout.placed[pair]) if switch != home and count > up[pair][switch]]
    if not layout.missing[pair]:
        if not away:
            return
        layout.take(pair, rng.choice(away))
    for endpoint in layout.counting.ends[pair]:
        if layout.free[endpoint][home] < 1:
            others = list(layout.there[endpoint][home])
            loose = [other for other in others if layout.placed[other][home] > up[other][home]]
            layout.take(rng.choice(loose or others), home)
    layout.add(pair, home)
