"""What a wave's edges take together: the time in which all of them fit through everything. Pure."""

import numpy as np

from planner.sync_tree.model import Floats, Ints, SyncProblem


def seconds_together(problem: SyncProblem, src: Ints, dst: Ints, circuits: Ints, gigabits: Floats) -> float:
    """The time in which all of this fits through NICs, ToRs and its own circuits."""

    def slowest_s(keys: Ints, amounts: Floats, capacity_gbps: Floats) -> float:
        sums = np.bincount(keys, weights=amounts, minlength=len(capacity_gbps))
        used = sums > 0
        return float((sums[used] / capacity_gbps[used]).max(initial=0.0))

    between = problem.tor[src] != problem.tor[dst]
    out, into = problem.tor[src][between], problem.tor[dst][between]
    crossing = circuits > 0
    circuit_gbps: float | Floats = problem.link_gbps
    if problem.pairs is not None:
        circuit_gbps = problem.pairs.gbps[problem.pod[src[crossing]], problem.pod[dst[crossing]]]
    own_s = gigabits[crossing] / (circuits[crossing] * circuit_gbps)
    return max(
        slowest_s(src, gigabits, problem.nic_gbps),
        slowest_s(dst, gigabits, problem.nic_gbps),
        slowest_s(out, gigabits[between], problem.tor_gbps),
        slowest_s(into, gigabits[between], problem.tor_gbps),
        float(own_s.max(initial=0.0)),
    )
