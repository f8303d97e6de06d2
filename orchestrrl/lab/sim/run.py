"""Run a scenario: every arm over every seed, the same requests for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.controlled import CONTROLS, ControlledRun, EngineSpan, Report, SeedRun
from orchestrrl.lab.sim.engines import BLOCK_TOKENS, EngineKind, homogeneous, kinds_of
from orchestrrl.lab.sim.scenario import ARMS, GenerationScenario
from orchestrrl.lab.sim.static import (
    Ceiling,
    Ran,
    Steps,
    ceiling,
    countdown,
    dealt_steps,
    measured,
    static_arm,
    tuned,
)
from orchestrrl.lab.sim.workload import requests_of_step
from planner.model import ConfigurationId


@dataclass(slots=True)
class ArmRun:
    arm: str
    configuration: str  # that it begins with
    seeds: list[SeedRun]

    @property
    def makespan_s(self) -> float:
        return median(step_s for run in self.seeds for step_s in run.makespan_s)

    @property
    def calibration_error(self) -> float | None:
        """Median over plans of how far the predicted end was from the actual one, relative."""
        errors = [abs(p - a) / a for run in self.seeds for p, a in run.predicted_actual_s if a > 0]
        return median(errors) if errors else None


@dataclass(frozen=True, slots=True)
class NotKnowing:
    """Median makespans by what the planner knows of lengths, beside the tuned static baseline's."""

    static_s: float
    forecast_s: float
    oracle_s: float
    mean_s: float | None  # None: the arm was not run

    @property
    def price_s(self) -> float:
        """What knowing the lengths would save."""
        return self.forecast_s - self.oracle_s

    @property
    def kept(self) -> float | None:
        """Share of the oracle's gain that the forecast keeps; None where the oracle gains nothing."""
        gain_s = self.static_s - self.oracle_s
        return (self.static_s - self.forecast_s) / gain_s if gain_s > 0 else None


@dataclass(slots=True)
class ScenarioOutcome:
    scenario: GenerationScenario
    arms: list[ArmRun]
    static_makespan_s: dict[str, float]  # of the sweep behind verl_to, by configuration
    ceiling: Ceiling  # of the measured steps of all seeds
    alone_s: float | None = None  # makespan of `both` had it shared no NICs; None: it shares none, or was not run

    def arm(self, name: str) -> ArmRun | None:
        return next((run for run in self.arms if run.arm == name), None)

    @property
    def ceiling_gain(self) -> float | None:
        """Over the tuned static baseline, whose prompts are dealt in turn; None where that was not run."""
        baseline = self.arm("verl_to")
        return None if baseline is None else sum(run.total_s for run in baseline.seeds) / self.ceiling.redeploying_s

    @property
    def contention_s(self) -> float | None:
        """What sharing the NICs adds to a step of the arm `both`."""
        both = self.arm("both")
        return both.makespan_s - self.alone_s if both is not None and self.alone_s is not None else None

    @property
    def not_knowing(self) -> NotKnowing | None:
        """None where one of the arms that it takes was not run."""
        static, forecast, oracle, mean = (self.arm(name) for name in ("verl_to", "both", "oracle", "mean_only"))
        if static is None or forecast is None or oracle is None:
            return None
        return NotKnowing(
            static.makespan_s, forecast.makespan_s, oracle.makespan_s, mean.makespan_s if mean is not None else None
        )

    def gain(self, run: ArmRun) -> float | None:
        """Samples per second over those of the tuned static baseline: median over seeds."""
        baseline = self.arm("verl_to")
        if baseline is None:
            return None
        pairs = zip(run.seeds, baseline.seeds, strict=True)
        return median(ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs)


