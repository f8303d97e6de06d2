"""Generation steps on a fabric: engines' profiles by what the network gives them, then the scheduling of an arm.

Arms are those of `sim gen` (docs/simulator.md). Static ones are run as they are there; ours by the real planner and
balancer in the quick loop (generation_fast.py), KV of engines that change over the fabric. Steps of one arm belong
together: the forecast learns from each, and engines stay as the step before left them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any

from orchestrrl.lab.sim.controlled import CONTROLS, ControlledRun
from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.known import best_known, best_prompts_known
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.rl.generation_fast import FastStep, run_fast
from orchestrrl.lab.sim.rl.generation_fleet import Exchanged, GenGpus, TokenExchange, UniformFleet, deployed, summed
from orchestrrl.lab.sim.rl.generation_profiles import Hardware, on_fabric
from orchestrrl.lab.sim.rl.kv_moves import OverFabric
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.run import FUTURES, steps_of, usable_kinds
from orchestrrl.lab.sim.scenario import (
    EnginesSection,
    GatewaySection,
    GenerationControlSection,
    GenerationScenario,
    NetworkSection,
    WorkloadSection,
)
from orchestrrl.lab.sim.static import StaticStep, dealt, run_partial, run_static
from orchestrrl.lab.sim.workload import SimRequest, redrawn
from planner.cost.profile import Parallelism, Profile
from planner.model import ConfigurationId

Steps = Sequence[Sequence[SimRequest]]
Ran = tuple[EngineKind, StaticStep]


@dataclass(frozen=True)
class GenJob:
    """What generates, where, and what each step asks for. `profile` instead of `layouts`: engines that are known, and
    whose exchanges the network does not change. `daemon`: a daemon's configuration, without `fleet`."""

    hardware: Hardware
    where: GenGpus
    workload: WorkloadSection
    layouts: tuple[Parallelism, ...] = ()
    profile: Profile | None = None
    initial: str | None = None  # of our arms; None: the tuned static baseline's
    kv_transfer: bool = True
    partial_share: float = 0.9
    prefix_caching: bool = False
    control: GenerationControlSection = field(default_factory=GenerationControlSection)
    gateway: GatewaySection = field(default_factory=GatewaySection)
    daemon: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A job on a fabric: what all arms and seeds have in common."""

    job: GenJob
    fabric: SimulatedFabric
    profile: Profile
    exchanges: Mapping[ConfigurationId, TokenExchange]

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
        job, servers = self.job, self.fabric.servers
        slow = {"max_output_tokens": job.workload.max_tokens, **(job.daemon.get("slow") or {})}
        return GenerationScenario(
            name="generation",
            gpus=job.where.count,
            gpus_per_node=servers.gpus_per_server,
            partial_share=job.partial_share,
            workload=job.workload.model_copy(update={"steps": steps, "warmup_steps": 0}),
            engines=EnginesSection.of(self.profile, initial=job.initial, prefix_caching=job.prefix_caching),
            network=NetworkSection(
                nic_gbps_per_node=servers.nic_bytes_per_s * servers.nics_per_server * 8e-9,
                nvlink_gbps_per_gpu=servers.nvlink_bytes_per_s * 8e-9,
                kv_transfer=job.kv_transfer,
            ),
            control=job.control,
            gateway=job.gateway,
            daemon={"mode": "act", **job.daemon, "slow": slow},
        )


def prepared(job: GenJob, fabric: SimulatedFabric) -> Prepared:
    """Raises ValueError where no configuration fits."""
    if job.profile is not None:
        return Prepared(job, fabric, job.profile, {})
    found = on_fabric(job.hardware, job.layouts, job.where, fabric)
    return Prepared(job, fabric, found.profile, found.exchanges)


def generation_stage(job: GenJob, fabric: SimulatedFabric, arm: str, seed: int = 1) -> GenStage:
    """One step."""
    return generation_stages(prepared(job, fabric), arm, seed, 1)[0]


def generation_stages(ready: Prepared, arm: str, seed: int, steps: int) -> tuple[GenStage, ...]:
    """Of each of so many steps, one after another. Raises ProblemFaults where no engine holds the longest request."""
    scenario = ready.scenario(steps)
    kinds, asked = ready.kinds(scenario), steps_of(scenario, seed)
    if arm in CONTROLS:
        initial = ConfigurationId(ready.job.initial or _tuned(scenario, kinds, asked))
        network = OverFabric(ready.fabric, ready.job.where, scenario.engines.moved_bytes_per_token)
        run = ControlledRun(scenario, kinds, initial, arm, seed, asked)
        found = run_fast(run, network if ready.job.kv_transfer else None)
        stages = [_ours(step, requests, scenario.gpus) for step, requests in zip(found, asked, strict=True)]
        sent = [_sent(ready, kinds, step.tokens, step.kv_tier_bytes) for step in found]
    else:
        ran = _static(scenario, kinds, arm, seed, asked)
        stages = [
            _theirs(kind, step, requests, scenario.gpus) for (kind, step), requests in zip(ran, asked, strict=True)
        ]
        sent = [_sent(ready, kinds, {kind.id: step.tokens}, {}) for kind, step in ran]
    return tuple(replace(stage, tier_bytes=each) for stage, each in zip(stages, sent, strict=True))


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
            return _dealt(scenario, kinds[_tuned(scenario, kinds, steps)], steps)
        case "verl_lo":
            widest = max(every, key=lambda kind: (kind.gpus <= scenario.gpus_per_node, kind.gpus))
            return _dealt(scenario, widest, steps)
        case "partial_rollout":
            return max((_partial(scenario, kind, steps) for kind in every), key=_samples_per_s)
        case "packed_known":
            return [best_known(scenario, every, requests) for requests in steps]
        case "prompts_known":
            draws = [redrawn(scenario.workload, seed, step, FUTURES) for step in range(len(steps))]
            return [
                best_prompts_known(scenario, every, requests, drawn)
                for requests, drawn in zip(steps, draws, strict=True)
            ]
    raise ValueError(f"arm must be one of sim gen's, got {arm!r}")


def _tuned(scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind], steps: Steps) -> ConfigurationId:
    """Whose steps are shortest when prompts are dealt in turn."""
    return min(kinds, key=lambda name: sum(step.makespan_s for _, step in _dealt(scenario, kinds[name], steps)))


def _dealt(scenario: GenerationScenario, kind: EngineKind, steps: Steps) -> list[Ran]:
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    return [(kind, _static_step(kind, engines, tuple(requests))) for requests in steps]


@lru_cache(maxsize=256)
def _static_step(kind: EngineKind, engines: int, requests: tuple[SimRequest, ...]) -> StaticStep:
    """Most configurations stay inside servers, and take the same on every fabric."""
    return run_static(kind, dealt(requests, engines))


def _partial(scenario: GenerationScenario, kind: EngineKind, steps: Steps) -> list[Ran]:
    """What an earlier step cut goes first, dealt over all engines."""
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    carried: list[tuple[SimRequest, int]] = []
    ran = []
    for requests in steps:
        placement = [carried[place::engines] for place in range(engines)]
        for place, held in enumerate(dealt(requests, engines)):
            placement[place] += [(request, 0) for request in held]
        step = run_partial(kind, placement, scenario.partial_share)
        carried = step.carried
        ran.append((kind, step))
    return ran


def _samples_per_s(ran: Sequence[Ran]) -> float:
    return sum(step.samples for _, step in ran) / sum(step.makespan_s for _, step in ran)


# --- as stages


def _theirs(kind: EngineKind, step: StaticStep, requests: Sequence[SimRequest], gpus: int) -> GenStage:
    busy_gpu_s = sum(step.busy_s) * kind.gpus
    return GenStage(
        seconds=step.makespan_s,
        samples=step.samples,
        output_tokens=sum(request.output_tokens for request in requests),  # what is carried is balanced by what was
        finish_s=tuple(step.finish_s),
        remaining=_countdown(step.finish_s, len(step.carried)),
        phases_s={str(kind.id): step.makespan_s},
        idle_fraction=max(0.0, 1 - busy_gpu_s / (gpus * step.makespan_s)),
        sample_tokens=_mean_power(requests, 1),
        sample_square_tokens=_mean_power(requests, 2),
    )


def _ours(step: FastStep, requests: Sequence[SimRequest], gpus: int) -> GenStage:
    wanted = sum(request.output_tokens for request in requests)
    if len(step.finish_s) != len(requests) or step.output_tokens != wanted:
        raise AssertionError(
            f"{len(step.finish_s)} of {len(requests)} answers, {step.output_tokens} of {wanted} tokens"
        )
    return GenStage(
        seconds=step.makespan_s,
        samples=len(step.finish_s),
        output_tokens=step.output_tokens,
        finish_s=tuple(step.finish_s),
        remaining=_countdown(step.finish_s, 0),
        phases_s=_phases_s(step),
        moved_bytes=sum(redeployment.moved_bytes for redeployment in step.redeployments),
        redeployments=len(step.redeployments),
        idle_fraction=max(0.0, 1 - step.busy_gpu_s / (gpus * step.makespan_s)),
        sample_tokens=_mean_power(requests, 1),
        sample_square_tokens=_mean_power(requests, 2),
    )


def _mean_power(requests: Sequence[SimRequest], power: int) -> float:
    """Of what a sample has, prompt and answer."""
    return fmean(float(request.prompt_tokens + request.output_tokens) ** power for request in requests)


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


def _countdown(finish_s: Sequence[float], left: int) -> tuple[tuple[float, int], ...]:
    total = len(finish_s) + left
    return ((0.0, total), *((at_s, total - done) for done, at_s in enumerate(finish_s, start=1)))
