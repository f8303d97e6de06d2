"""Choose the engine for a request: a strategy by its name, among the engines that the request's tag prefers. Pure.

A strategy is one file with one function of a snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrrl.gateway.routing.policies import least_tokens, load_index, prefix_affinity, round_robin
from orchestrrl.gateway.routing.policies.base import AffinitySlack, L, RoutedRequest, RoutingSnapshot
from orchestrrl.gateway.routing.policies.hardware_affinity import narrow
from planner.model import EngineId


class RoutingStrategy(Protocol):
    """Returns one of the loads."""

    def __call__(self, snapshot: RoutingSnapshot[L]) -> L: ...


DEFAULT_POLICY = "load_index"

STRATEGIES: Mapping[str, RoutingStrategy] = {
    "load_index": load_index.choose,
    "least_tokens": least_tokens.choose,
    "prefix_affinity": prefix_affinity.choose,
    "round_robin": round_robin.choose,
}


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """How a gateway chooses."""

    policy: str = DEFAULT_POLICY
    affinity: Mapping[str, str] = field(default_factory=dict)  # tag -> pool
    slack: AffinitySlack = field(default_factory=AffinitySlack)

    def __post_init__(self) -> None:
        if self.policy not in STRATEGIES:
            raise ValueError(f"policy must be one of {', '.join(STRATEGIES)}, got {self.policy!r}")

    @property
    def by_prefix(self) -> bool:
        """Whether it needs to know newcomers' prefixes."""
        return self.policy == "prefix_affinity"

    def choose(self, loads: Sequence[L], newcomer: RoutedRequest, last: EngineId | None = None) -> L | None:
        """One of the loads; None without any. `last` is the one that was chosen last."""
        if not loads:
            return None
        if len(loads) == 1:
            return loads[0]
        pool = self.affinity.get(newcomer.tag) if self.affinity and newcomer.tag else None
        if pool is not None:
            loads = narrow(RoutingSnapshot(loads, newcomer, last, self.slack), pool)
        return STRATEGIES[self.policy](RoutingSnapshot(loads, newcomer, last, self.slack))
