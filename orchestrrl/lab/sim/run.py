"""Run every arm of a scenario with every seed. All arms get the same requests. OrchestrRL's arms run the real control
plane on a virtual clock (world.py)."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.lab.sim.engines import BLOCK_TOKENS, EngineKind, VirtualEngine, fleet_section, homogeneous, kinds_of
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
from orchestrrl.lab.sim.workload import SimRequest, requests_of_step
from orchestrrl.lab.sim.world import StepRecord, World
from planner.model import ConfigurationId, RequestId


@dataclass(slots=True)
class EngineSpan:
    """The number of running sequences of one engine over time, for charts."""

    engine: str
    configuration: str
    first_gpu: int
    gpus: int
    started_s: float
    ended_s: float
    running: list[tuple[float, int]]


@dataclass(slots=True)
class SeedRun:
    """The results of one arm over the measured steps of one seed. `remaining` and `spans` describe the last step."""

    seed: int
    makespan_s: list[float] = field(default_factory=list)  # by step
    samples: int = 0
    output_tokens: int = 0
    busy_gpu_s: float = 0.0
    idle_fraction: float = 0.0  # of all GPU seconds of the steps
    moves: int = 0
    redeployments: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    transfers: int = 0  # KV transfers, instead of recomputation
    predicted_actual_s: list[tuple[float, float]] = field(default_factory=list)  # makespans of each plan
    remaining: list[tuple[float, int]] = field(default_factory=list)
    spans: list[EngineSpan] = field(default_factory=list)
    journal_digest: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.makespan_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.total_s


Report = Callable[[str, int, int], None]  # current task, number done, total


@dataclass(frozen=True, slots=True)
class ArmControl:
    """The OrchestrRL features that an arm enables."""

    planning: bool
    policy: str | None  # of the fast loop; None: the policy of the scenario's daemon
    routed: bool = True  # the gateway routes each request; otherwise prompts are assigned round-robin
    knowledge: str = "forecast"


# A gain that no plan can reach.
NEVER_WORTH_IT_S = 1e9

CONTROLS = {
    "planning": ArmControl(planning=True, policy="none", routed=False),
    "balancing_paper": ArmControl(planning=False, policy="paper"),
    "balancing": ArmControl(planning=False, policy=None),
    "both_paper": ArmControl(planning=True, policy="paper"),
    "both": ArmControl(planning=True, policy=None),
    "mean_only": ArmControl(planning=True, policy=None, knowledge="mean"),
    "oracle": ArmControl(planning=True, policy=None, knowledge="oracle"),
}


@dataclass(frozen=True, slots=True)
class ControlledRun:
    """The inputs of one run of an arm that uses the control plane."""

    scenario: GenerationScenario
    kinds: Mapping[ConfigurationId, EngineKind]
    initial: ConfigurationId
    arm: str
    seed: int
    steps: Sequence[Sequence[SimRequest]]
    share_network: bool = True

    @property
    def control(self) -> ArmControl:
        return CONTROLS[self.arm]

    @property
    def known_output_tokens(self) -> dict[RequestId, int] | None:
        """The exact output length of each request in the oracle arm, or None in other arms."""
        if self.control.knowledge != "oracle":
            return None
        return {request.id: request.output_tokens for requests in self.steps for request in requests}

    def run(self, report: Report, keep_journal: Path | None = None) -> SeedRun:
        """Run the arm with this seed. If `keep_journal` is None, the journal is deleted afterwards. Otherwise,
        `keep_journal` is the path of the journal."""
        with tempfile.TemporaryDirectory(prefix="orchestrrl-sim-") as folder:
            path = keep_journal or Path(folder) / "journal.sqlite"
            run = asyncio.run(self._run(path, report))
            _read_journal(path, run)
        return run

    def config(self) -> Config:
        """Return the configuration of the scenario's daemon, with all features disabled that the arm does not use."""
        daemon = self.scenario.daemon
        sections = {name: dict(daemon.get(name) or {}) for name in ("fast", "slow")}
        if self.control.policy is not None:
            sections["fast"]["policy"] = self.control.policy
        sections["slow"]["knowledge"] = self.control.knowledge
        if not self.control.planning:
            sections["slow"]["epsilon_s"] = NEVER_WORTH_IT_S  # a pin keeps the engines, not the requests
        merged = self.scenario.model_copy(update={"daemon": {"mode": "act", **daemon, **sections}})
        return merged.daemon_config(fleet_section(self.scenario, self.kinds))

    async def _run(self, journal_path: Path, report: Report) -> SeedRun:
        run, scenario = SeedRun(self.seed), self.scenario
        world = World(
            self.config(),
            self.kinds,
            scenario,
            journal_path,
            share_network=self.share_network,
            known_output_tokens=self.known_output_tokens,
        )
        world.deploy(self.initial, homogeneous(self.kinds[self.initial], scenario.gpus, scenario.gpus_per_node))
        if not self.control.planning:
            world.control_plane.plans.pin("this arm does not plan", 0.0)
        async with world:
            world.schedule(scenario.faults)
            for index, requests in enumerate(self.steps):
                is_measured, busy_before_s = index >= scenario.workload.warmup_steps, _busy_gpu_s(world)
                if is_measured:
                    _add(run, world, -1)
                label = f"{self.arm}, seed {self.seed}, step {index + 1} of {len(self.steps)}"
                engines = sorted(world.engines)
                dealt = [engines[request.group_index % len(engines)] for request in requests]  # prompts round-robin
                dealt_to = None if self.control.routed else dealt
                step = await world.run_step(requests, dealt_to, partial(report, label))
                check_answers(step.finish_s, step.output_tokens, requests)
                if is_measured:
                    _add(run, world, 1)
                    run.busy_gpu_s += _busy_gpu_s(world) - busy_before_s
                    run.makespan_s.append(step.makespan_s)
                    run.samples += step.requests
                    run.output_tokens += step.output_tokens
                if index == len(self.steps) - 1:
                    _picture(world, step, run)
                elif scenario.workload.gap_s:
                    await world.advance(scenario.workload.gap_s)
            run.idle_fraction = 1 - run.busy_gpu_s / (scenario.gpus * run.total_s)
            run.transfers = world.transfers
        return run


