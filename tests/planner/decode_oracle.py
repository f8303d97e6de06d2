"""Simulate a decoding instance, one iteration at a time or, for many requests, from one change of the batch to the
next."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from planner_builders import RemainingWork

from planner.cost.profile import EngineProfile
from planner.model import Configuration


class DoesNotFit(ValueError):
    """Raised for a request that an instance of the configuration can never admit."""


def step_by_step_s(configuration: Configuration, requests: Sequence[RemainingWork]) -> float:
    """Return the seconds until the last request ends: admit in order, decode one token each, drop ended ones."""
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


def along_the_curve_s(profile: EngineProfile, requests: Sequence[RemainingWork]) -> float:
    """Return the same with the profile's own step time, with KV tokens beyond the GPU's in CPU memory."""
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


def decode_s(configuration: Configuration, requests: Sequence[RemainingWork]) -> float:
    """Return the seconds until the last of `requests` ends, admitted strictly in the given order.

    A request is admitted when fewer than `max_sequences` run and its footprint fits. Raises DoesNotFit.
    """
    iterations = _iterations(configuration, requests)
    return configuration.alpha_s * iterations + sum(configuration.work_s(*pending) for pending in requests)


def _iterations(configuration: Configuration, requests: Sequence[RemainingWork]) -> int:
    """Return the decode iterations until all have ended, from one admission or completion to the next."""
    ends: list[tuple[int, int]] = []  # heap of (iteration at which it ends, footprint)
    now = free_tokens = 0
    free_tokens = configuration.kv_capacity_tokens
    last = 0
    for pending in requests:
        footprint = pending.footprint_tokens
        if footprint > configuration.kv_capacity_tokens:
            raise DoesNotFit(
                f"a request of {footprint} tokens does not fit into a KV cache of {configuration.kv_capacity_tokens}"
            )
        while len(ends) >= configuration.max_sequences or footprint > free_tokens:
            now, freed = heappop(ends)
            free_tokens += freed
        end = now + pending.remaining_tokens
        heappush(ends, (end, footprint))
        free_tokens -= footprint
        last = max(last, end)
    return last


def curve_decode_s(profile: EngineProfile, requests: Sequence[RemainingWork]) -> float:
    """Return the seconds as `decode_s` does, with the step time's own curve and with spilled KV tokens.

    A request is admitted if its footprint fits in GPU and CPU memory with the others. Raises DoesNotFit.
    """
    step, capacity = profile.step, profile.kv_capacity_tokens
    total_s = 0.0
    for stretch in _stretches(capacity + profile.spill_capacity_tokens, profile.max_sequences, requests):
        total_s += stretch.iterations * step.base_s.at(stretch.sequences)
        total_s += step.kv_s_per_token * stretch.read_tokens()
        total_s += step.spill_s_per_token * stretch.read_tokens(beyond=capacity)
    return total_s


class _Stretch(NamedTuple):
    """A sequence of iterations without admissions or completions."""

    iterations: int
    sequences: int
    kv_tokens: int  # before the first iteration

    def read_tokens(self, beyond: int = 0) -> float:
        """Return the KV tokens beyond `beyond`, summed over the iterations; each adds one token per sequence."""
        started = max(0, -(-(beyond - self.kv_tokens) // self.sequences))  # the first iteration with tokens beyond
        count = max(0, self.iterations - started)
        first = self.kv_tokens + started * self.sequences - beyond
        return count * first + self.sequences * count * (count - 1) / 2


def _stretches(room_tokens: int, max_sequences: int, requests: Sequence[RemainingWork]) -> Iterator[_Stretch]:
    """Yield the stretches between admissions, strictly in order, and completions."""
    running: list[tuple[int, int]] = []  # heap of (iteration at which it ends, footprint)
    now = held_tokens = kv_tokens = 0
    waiting = list(reversed(requests))
    while waiting or running:
        while waiting and len(running) < max_sequences:
            footprint = waiting[-1].footprint_tokens
            if footprint > room_tokens:
                raise DoesNotFit(f"a request of {footprint} tokens does not fit into a KV cache of {room_tokens}")
            if footprint + held_tokens > room_tokens:
                break
            context, remaining = waiting.pop()
            heappush(running, (now + remaining, footprint))
            held_tokens += footprint
            kv_tokens += context
        iterations, sequences = running[0][0] - now, len(running)
        yield _Stretch(iterations, sequences, kv_tokens)
        now += iterations
        kv_tokens += iterations * sequences
        while running and running[0][0] == now:
            _, footprint = heappop(running)
            held_tokens -= footprint
            kv_tokens -= footprint
