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
from orchestrrl.lab.sim.net.fluid import TierBytes, summed, tier_bytes
from orchestrrl.lab.sim.rl.generation_fast import run_fast
from orchestrrl.lab.sim.rl.generation_fleet import (
    GenGpus,
    Hardware,
    UniformFleet,
    deployed,
    gen_period,
    on_fabric,
    token_flows,
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
class Generation:
    """A section's engines on the GPUs of a fabric: what all arms and seeds have in common. `daemon`: a daemon's
    configuration, without `fleet`."""

    section: GenerationSection
    hardware: Hardware
    where: GenGpus
    fabric: SimulatedFabric
    profile: Profile
    daemon: Mapping[str, Any] = field(default_factory=dict)
    _token_bytes: dict[ConfigurationId, TierBytes] = field(default_factory=dict)

    @cached_property
    def fleets(self) -> Mapping[ConfigurationId, UniformFleet]:
        """Of the configurations that are inside servers, or take whole ones."""
        servers, layouts = self.fabric.servers, {each.id: each.parallelism for each in self.profile.configurations}
        return {
            name: deployed(layout, self.where, servers, self.fabric.pods)
            for name, layout in layouts.items()
            if layout.gpus <= servers.gpus_per_server or layout.gpus % servers.gpus_per_server == 0
        }

    def kinds(self, scenario: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
        """With no more engines of each than PoDs have room for."""
        return {name: replace(kind, most=len(self.fleets[name])) for name, kind in usable_kinds(scenario).items()}

    def sent(self, tokens: Mapping[ConfigurationId, float]) -> TierBytes:
        """Return what engines exchange of tokens that pass those of each configuration, generated or prefilled."""
        return summed(
            {tier: size * tokens[name] for tier, size in self._of_token(name).items()} for name in sorted(tokens)
        )

    def _of_token(self, name: ConfigurationId) -> TierBytes:
        if name not in self._token_bytes:
            servers, fleet = self.fabric.servers, self.fleets[name]
            network = self.fabric.network(gen_period(fleet, servers, name))
            self._token_bytes[name] = tier_bytes(network, token_flows(fleet, self.hardware.model, servers))
        return self._token_bytes[name]

    def scenario(self, steps: int) -> GenerationScenario:
        part, servers = self.section, self.fabric.servers
        slow = {"max_output_tokens": part.workload.max_tokens, **(self.daemon.get("slow") or {})}
        return GenerationScenario(
            name="generation",
            gpus=self.where.count,
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


def generation_on(
    section: GenerationSection,
    hardware: Hardware,
    where: GenGpus,
    fabric: SimulatedFabric,
    layouts: Sequence[Parallelism] = (),
    daemon: Mapping[str, Any] | None = None,
) -> Generation:
    """With engines of these `layouts`, or of the section's profile: exchanges of known engines are not changed by the
    network. Raises ValueError where no configuration fits."""
    profile = section.profile_value or on_fabric(hardware, layouts, where, fabric)
    return Generation(section, hardware, where, fabric, profile, daemon or {})


def generation_stages(ready: Generation, arm: str, seed: int, steps: int) -> tuple[GenStage, ...]:
    """Of each of so many steps, one after another. Raises ProblemFaults where no engine holds the longest request."""
    scenario = ready.scenario(steps)
    kinds, asked = ready.kinds(scenario), steps_of(scenario, seed)
    if arm in CONTROLS:
        initial = ConfigurationId(ready.section.initial or _tuned(scenario, kinds, asked))
        network = OverFabric(ready.fabric, ready.where.first, scenario.engines.moved_bytes_per_token)
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
        for (kind, step), requests in zip(_static(scenario, kinds, arm, seed, asked), asked, strict=True)
    )


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
