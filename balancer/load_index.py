"""Calculate the load index of workers (equation 5 of the paper) from an immutable view of the fleet. Has no side
effects."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from planner.model import EngineId, RequestView

HIGHEST = sys.float_info.max  # load index
UNKNOWN_FLEET_TOKENS_PER_S = 1.0  # assumed if no worker has a known positive rate


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine that requests may move from or to, with its requests and limits.

    If `decode_tokens_per_s` is None, the rate is unknown. If it is 0 while requests are running, the worker is stalled.
    """

    id: EngineId
    running: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    kv_capacity_tokens: int
    kv_free_tokens: int
    max_sequences: int
    decode_tokens_per_s: float | None

    def __post_init__(self) -> None:
        for name in ("kv_capacity_tokens", "kv_free_tokens", "max_sequences"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.decode_tokens_per_s is not None and not self.decode_tokens_per_s >= 0:
            raise ValueError(f"decode_tokens_per_s must be >= 0, got {self.decode_tokens_per_s}")

    @property
    def requests(self) -> tuple[RequestView, ...]:
        return self.running + self.waiting

    @property
    def stalled(self) -> bool:
        """True if the worker has running requests but decodes no tokens. An idle worker is not stalled."""
        return self.decode_tokens_per_s == 0 and len(self.running) > 0


def stand_in_tokens_per_s(workers: Sequence[Worker]) -> float:
    """Return the decode rate that is assumed for workers with an unknown rate. It is the median of the known positive
    rates, or UNKNOWN_FLEET_TOKENS_PER_S if there are none."""
    known = [worker.decode_tokens_per_s for worker in workers if worker.decode_tokens_per_s]
    return median(known) if known else UNKNOWN_FLEET_TOKENS_PER_S


def concurrency_cap(
    running: int, requests: int, context_tokens: int, kv_free_tokens: int, max_sequences: int, fleet: tuple[int, int]
) -> int:
    """Return how many sequences a worker can run at once, given its free KV. The result is at least 1.

    `requests` is the number of the worker's requests, and `context_tokens` is their total context. `fleet` contains the
    number of requests of all workers and their total context in tokens. For a worker without requests, the mean context
    of the fleet is used. All values are integers, so that rounding down is exact.
    """
    if not requests:
        requests, context_tokens = fleet
    if not context_tokens:  # requests without context need no KV
        return max(1, max_sequences)
    cap = running + kv_free_tokens * requests // context_tokens
    if cap > max_sequences:
        cap = max_sequences
    return cap if cap > 1 else 1


def load_index(requests: int, cap: int, tokens_per_s: float) -> float:
    """Return the load index (equation 5 of the paper) in seconds per token and slot. The index is 0 if there are no
    requests.

    `requests` is the number of the worker's requests, `cap` its concurrency cap, and `tokens_per_s` its decode rate.
    For rates close to 0, the index is clamped to the largest finite float.
    """
    if not requests:
        return 0.0
    index = requests / cap / tokens_per_s
    return index if index < HIGHEST else HIGHEST
