"""gateway/routing by load index for many requests that arrive at once: the same engines, in columns. Pure.

A thousand engines and sixteen thousand requests are 16 million ranks; taken one by one they would cost more than the
rest of a simulated step.
"""

from collections.abc import Sequence
from statistics import median

import numpy as np

from orchestrrl.gateway.routing.strategies import BackendLoad
from planner.model import EngineId


class ManyChoices:
    """The loads of a fleet, and what has been sent to it since."""

    def __init__(self, loads: Sequence[BackendLoad]) -> None:
        self._loads = sorted(loads, key=lambda load: load.id)  # so that the first of equals has the smaller id
        known = [load.seconds_per_token for load in loads if load.seconds_per_token]
        typical_s = median(known) if known else 1.0
        self._seconds = np.array([load.seconds_per_token or typical_s for load in self._loads])
        self._requests = np.array([load.running + load.waiting for load in self._loads], dtype=np.int64)
        self._running = np.array([load.running for load in self._loads], dtype=np.int64)
        self._held = sum(load.running_tokens + load.waiting_tokens for load in self._loads)
        self._capacity = np.array([load.kv_capacity_tokens for load in self._loads], dtype=np.int64)
        self._free = np.array([load.kv_free_tokens for load in self._loads], dtype=np.int64)
        self._waiting_tokens = np.array([load.waiting_tokens for load in self._loads], dtype=np.int64)
        self._most = np.array([load.max_sequences or np.iinfo(np.int64).max for load in self._loads], dtype=np.int64)
        self._unlimited = (self._capacity == 0) & (self._most == np.iinfo(np.int64).max)

    def choose(self, context_tokens: int) -> EngineId | None:
        """The engine that the gateway would take; the request then waits there."""
        if not self._loads:
            return None
        mean_tokens = max(1.0, (self._held + context_tokens) / (int(self._requests.sum()) + 1))
        by_room = self._running + np.maximum(self._free, 0) // mean_tokens
        cap = np.maximum(1, np.minimum(self._most, np.where(self._capacity > 0, by_room, np.inf)))
        cap[self._unlimited] = 1
        index = (self._requests + 1) / cap * self._seconds
        fits = (self._capacity == 0) | (self._free - self._waiting_tokens >= context_tokens)
        if fits.any():
            index[~fits] = np.inf
        best = np.flatnonzero(index == index.min())
        place = int(best[np.argmin(self._requests[best])])
        self._requests[place] += 1
        self._waiting_tokens[place] += context_tokens
        self._held += context_tokens
        return self._loads[place].id
