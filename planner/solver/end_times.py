"""When the engines of a candidate fleet end, over sampled lengths. Pure."""

import numpy as np
from numpy.typing import NDArray

from planner.solver.candidates import CandidateFleet, added_s
from planner.solver.iterations import iterations
from planner.solver.problem import RUNNING, ProblemRequests


def decode_s(
    fleet: CandidateFleet,
    context_tokens: NDArray[np.int64],
    remaining_tokens: NDArray[np.int64],
    *,
    roughly: bool = False,
) -> NDArray[np.float64]:
    """[sample, instance], seconds until each instance's last request ends, by the step times of its configuration.

    `remaining_tokens` is [sample, request]. A request is admitted strictly in order, when a slot is free and its whole
    footprint fits; one that is larger than the KV cache runs alone. `roughly`: where they do not all fit at once, as
    many iterations as slots and room would take if they were never left unused, in a fraction of the time.
    """
    starts, order = fleet.starts, fleet.order
    filled = np.flatnonzero(np.diff(starts))
    ends_s = np.zeros((len(remaining_tokens), len(starts) - 1))
    if not len(filled):
        return ends_s
    limits = [fleet.limits[place] for place in filled.tolist()]
    alpha_s, beta_s, gamma_s = (
        np.array([getattr(limit, name) for limit in limits]) for name in ("alpha_s", "beta_s", "gamma_s")
    )
    slots = np.array([limit.max_sequences for limit in limits])
    room = np.array([limit.kv_capacity_tokens for limit in limits])
    cuts, sizes = starts[filled], np.diff(starts)[filled]
    at = np.repeat(np.arange(len(filled)), sizes)
    context, remaining = context_tokens[order], remaining_tokens[:, order]
    footprint = context + remaining
    work_s = np.add.reduceat(added_s(beta_s[at], gamma_s[at], context, remaining), cuts, axis=1)
    steps = np.maximum.reduceat(remaining, cuts, axis=1)  # [sample, filled instance]
    if roughly:
        by_slots = np.add.reduceat(remaining, cuts, axis=1) / slots
        by_room = np.add.reduceat(remaining * footprint, cuts, axis=1) / room
        ends_s[:, filled] = alpha_s * np.maximum(steps, np.maximum(by_slots, by_room)) + work_s
        return ends_s
    short = (sizes > slots) | (np.add.reduceat(footprint, cuts, axis=1) > room)
    if short.any():
        held = short[:, at]
        engine = np.nonzero(short)[1]
        begins = np.concatenate([[0], np.cumsum(sizes[engine])])
        steps[short] = iterations(footprint[held], remaining[held], begins, slots[engine], room[engine])
    ends_s[:, filled] = alpha_s * steps + work_s
    return ends_s


def ends_if_later_s(
    fleet: CandidateFleet,
    now: CandidateFleet,
    columns: ProblemRequests,
    remaining_tokens: NDArray[np.int64],
    wait_s: float,
    correction: float,
) -> NDArray[np.float64]:
    """[sample], seconds until all have ended if `now` decodes for `wait_s` more, and `fleet` then takes over what is
    left: nobody moves who has ended meanwhile, and the others are longer. Where nobody is left, `wait_s` at most.

    `remaining_tokens` is [sample, request]; `correction` multiplies decoding seconds.
    """
    context_tokens = columns.context_tokens
    grown = np.zeros(len(context_tokens), dtype=np.int64)
    for place, limit in enumerate(now.limits):
        held = now.requests_of(place)
        held = held[columns.state[held] == RUNNING]
        grown[held] = int(wait_s / (limit.step_s(len(held), int(context_tokens[held].sum())) * correction))
    at, instances = np.repeat(np.arange(len(fleet.instances)), np.diff(fleet.starts)), len(fleet.instances)
    before = np.bincount(at, context_tokens[fleet.order], minlength=instances)
    ends_s = np.full(len(remaining_tokens), wait_s)
    for row, sample in enumerate(remaining_tokens):
        left = np.maximum(sample - grown, 0)
        if not left.any():
            continue
        context = np.where(left > 0, context_tokens + grown, 0)
        decoding_s = decode_s(fleet, context, left[None])[0] * correction
        moved = np.bincount(at, context[fleet.order], minlength=instances) / np.maximum(before, 1.0)
        ends_s[row] += float((decoding_s + fleet.migration_s * moved + fleet.switch_s).max())
    return ends_s
