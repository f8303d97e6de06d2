"""Generation steps on a fabric: engines' profiles by what the network gives them, then the scheduling of an arm.

Arms are those of `sim gen` (docs/simulator.md). Static ones are run as they are there; ours by the real planner and
balancer in the quick loop (generation_fast.py), KV of engines that change over the fabric. Steps of one arm belong
together: the forecast learns from each, and engines stay as the step before left them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from orchestrrl.lab.sim.controlled import CONTROLS, ControlledRun, check_answers
from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.known import best_known_steps, best_prompts_known_steps
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.rl.generation_fast import FastStep, run_fast
from orchestrrl.lab.sim.rl.generation_fleet import (
    Exchanged,
    GenGpus,
    Hardware,
    UniformFleet,
    deployed,
    on_fabric,
    summed,
)
from orchestrrl.lab.sim.rl.kv_moves import OverFabric
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.rl.scenario import GenerationSection
from orchestrrl.lab.sim.run import steps_of, usable_kinds
from orchestrrl.lab.sim.scenario import EnginesSection, GenerationScenario, NetworkSection
from orchestrrl.lab.sim.static import Ran, Steps, countdown, dealt_steps, partial_steps, widest
from orchestrrl.lab.sim.workload import SimRequest
from planner.cost.profile import Parallelism, Profile
from planner.model import ConfigurationId


@dataclass(frozen=True)
class GenJob:
    """Where a scenario's `section` generates and on what. `layouts` go with a section without a profile: exchanges of
    known engines are not changed by the network. `daemon`: a daemon's configuration, without `fleet`."""

    hardware: Hardware
    where: GenGpus
    section: GenerationSection
    layouts: tuple[Parallelism, ...] = ()
    daemon: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A job on a fabric: what all arms and seeds have in common."""

    job: GenJob
    fabric: SimulatedFabric
    profile: Profile

    @cached_property
    def exchanged(self) -> Exchanged:
        """What its engines put on the network."""
        return Exchanged(self.fabric, self.job.where, self.job.hardware.model)

    @cached_property
    def wide(self) -> Mapping[ConfigurationId, UniformFleet]:
        """Fleets of the configurations that span servers."""
        servers, each = self.fabric.servers, self.fabric.servers.gpus_per_server
        layouts = {configuration.id: configuration.parallelism for configuration in self.profile.configurations}
        return {
            name: deployed(layout, self.job.where, servers, self.fabric.pods)
            for name, layout in layouts.items()
            if layout.gpus > each and layout.gpus % each == 0
        }

    def kinds(self, scenario: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
        """With no more engines of each than PoDs have room for."""
        return {
            name: replace(kind, most=len(self.wide[name])) if name in self.wide else kind
            for name, kind in usable_kinds(scenario).items()
        }

    def scenario(self, steps: int) -> GenerationScenario:
        job, part, servers = self.job, self.job.section, self.fabric.servers
        slow = {"max_output_tokens": part.workload.max_tokens, **(job.daemon.get("slow") or {})}
        return GenerationScenario(
            name="generation",
            gpus=job.where.count,
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
            daemon={"mode": "act", **job.daemon, "slow": slow},
        )


def prepared(job: GenJob, fabric: SimulatedFabric) -> Prepared:
    """Raises ValueError where no configuration fits."""
    known = job.section.profile_value
    return Prepared(job, fabric, known or on_fabric(job.hardware, job.layouts, job.where, fabric))


def generation_stages(ready: Prepared, arm: str, seed: int, steps: int) -> tuple[GenStage, ...]:
    """Of each of so many steps, one after another. Raises ProblemFaults where no engine holds the longest request."""
    scenario = ready.scenario(steps)
    kinds, asked = ready.kinds(scenario), steps_of(scenario, seed)
    if arm in CONTROLS:
        initial = ConfigurationId(ready.job.section.initial or _tuned(scenario, kinds, asked))
        network = OverFabric(ready.fabric, ready.job.where.first, scenario.engines.moved_bytes_per_token)
        run = ControlledRun(scenario, kinds, initial, arm, seed, asked)
        found = run_fast(run, network if ready.job.section.kv_transfer else None)
        for step, requests in zip(found, asked, strict=True):
            check_answers(step.finish_s, step.output_tokens, requests)
        return tuple(
            stage_of(step.finish_s, requests, _phases_s(step), _sent(ready, kinds, step.tokens, step.kv_tier_bytes))
            for step, requests in zip(found, asked, strict=True)
        )
    return tuple(
        stage_of(
            step.finish_s,
            requests,
            {str(kind.id): step.makespan_s},
            _sent(ready, kinds, {kind.id: step.tokens}, {}),
            seconds=step.makespan_s,
            carried=len(step.carried),
        )
        for (kind, step), requests in zip(_static(scenario, kinds, arm, seed, asked), asked, strict=True)
    )


def _sent(
    ready: Prepared,
    kinds: Mapping[ConfigurationId, EngineKind],
    tokens: Mapping[ConfigurationId, int],
    kv: Mapping[str, float],
) -> Mapping[str, float]:
    """By tier, of tokens that passed engines of each configuration, and of KV that moved."""
    parts = [ready.exchanged.of(name, kinds[name].profile.parallelism, tokens[name]) for name in sorted(tokens)]
    return summed([*parts, kv])


# --- static arms


def _static(
    scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind], arm: str, seed: int, steps: Steps
) -> list[Ran]:
    every = list(kinds.values())
    match arm:
        case "verl_to":
            return dealt_steps(scenario, kinds[_tuned(scenario, kinds, steps)], steps)
        case "verl_lo":
            return dealt_steps(scenario, widest(scenario, every), steps)
        case "partial_rollout":
            return max((partial_steps(scenario, kind, steps) for kind in every), key=_samples_per_s)
        case "packed_known":
            return best_known_steps(scenario, every, steps)
        case "prompts_known":
            return best_prompts_known_steps(scenario, every, seed, steps)
    raise ValueError(f"arm must be one of sim gen's, got {arm!r}")


def _tuned(scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind], steps: Steps) -> ConfigurationId:
    """Return the configuration whose steps are shortest when prompts are dealt in turn."""
    return min(kinds, key=lambda name: sum(step.makespan_s for _, step in dealt_steps(scenario, kinds[name], steps)))


def _samples_per_s(ran: Sequence[Ran]) -> float:
    return sum(step.samples for _, step in ran) / sum(step.makespan_s for _, step in ran)


# --- as stages


def stage_of(
    finish_s: Sequence[float],
    requests: Sequence[SimRequest],
    phases_s: Mapping[str, float],
    tier_bytes: Mapping[str, float],
    *,
    seconds: float | None = None,
    carried: int = 0,
) -> GenStage:
    """`finish_s` ascends. `seconds`: of the step, None: until the last answer. `carried`: requests that the next step
    finishes."""
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


def _phases_s(step: FastStep) -> dict[str, float]:
    """Seconds under each fleet, redeploying and moving KV; together the step's. Engines that stay decode meanwhile."""
    phases_s: dict[str, float] = {}

    def add(name: str, seconds: float) -> None:
        if seconds > 0:
            phases_s[name] = phases_s.get(name, 0.0) + seconds

    at_s = 0.0
    for redeployment in step.redeployments:
        add(redeployment.before, redeployment.begin_s - at_s)
        up_s = min(redeployment.begin_s + redeployment.switch_s, step.makespan_s)
        ready_s = min(up_s + redeployment.kv_s, step.makespan_s)
        add("redeploying", up_s - redeployment.begin_s)
        add("moving KV", ready_s - up_s)
        at_s = ready_s
    add(step.fleet, step.makespan_s - at_s)
    return phases_s
