"""What one request adds to its instance's decoding. Pure.

With a step time affine in sequences and KV tokens, an instance takes alpha for each of its iterations plus the work of
its requests, whatever the order of admission; only the number of iterations depends on how many run together. Step
times that bend are lines over the batches to come (phases.py).
"""

from typing import NamedTuple

from planner.model import Configuration


class RemainingWork(NamedTuple):
    """What is left of a request: tokens that it holds (or that must be rebuilt), and tokens that it will generate."""

    context_tokens: int
    remaining_tokens: int

    @property
    def footprint_tokens(self) -> int:
        """KV tokens that it holds when it ends, reserved from admission on."""
        return self.context_tokens + self.remaining_tokens


def work_s(configuration: Configuration, pending: RemainingWork) -> float:
    """Seconds that a request adds to its instance, whatever runs beside it: all but the share of alpha."""
    context, remaining = pending
    return configuration.beta_s * remaining + configuration.gamma_s * (
        context * remaining + remaining * (remaining - 1) / 2
    )
