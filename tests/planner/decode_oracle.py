"""An instance decoding one iteration at a time, and the best of every way to spread few requests over equal ones."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product

from planner.cost import Pending
from planner.model import Configuration
from planner.profile import EngineProfile


def step_by_step_s(configuration: Configuration, requests: Sequence[Pending]) -> float:
    """Seconds until the last ends: admit in order while there is room, decode one token each, drop the ended."""
    queue = list(requests)
    running: list[list[int]] = []  # [held, left, footprint]
    elapsed_s = 0.0
    while queue or running:
        while queue and len(running) < configuration.max_sequences:
            footprint = queue[0].context_tokens + queue[0].remaining_tokens
            if sum(entry[2] for entry in running) + footprint > configuration.kv_capacity_tokens:
                break
            running.append([queue[0].context_tokens, queue[0].remaining_tokens, footprint])
            queue.pop(0)
        elapsed_s += configuration.step_s(len(running), sum(entry[0] for entry in running))
        running = [[held + 1, left - 1, footprint] for held, left, footprint in running if left > 1]
    return elapsed_s


def along_the_curve_s(profile: EngineProfile, requests: Sequence[Pending]) -> float:
    """The same with the profile's own step time, where KV tokens beyond the GPU's go to CPU memory."""
    queue = list(requests)
    running: list[list[int]] = []  # [held, left, footprint]
    elapsed_s = 0.0
    room = profile.kv_capacity_tokens + profile.spill_capacity_tokens
    while queue or running:
        while queue and len(running) < profile.max_sequences:
            footprint = queue[0].context_tokens + queue[0].remaining_tokens
            if sum(entry[2] for entry in running) + footprint > room:
                break
            running.append([queue[0].context_tokens, queue[0].remaining_tokens, footprint])
            queue.pop(0)
        held = sum(entry[0] for entry in running)
        elapsed_s += profile.step.at(len(running), held, profile.kv_capacity_tokens)
        running = [[held + 1, left - 1, footprint] for held, left, footprint in running if left > 1]
    return elapsed_s


def best_s(configuration: Configuration, instances: int, requests: Sequence[Pending]) -> float:
    """The soonest end over every spread of few requests over equal instances, admitted in every order."""

    @cache
    def alone_s(held: tuple[Pending, ...]) -> float:
        return min(step_by_step_s(configuration, order) for order in permutations(held))

    def spreads() -> Iterator[list[tuple[Pending, ...]]]:
        for places in product(range(instances), repeat=len(requests)):
            dealt = list(zip(sorted(requests), places, strict=True))
            yield [tuple(pending for pending, at in dealt if at == place) for place in range(instances)]

    return min(max(alone_s(held) for held in spread) for spread in spreads())