def check_answers(finish_s: Sequence[float], output_tokens: int, requests: Sequence[SimRequest]) -> None:
    """Raise AssertionError unless every request has exactly one complete answer."""
    wanted = sum(request.output_tokens for request in requests)
    if len(finish_s) != len(requests) or output_tokens != wanted:
        raise AssertionError(f"got {len(finish_s)} of {len(requests)} answers, {output_tokens} of {wanted} tokens")


def _engines(world: World) -> list[VirtualEngine]:
    return [*world.engines.values(), *world.past_engines]


def _busy_gpu_s(world: World) -> float:
    return sum(engine.scheduler.busy_s * len(engine.gpus) for engine in _engines(world))


def _add(run: SeedRun, world: World, sign: int) -> None:
    """Add the world's counters, multiplied by `sign`, to the counters of the run."""
    run.moves += sign * world.fleet.state.totals.moves_done
    run.redeployments += sign * world.machines.starts_total
    run.tokens_recomputed += sign * world.gateway.tokens_recomputed
    run.preemptions += sign * sum(engine.scheduler.preemptions_total for engine in _engines(world))


def _picture(world: World, step: StepRecord, run: SeedRun) -> None:
    from_s, to_s = step.started_s, max(step.finish_s)
    run.remaining = countdown(sorted(at_s - from_s for at_s in step.finish_s))
    for engine in (*world.past_engines, *world.engines.values()):
        ended_s = to_s if engine.stopped_s is None else engine.stopped_s
        if ended_s <= from_s or engine.started_s >= to_s:
            continue
        running = [(max(0.0, at_s - from_s), count) for at_s, count in engine.running_at if at_s <= to_s]
        started_s = max(0.0, engine.started_s - from_s)
        first_gpu, gpus = engine.gpus[0], len(engine.gpus)
        run.spans.append(EngineSpan(engine.id, engine.kind.id, first_gpu, gpus, started_s, ended_s - from_s, running))


def _read_journal(path: Path, run: SeedRun) -> None:
    """Store in `run` the predicted and actual makespans of plans, and a digest of all journal entries."""
    reader = JournalReader(path)
    digest = hashlib.sha256()
    for entry in reader.since(0, limit=10_000_000):
        digest.update(json.dumps([entry.at_s, entry.kind, entry.subject, entry.body], sort_keys=True).encode())
        if entry.kind == EntryKind.PLAN_ACTUAL and entry.body["predicted_makespan_s"] is not None:
            run.predicted_actual_s.append((entry.body["predicted_makespan_s"], entry.body["actual_makespan_s"]))
    reader.close()
    run.journal_digest = digest.hexdigest()


@dataclass(slots=True)
class ArmRun:
    arm: str
    configuration: str  # the initial one
    seeds: list[SeedRun]

    @property
    def makespan_s(self) -> float:
        return median(step_s for run in self.seeds for step_s in run.makespan_s)

    @property
    def calibration_error(self) -> float | None:
        """The relative error of predicted makespans, as the median over plans, or None if there are no plans."""
        errors = [abs(p - a) / a for run in self.seeds for p, a in run.predicted_actual_s if a > 0]
        return median(errors) if errors else None