def chosen(names: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """As they are named, each once; all that are known where none is. Raises ProblemFaults."""
    faults = [
        f"{option}[{i}]: must be one of {', '.join(known)}, got {name!r}"
        for i, name in enumerate(names)
        if name not in known
    ]
    if faults:
        raise ProblemFaults(faults)
    return list(dict.fromkeys(names or known))


def chosen_arms(names: Sequence[str]) -> list[str]:
    """In the order in which they are reported. Raises ProblemFaults."""
    return sorted(chosen(names, ARMS, "--arms"), key=ARMS.index) if names else []


def run_scenario(
    scenario: GenerationScenario, arms: Sequence[str], seeds: Sequence[int], report: Report
) -> ScenarioOutcome:
    """The static sweep always runs: it chooses what our arms begin with. Raises ProblemFaults, Permanent."""
    if faults := _unusable(scenario):
        raise ProblemFaults(faults)
    kinds = usable_kinds(scenario)
    every = list(kinds.values())
    steps = {seed: steps_of(scenario, seed) for seed in seeds}
    static_s = {}
    for index, kind in enumerate(every):
        report(f"static {kind.id}", index, len(kinds))
        ran = dealt_steps(scenario, kind, steps).values()
        static_s[str(kind.id)] = median(step.makespan_s for its in ran for _, step in measured(scenario, its))
    initial = ConfigurationId(scenario.engines.initial or tuned(scenario, kinds, steps))
    runs = []
    for index, arm in enumerate(arms):
        if arm in CONTROLS:
            controlled = [ControlledRun(scenario, kinds, initial, arm, seed, steps[seed]) for seed in seeds]
            runs.append(ArmRun(arm, initial, [one.run(report) for one in controlled]))
            continue
        report(arm, index, len(arms))
        static = static_arm(scenario, kinds, arm, steps)
        begins_with = "best" if arm in ("packed_known", "prompts_known") else static[seeds[0]][0][0].id
        runs.append(ArmRun(arm, begins_with, [_static_run(scenario, seed, static[seed]) for seed in seeds]))
    every_step = [requests for seed in seeds for requests in measured(scenario, steps[seed])]
    outcome = ScenarioOutcome(
        scenario,
        runs,
        static_s,
        ceiling(scenario, every, every_step),
    )
    if outcome.arm("both") is not None and _shares_links(scenario, kinds):
        alone = [ControlledRun(scenario, kinds, initial, "both", s, steps[s], share_network=False) for s in seeds]
        outcome.alone_s = ArmRun("both", initial, [one.run(report) for one in alone]).makespan_s
    return outcome


def steps_of(scenario: GenerationScenario, seed: int) -> Steps:
    return [requests_of_step(scenario.workload, seed, step) for step in range(scenario.workload.steps)]


def _unusable(scenario: GenerationScenario) -> list[str]:
    """Faults of configurations that the scenario writes out, or begins with, and that no engine can be of. Those of a
    profile are left out of the run instead: it may describe more than one job uses."""
    longest, faults = _longest_tokens(scenario), []
    kinds = kinds_of(scenario)
    for index, section in enumerate(scenario.engines.configurations):
        kind, path = kinds[ConfigurationId(section.id)], f"engines.configurations[{index}]"
        if not _holds(kind, longest):
            least = (-(-longest // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
            wish = f"must be >= {least} for the longest request, of {longest} tokens"
            faults.append(f"{path}.kv_capacity_tokens: {wish}, got {section.kv_capacity_tokens}")
        if not homogeneous(kind, scenario.gpus, scenario.gpus_per_node):
            wish = f"must fit {scenario.gpus} GPUs in nodes of {scenario.gpus_per_node}"
            faults.append(f"{path}.gpus: {wish}, got {section.gpus}")
    written = {section.id for section in scenario.engines.configurations}
    initial = scenario.engines.initial
    if initial is not None and initial not in written and initial not in usable_kinds(scenario):
        wish = f"must fit {scenario.gpus} GPUs and hold a request of {longest} tokens"
        faults.append(f"engines.initial: {wish}, got {initial!r}")
    return faults


def _longest_tokens(scenario: GenerationScenario) -> int:
    return scenario.workload.prompt_tokens[1] + scenario.workload.max_tokens


def _holds(kind: EngineKind, tokens: int) -> bool:
    return kind.shape.blocks * kind.shape.block_tokens >= tokens + kind.shape.block_tokens


def usable_kinds(scenario: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
    """Configurations that have room for the longest request, and of which there is at least one engine."""
    longest = _longest_tokens(scenario)
    every = kinds_of(scenario)
    kinds = {
        kind.id: kind
        for kind in every.values()
        if _holds(kind, longest) and homogeneous(kind, scenario.gpus, scenario.gpus_per_node)
    }
    if not kinds:
        wish = f"none fits {scenario.gpus} GPUs and holds a request of {longest} tokens"
        raise ProblemFaults([f"engines.configurations: {wish}, got {[str(name) for name in every]}"])
    return kinds


def _shares_links(scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind]) -> bool:
    network = scenario.network
    return network.kv_transfer or network.weight_gbytes > 0 or any(kind.nic_gbps for kind in kinds.values())


def _static_run(scenario: GenerationScenario, seed: int, steps: Sequence[Ran]) -> SeedRun:
    """Return a seed's run without its warm-up."""
    ran = measured(scenario, steps)
    run = SeedRun(seed, [step.makespan_s for _, step in ran], sum(step.samples for _, step in ran))
    run.busy_gpu_s = sum(sum(step.busy_s) * kind.gpus for kind, step in ran)
    run.idle_fraction = 1 - run.busy_gpu_s / (scenario.gpus * run.total_s)
    run.preemptions = sum(step.preemptions for _, step in ran)
    kind, last = ran[-1]
    fleet = homogeneous(kind, scenario.gpus, scenario.gpus_per_node)
    run.remaining = countdown(last.finish_s, len(last.carried))
    for (engine, gpus), ends in zip(fleet.items(), last.finish_s_by_engine, strict=True):
        running = countdown(sorted(ends))
        run.spans.append(EngineSpan(engine, kind.id, gpus[0], kind.gpus, 0.0, last.makespan_s, running))
    return run
