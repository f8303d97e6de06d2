"""How long an instance decodes a set of requests. Pure.

With a step time affine in sequences and KV tokens, an instance takes alpha for each of its iterations plus the work of
its requests, whatever the order of admission; only the number of iterations depends on how many run together. Where
step times bend, or KV tokens spill to CPU memory, `curve_decode_s` walks over every change of the batch instead.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from planner.model import Configuration
from planner.profile import EngineProfile


class Pending(NamedTuple):
    """What is left of a request: tokens that it holds (or that must be rebuilt), and tokens that it will generate."""

    context_tokens: int
    remaining_tokens: int

    @property
    def footprint_tokens(self) -> int:
        """KV tokens that it holds when it ends, reserved from admission on."""
        return self.context_tokens + self.remaining_tokens


class DoesNotFit(ValueError):
    """A request that an instance of this configuration could never admit."""


def work_s(configuration: Configuration, pending: Pending) -> float:
    """Seconds that a request adds to its instance, whatever runs beside it: all but the share of alpha."""
    context, remaining = pending
    return configuration.beta_s * remaining + configuration.gamma_s * (
        context * remaining + remaining * (remaining - 1) / 2
    )


def all_at_once_s(configuration: Configuration, requests: Sequence[Pending]) -> float:
    """Seconds to decode requests that run together from the first iteration on, in closed form."""
    longest = max((pending.remaining_tokens for pending in requests), default=0)
    return configuration.alpha_s * longest + sum(work_s(configuration, pending) for pending in requests)


def decode_s(configuration: Configuration, requests: Sequence[Pending]) -> float:
    """Seconds until the last of `requests` ends, admitted strictly in the order given.

    One is admitted when fewer than `max_sequences` run and its footprint fits beside theirs. Raises DoesNotFit.
    """
    iterations = _iterations(configuration, requests)
    return configuration.alpha_s * iterations + sum(work_s(configuration, pending) for pending in requests)


def _iterations(configuration: Configuration, requests: Sequence[Pending]) -> int:
    """Decode iterations until all have ended: a walk over admissions and completions."""
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


def curve_decode_s(profile: EngineProfile, requests: Sequence[Pending]) -> float:
    """As `decode_s`, with the step time's own curve, and with KV tokens beyond the capacity spilled or made to wait.

    A request is admitted where its footprint fits beside the others into GPU and CPU memory. Raises DoesNotFit.
    """
    step, capacity = profile.step, profile.kv_capacity_tokens
    total_s = 0.0
    for stretch in _stretches(capacity + profile.spill_capacity_tokens, profile.max_sequences, requests):
        total_s += stretch.iterations * step.base_s.at(stretch.sequences)
        total_s += step.kv_s_per_token * stretch.read_tokens()
        total_s += step.spill_s_per_token * stretch.read_tokens(beyond=capacity)
    return total_s


class _Stretch(NamedTuple):
    """Iterations during which nobody joins or leaves."""

    iterations: int
    sequences: int
    kv_tokens: int  # before the first one

    def read_tokens(self, beyond: int = 0) -> float:
        """KV tokens beyond that many, summed over the iterations: each adds one token for each sequence."""
        started = max(0, -(-(beyond - self.kv_tokens) // self.sequences))  # the first iteration with any
        count = max(0, self.iterations - started)
        first = self.kv_tokens + started * self.sequences - beyond
        return count * first + self.sequences * count * (count - 1) / 2


def _stretches(room_tokens: int, max_sequences: int, requests: Sequence[Pending]) -> Iterator[_Stretch]:
    """A walk over admissions, strictly in order, and completions."""
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


def lower_bound_s(configuration: Configuration, instances: int, requests: Sequence[Pending]) -> float:
    """Seconds below which no spreading of `requests` over equal instances can end.

    One instance takes alpha for each iteration, and all of them together the same work however it is spread. An
    iteration gives each of at most `max_sequences` sequences one token, and holds at most `kv_capacity_tokens`.
    """
    if not requests:
        return 0.0
    works = [work_s(configuration, pending) for pending in requests]
    longest = max(pending.remaining_tokens for pending in requests)
    by_slots = sum(pending.remaining_tokens for pending in requests) / configuration.max_sequences
    held = sum(pending.remaining_tokens * pending.footprint_tokens for pending in requests)
    by_room = held / configuration.kv_capacity_tokens
    alone_s = max(
        configuration.alpha_s * pending.remaining_tokens + work for pending, work in zip(requests, works, strict=True)
    )
    together_s = (configuration.alpha_s * max(longest, by_slots, by_room) + sum(works)) / instances
    # Sums in another order than a makespan's own may differ in the last places.
    return max(alone_s, together_s) * (1 - 1e-12)