@dataclass(frozen=True, slots=True)
class NotKnowing:
    """The median makespans with different knowledge of output lengths (forecast, exact, mean only), and the median
    makespan of the tuned static baseline."""

    static_s: float
    forecast_s: float
    oracle_s: float
    mean_s: float | None  # None if the arm was not run

    @property
    def price_s(self) -> float:
        """The number of seconds per step that exact knowledge of the output lengths would save."""
        return self.forecast_s - self.oracle_s

    @property
    def kept(self) -> float | None:
        """The fraction of the oracle's gain that the forecast achieves, or None if the oracle has no gain."""
        gain_s = self.static_s - self.oracle_s
        return (self.static_s - self.forecast_s) / gain_s if gain_s > 0 else None


@dataclass(slots=True)
class ScenarioOutcome:
    scenario: GenerationScenario
    arms: list[ArmRun]
    static_makespan_s: dict[str, float]  # of the sweep that tunes verl_to, by configuration
    ceiling: Ceiling  # of the measured steps of all seeds
    alone_s: float | None = None  # makespan of `both` without sharing of NICs; None if none are shared, or not run

    def arm(self, name: str) -> ArmRun | None:
        return next((run for run in self.arms if run.arm == name), None)

    @property
    def ceiling_gain(self) -> float | None:
        """The total time of the tuned static baseline with round-robin prompts, divided by the total time of the
        ceiling (see static.py). It is None if the baseline was not run."""
        baseline = self.arm("verl_to")
        return None if baseline is None else sum(run.total_s for run in baseline.seeds) / self.ceiling.redeploying_s

    @property
    def contention_s(self) -> float | None:
        """The time, in seconds, that sharing the NICs adds to a step of the arm `both`. It is None if the arm was not
        run, or no traffic shares the NICs."""
        both = self.arm("both")
        return both.makespan_s - self.alone_s if both is not None and self.alone_s is not None else None

    @property
    def not_knowing(self) -> NotKnowing | None:
        """The makespans by knowledge of output lengths, or None if a required arm was not run."""
        static, forecast, oracle, mean = (self.arm(name) for name in ("verl_to", "both", "oracle", "mean_only"))
        if static is None or forecast is None or oracle is None:
            return None
        return NotKnowing(
            static.makespan_s, forecast.makespan_s, oracle.makespan_s, mean.makespan_s if mean is not None else None
        )

    def gain(self, run: ArmRun) -> float | None:
        """Return the ratio of the arm's samples per second to those of the tuned static baseline, as the median over
        seeds. Return None if the baseline was not run."""
        baseline = self.arm("verl_to")
        if baseline is None:
            return None
        pairs = zip(run.seeds, baseline.seeds, strict=True)
        return median(ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs)


def chosen(names: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """Return `names` without duplicates, or `known` if `names` is empty. Raises ProblemFaults for names that are not in
    `known`. `option` is the command-line option in the error message."""
    faults = [
        f"{option}[{i}]: must be one of {', '.join(known)}, got {name!r}"
        for i, name in enumerate(names)
        if name not in known
    ]
    if faults:
        raise ProblemFaults(faults)
    return list(dict.fromkeys(names or known))


def chosen_arms(names: Sequence[str]) -> list[str]:
    """Return the named arms in the order of ARMS, or an empty list if `names` is empty. Raises ProblemFaults for
    unknown names."""
    return sorted(chosen(names, ARMS, "--arms"), key=ARMS.index) if names else []


def run_scenario(
    scenario: GenerationScenario, arms: Sequence[str], seeds: Sequence[int], report: Report
) -> ScenarioOutcome:
    """Run the arms over the seeds. A sweep of all configurations as static fleets always runs, because it chooses the
    initial configuration of OrchestrRL's arms. Raises ProblemFaults if a configuration cannot run on the scenario's
    GPUs, and Permanent if a simulation makes no progress."""
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
    """Return a fault for each inline configuration, and for the initial configuration, if it cannot run on the
    scenario's GPUs. Unusable configurations of a profile are skipped instead, because a profile may describe more
    configurations than one job uses."""
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
    """Return the configurations that can hold the longest request and of which at least one engine fits on the GPUs.
    Raises ProblemFaults if there are none."""
    longest = _longest_tokens(scenario)
    every = kinds_of(scenario)
    kinds = {
        kind.id: kind
        for kind in every.values()
        if _holds(kind, longest) and homogeneous(kind, scenario.gpus, scenario.gpus_per_node)
    }
    if not kinds:
        wish = f"one must fit {scenario.gpus} GPUs and hold a request of {longest} tokens"
        raise ProblemFaults([f"engines.configurations: {wish}, got {[str(name) for name in every]}"])
    return kinds


def _shares_links(scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind]) -> bool:
    network = scenario.network
    return network.kv_transfer or network.weight_gbytes > 0 or any(kind.nic_gbps for kind in kinds.values())


def _static_run(scenario: GenerationScenario, seed: int, steps: Sequence[Ran]) -> SeedRun:
    """Return the results of a static arm for one seed, without the warm-up steps."""
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
