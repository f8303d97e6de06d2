"""Builders for configurations, engines and snapshots in tests of the planner, with sensible defaults."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FinishedLength,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)

SECONDS = st.sampled_from([0.0, 1e-7, 1e-4, 0.01, 1.0])


class RemainingWork(NamedTuple):
    """The remaining work of a request: tokens in its context, and tokens that it will generate."""

    context_tokens: int
    remaining_tokens: int

    @property
    def footprint_tokens(self) -> int:
        """The KV tokens of the request at its end, which are reserved from its admission on."""
        return self.context_tokens + self.remaining_tokens


def configuration(
    name: str = "tp2",
    gpus: int = 2,
    *,
    alpha_s: float = 0.0184,
    beta_s: float = 0.000081,
    gamma_s: float = 4.1e-8,
    capacity: int = 1_000_000,
    slots: int = 256,
    switch_s: float = 20.0,
) -> Configuration:
    return Configuration(ConfigurationId(name), gpus, alpha_s, beta_s, gamma_s, capacity, slots, 18_000.0, switch_s)


def configurations(capacity: int = 10_000) -> st.SearchStrategy[Configuration]:
    return st.builds(
        configuration,
        gpus=st.integers(1, 16),
        alpha_s=SECONDS,
        beta_s=SECONDS,
        gamma_s=SECONDS,
        capacity=st.sampled_from([40, 60, 100, capacity]),
        slots=st.integers(1, 6),
    )


def pendings(max_size: int = 12, context: int = 20, remaining: int = 20) -> st.SearchStrategy[list[RemainingWork]]:
    one = st.builds(RemainingWork, st.integers(0, context), st.integers(1, remaining))
    return st.lists(one, max_size=max_size)


def engine(
    name: str, configured: str | None = "tp2", health: EngineHealth = EngineHealth.OK, age_s: float | None = 0.1
) -> EngineView:
    configuration_id = None if configured is None else ConfigurationId(configured)
    return EngineView(EngineId(name), "", configuration_id, health, 0, 0, 1_000_000, 1_000_000, 256, 100.0, age_s)


def request(
    name: str,
    generated: int = 0,
    *,
    where: str | None = "e0",
    prompt: int = 100,
    limit: int | None = None,
    state: RequestState | None = None,
) -> RequestView:
    stands = state or (RequestState.RUNNING if generated else RequestState.WAITING)
    at = None if where is None else EngineId(where)
    return RequestView(RequestId(name), at, stands, prompt, generated, limit)


def snapshot(
    engines: Sequence[EngineView],
    requests: Sequence[RequestView] = (),
    finished: Sequence[int] = (),
    *,
    now_s: float = 1000.0,
    requests_age_s: float | None = 0.1,
) -> Snapshot:
    return Snapshot(now_s, tuple(engines), tuple(requests), tuple(map(FinishedLength, finished)), requests_age_s)
