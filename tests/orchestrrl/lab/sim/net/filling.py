"""A reference implementation of max-min fair rates with exact fractions, one link after the other."""

from fractions import Fraction

import numpy as np

from orchestrrl.lab.sim.net.fluid import FlowProblem

Rows = list[list[tuple[int, Fraction]]]  # [flow]: (link, share)


def fair_rates(capacity: list[Fraction], rows: Rows) -> list[Fraction | float]:
    rate: list[Fraction | float] = [float("inf")] * len(rows)
    waiting = {i for i, row in enumerate(rows) if row}
    left = list(capacity)
    while waiting:
        weight = [
            sum((share for i in waiting for at, share in rows[i] if at == link), Fraction(0))
            for link in range(len(left))
        ]
        level, link = min((left[link] / weight[link], link) for link in range(len(left)) if weight[link])
        for i in sorted(i for i in waiting if any(at == link for at, _ in rows[i])):
            rate[i] = level
            waiting.remove(i)
            for at, share in rows[i]:
                left[at] -= level * share
    return rate


def fair_ends(capacity: list[Fraction], rows: Rows, size: list[Fraction]) -> list[Fraction | float]:
    """Return the end time of each flow, all starting at 0, with rates recomputed after each end."""
    end: list[Fraction | float] = [float("inf")] * len(rows)
    left, now = list(size), Fraction(0)
    for i, row in enumerate(rows):
        if not row or not size[i]:
            end[i] = Fraction(0)
    going = [i for i in range(len(rows)) if end[i] != 0]
    while going:
        rate = [Fraction(each) for each in fair_rates(capacity, [rows[i] for i in going])]
        ends = [now + left[i] / rate[k] for k, i in enumerate(going) if rate[k]]
        if not ends:
            break
        until = min(ends)
        for k, i in enumerate(going):
            left[i] -= rate[k] * (until - now)
            if left[i] == 0:
                end[i] = until
        now, going = until, [i for i in going if left[i]]
    return end


def problem(capacity: list[Fraction], rows: Rows) -> FlowProblem:
    return FlowProblem(
        np.array([float(each) for each in capacity]),
        np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64),
        np.array([link for row in rows for link, _ in row], np.int64),
        np.array([float(share) for row in rows for _, share in row]),
    )
