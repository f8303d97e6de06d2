"""Simulate generation steps on a fabric: predict engine profiles from the network's bandwidth, then run the scheduling
of an arm.

Arms are those of `sim gen` (docs/simulator.md). Static arms run as in `sim gen`. OrchestrRL's arms use the real planner
and balancer in a fast loop (generation_fast.py), and the KV of replaced engines is sent over the fabric. The steps of
an arm depend on each other: the forecast is updated after each step, and each step begins with the engines of the
previous step.

A step may also replace its engines once, at a given point, as in figure 18 of the OrchestrRL paper. When a given
fraction of requests remains, the instances of one configuration are replaced by those of another. Parameters are loaded
from CPU memory, KV is sent over the fabric or recomputed, and the new instances decode the remaining tokens. Requests
are assigned to the new instances on the GPUs that they ran on, so that KV has short paths. Instances are balanced by
the current tokens of their requests, since output lengths are not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, summed, tier_bytes
from orchestrrl.lab.sim.rl.generation_fast import run_fast
from orchestrrl.lab.sim.rl.generation_fleet import (
    Hardware,
    Leaving,
    OverFabric,
    UniformFleet,
    deployed,
    gen_period,
    on_fabric,
    token_flows,
)
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.rl.scenario import GenerationSection
from orchestrrl.lab.sim.run import CONTROLS, ControlledRun, check_answers, steps_of, usable_kinds
from orchestrrl.lab.sim.scenario import EnginesSection, GenerationScenario, NetworkSection
from orchestrrl.lab.sim.static import countdown, loaded_engines, static_arm, tuned
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from orchestrrl.lab.simulated_engine.scheduler import Sequence as HeldSequence
from planner.cost.predict import published_precision
from planner.cost.profile import Parallelism, Profile
from planner.model import ConfigurationId, GpuId, RequestId

LeftRequest = tuple[HeldSequence, int]  # an unfinished request when engines change, and the index of its engine


@dataclass(frozen=True)
class EnginesOnFabric:
    """The engines of a generation section on a fabric, shared by all arms and seeds. `where` contains the GPUs of the
    engines. The engines' configurations are predicted for `layouts` on this fabric, or taken from the section's
    profile, which does not depend on the network. `daemon` is a daemon's configuration without `fleet`."""

    section: GenerationSection
    hardware: Hardware
    where: range
    fabric: SimulatedFabric
    layouts: Sequence[Parallelism] = ()
    daemon: Mapping[str, Any] = field(default_factory=dict)
    _token_bytes: dict[ConfigurationId, TierBytes] = field(default_factory=dict)

    @cached_property
    def profile(self) -> Profile:
        """The profile of the engines. Raises ValueError if no configuration fits on the GPUs."""
        return self.section.profile_value or on_fabric(self.hardware, self.layouts, self.where, self.fabric)

    @cached_property
    def fleets(self) -> Mapping[ConfigurationId, UniformFleet]:
        """The fleet of each configuration whose engines fit into a server or use whole servers."""
        servers, layouts = self.fabric.servers, {each.id: each.parallelism for each in self.profile.configurations}
        return {
            name: deployed(layout, self.where, servers, self.fabric.pods)
            for name, layout in layouts.items()
            if layout.gpus <= servers.gpus_per_server or layout.gpus % servers.gpus_per_server == 0
        }

    def kinds(self, scenario: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
        """Return the engine kinds that are usable in the scenario. The number of engines of each kind is limited to the
        number that fits into the PoDs."""
        return {name: replace(kind, most=len(self.fleets[name])) for name, kind in usable_kinds(scenario).items()}

    def sent(self, tokens: Mapping[ConfigurationId, float]) -> TierBytes:
        """Return the number of bytes, by tier, that engines exchange while they process `tokens`. `tokens` contains,
        for each configuration, the number of tokens that its engines generate and prefill."""
        servers = self.fabric.servers
        for name in tokens:
            if name not in self._token_bytes:
                network, fleet = self.fabric.network(gen_period(self.fleets[name], servers, name)), self.fleets[name]
                self._token_bytes[name] = tier_bytes(network, token_flows(fleet, self.hardware.model, servers))
        return summed(
            {tier: size * tokens[name] for tier, size in self._token_bytes[name].items()} for name in sorted(tokens)
        )

    def scenario(self, steps: int) -> GenerationScenario:
        part, servers = self.section, self.fabric.servers
        slow = {"max_output_tokens": part.workload.max_tokens, **(self.daemon.get("slow") or {})}
        return GenerationScenario(
            name="generation",
            gpus=len(self.where),
            gpus_per_node=servers.gpus_per_server,
            partial_share=part.partial_share,
            workload=part.workload.model_copy(update={"steps": steps, "warmup_steps": 0}),
            engines=EnginesSection.of(self.profile, initial=part.initial, prefix_caching=part.prefix_caching),
            network=NetworkSection(
                nic_gbps_per_node=servers.nic_bytes_per_s * servers.nics_per_server * 8e-9,
                nvlink_gbps_per_gpu=servers.nvlink_bytes_per_s * 8e-9,
                kv_transfer=part.kv_transfer,
            ),
            control=part.control,
            daemon={"mode": "act", **self.daemon, "slow": slow},
        )


def generation_stages(ready: EnginesOnFabric, arm: str, seed: int, steps: int) -> tuple[GenStage, ...]:
    """Return the generation stages of an arm for `steps` consecutive steps. Raises ProblemFaults if no engine can hold
    the longest request."""
    scenario = ready.scenario(steps)
    kinds, asked = ready.kinds(scenario), steps_of(scenario, seed)
    if arm in CONTROLS:
        initial = ConfigurationId(ready.section.initial or tuned(scenario, kinds, {seed: asked}))
        network = OverFabric(ready.fabric, ready.where.start, scenario.engines.moved_bytes_per_token)
        run = ControlledRun(scenario, kinds, initial, arm, seed, asked)
        found = run_fast(run, network if ready.section.kv_transfer else None)
        for step, requests in zip(found, asked, strict=True):
            check_answers(step.finish_s, step.output_tokens, requests)
        return tuple(
            stage_of(step.finish_s, requests, step.phases_s, summed([ready.sent(step.tokens), step.kv_tier_bytes]))
            for step, requests in zip(found, asked, strict=True)
        )
    return tuple(
        stage_of(
            step.finish_s,
            requests,
            {str(kind.id): step.makespan_s},
            ready.sent({kind.id: step.tokens}),
            seconds=step.makespan_s,
            carried=len(step.carried),
        )
        for (kind, step), requests in zip(static_arm(scenario, kinds, arm, {seed: asked})[seed], asked, strict=True)
    )


def stage_of(
    finish_s: Sequence[float],
    requests: Sequence[SimRequest],
    phases_s: Mapping[str, float],
    tier_bytes: Mapping[str, float],
    *,
    seconds: float | None = None,
    carried: int = 0,
) -> GenStage:
    """Return the generation stage of one step. The completion times `finish_s` must ascend. `seconds` is the step's
    duration; None means that the step ends with its last answer. `carried` is the number of requests left for the next
    step to finish."""
    lengths = [float(request.prompt_tokens + request.output_tokens) for request in requests]
    return GenStage(
        seconds=finish_s[-1] if seconds is None else seconds,
        finish_s=tuple(finish_s),
        remaining=tuple(countdown(finish_s, carried)),
        phases_s=phases_s,
        sample_tokens=fmean(lengths),
        sample_square_tokens=fmean(length**2 for length in lengths),
        tier_bytes=tier_bytes,
    )


NEVER_S = 1e12


def redeployed_stage(
    hardware: Hardware,
    where: range,
    layouts: tuple[Parallelism, Parallelism],
    requests: Sequence[SimRequest],
    left_share: float,
    fabric: SimulatedFabric,
) -> GenStage:
    """Return the stage of a step whose engines change from the first layout to the second when the fraction
    `left_share` of the requests is unfinished. The stage has the phases `redeploying`, `moving KV`, and one named after
    each configuration. Raises ValueError if `left_share` is not in (0, 1) or a layout does not fit on the GPUs."""
    if not 0 < left_share < 1:
        raise ValueError(f"left_share must be in (0, 1), got {left_share}")
    profile = on_fabric(hardware, layouts, where, fabric)
    if len(profile.configurations) < 2:
        raise ValueError(f"both layouts must fit the GPUs, got {layouts}")
    one, other = (EngineKind(each) for each in profile.configurations)
    before, after = (deployed(each, where, fabric.servers, fabric.pods) for each in layouts)
    placement = [requests[place :: len(before)] for place in range(len(before))]  # round-robin
    finish_s = sorted(at_s for engine in loaded_engines(one, placement) for at_s in _ended_s(engine, NEVER_S))
    first_s = finish_s[len(requests) - int(left_share * len(requests)) - 1]
    ends_s, left, runs = list[float](), list[LeftRequest](), set[RequestId]()
    for place, engine in enumerate(loaded_engines(one, placement)):
        ends_s += _ended_s(engine, first_s)
        left += [(held, place) for held in (*engine.running, *engine.waiting)]
        runs |= {held.id for held in engine.running}
    targets = _dealt(left, before, after)
    sources, destinations = (
        [(fleet.parallelism, tuple(map(GpuId, gpus))) for gpus in fleet.gpus.tolist()] for fleet in (before, after)
    )
    prefill_tokens_per_s = other.profile.prefill_tokens_per_s
    moved = OverFabric(fabric, 0, hardware.model.kv_bytes_per_token(published_precision(hardware.model).kv_bits))(
        [
            Leaving(held.id, sources[place], destinations[target], prefill_tokens_per_s, held.context_tokens)
            for (held, place), target in zip(left, targets, strict=True)
            if held.id in runs
        ]
    )
    engines, by_id = [Scheduler(other.shape) for _ in range(len(after))], {each.id: each for each in requests}
    for (held, _), target in sorted(zip(left, targets, strict=True), key=lambda pair: pair[0][0].id not in runs):
        by_id[held.id].submit(engines[target], 0.0, held.generated, prefilled=held.id in moved.transferred)
    switch_s, kv_s = other.profile.switch_s, moved.seconds if moved.transferred else 0.0
    begin_s = first_s + switch_s + kv_s
    ends_s = sorted([*ends_s, *(begin_s + at_s for engine in engines for at_s in _ended_s(engine, NEVER_S))])
    phases_s = {str(one.id): first_s, "redeploying": switch_s, "moving KV": kv_s, str(other.id): ends_s[-1] - begin_s}
    return stage_of(ends_s, requests, phases_s, {})


def _ended_s(engine: Scheduler, until_s: float) -> list[float]:
    return [each.finished_s for each in engine.advance(until_s) if each.finished_s is not None]


def _dealt(left: Sequence[LeftRequest], before: UniformFleet, after: UniformFleet) -> list[int]:
    """Return the new instance of each request, as a list indexed by request. Requests are assigned in descending order
    of size. Each request goes to the least loaded instance among those that use its current GPUs. If no instance uses
    these GPUs, all instances are considered."""
    near = [np.flatnonzero(np.isin(after.gpus, gpus).any(axis=1)).tolist() for gpus in before.gpus]
    loads, targets = [0] * len(after), [0] * len(left)
    for number in sorted(range(len(left)), key=lambda number: (-left[number][0].context_tokens, left[number][0].id)):
        held, instance = left[number]
        targets[number] = min(near[instance] or range(len(after)), key=lambda place: (loads[place], place))
        loads[targets[number]] += held.context_tokens
    return targets
