"""What re-planning could gain at most while lengths are known only as a distribution: a mark beside the arms. Pure.

Whoever cannot tell requests apart can only spread them evenly, and choose the fleet's configuration by how many are
left. Here that choice is free and instant: at each output position the whole fleet has the configuration that is
fastest there. Prefill, redeployments, moves and fractions of a request cost nothing; fleets of several kinds at
once are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.scenario import GenerationScenario
from orchestrrl.lab.sim.workload import SimRequest
from planner.cost.profile import Curve, EngineProfile
from planner.model import ConfigurationId

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Seconds of one step, or of several together, evenly spread."""

    static_s: Mapping[ConfigurationId, float]  # of each configuration kept from beginning to end
    redeploying_s: float  # of the fastest at each position

    @property
    def gain(self) -> float:
        return min(self.static_s.values()) / self.redeploying_s


def ceiling(
    scenario: GenerationScenario, kinds: Sequence[EngineKind], steps: Sequence[Sequence[SimRequest]]
) -> Ceiling:
    """Of all these steps together: one configuration for all of them, against the fastest at each position of each."""
    instances = {kind.id: len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node)) for kind in kinds}
    static_s, redeploying_s = dict.fromkeys(instances, 0.0), 0.0
    for requests in steps:
        alive, kv_tokens = alive_at(requests)
        seconds = np.stack([position_s(kind.profile, instances[kind.id], alive, kv_tokens) for kind in kinds])
        redeploying_s += float(seconds.min(axis=0).sum())
        for kind, row in zip(kinds, seconds, strict=True):
            static_s[kind.id] += float(row.sum())
    return Ceiling(static_s, redeploying_s)


def alive_at(requests: Sequence[SimRequest]) -> tuple[Floats, Floats]:
    """[position, from the first token on]: requests that make this token, and the KV tokens that they hold before."""
    outputs = np.array([request.output_tokens for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.float64)
    order = np.argsort(outputs, kind="stable")
    positions = np.arange(int(outputs.max()))
    gone = np.searchsorted(outputs[order], positions, side="right")
    prompts_left = np.concatenate([np.cumsum(prompts[order][::-1])[::-1], [0.0]])
    alive = (len(requests) - gone).astype(np.float64)
    return alive, prompts_left[gone] + alive * positions


def position_s(profile: EngineProfile, instances: int, alive: Floats, kv_tokens: Floats) -> Floats:
    """[position]: seconds of one token for all, on `instances` engines. KV that does not fit waits for a further round,
    or is spilled where the engine can, whichever is sooner."""
    sequences, kv = np.maximum(1.0, alive / instances), kv_tokens / np.minimum(instances, alive)
    waiting_s = _rounds_s(profile, sequences, kv, profile.kv_capacity_tokens)
    if not profile.spill_capacity_tokens:
        return waiting_s
    room = profile.kv_capacity_tokens + profile.spill_capacity_tokens
    return np.minimum(waiting_s, _rounds_s(profile, sequences, kv, room))


def _rounds_s(profile: EngineProfile, sequences: Floats, kv_tokens: Floats, room_tokens: int) -> Floats:
    """In as many rounds of one engine as its KV room and seats ask for; parts of a round count as such."""
    rounds = np.maximum(1.0, np.maximum(kv_tokens / room_tokens, sequences / profile.max_sequences))
    batch, held = sequences / rounds, kv_tokens / rounds
    spilled = np.maximum(0.0, held - profile.kv_capacity_tokens)
    step = profile.step
    one_s = _along(step.base_s, batch) + step.kv_s_per_token * held + step.spill_s_per_token * spilled
    return rounds * one_s


def _along(curve: Curve, xs: Floats) -> Floats:
    """`curve.at` of many."""
    if len(curve.xs) == 1:
        return np.full_like(xs, curve.ys[0])
    knots, ys = np.array(curve.xs), np.array(curve.ys)
    right = np.clip(np.searchsorted(knots, xs, side="right"), 1, len(knots) - 1)
    slope = (ys[right] - ys[right - 1]) / (knots[right] - knots[right - 1])
    seconds: Floats = np.maximum(0.0, ys[right - 1] + slope * (xs - knots[right - 1]))
    return seconds
