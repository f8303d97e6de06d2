"""Run a scenario: every arm over every seed, the same requests for all of them."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from orchestrrl.config import Config
from orchestrrl.errors import ProblemFaults
from orchestrrl.journal import JournalReader, Kind
from orchestrrl.sim.engines import EngineKind, Placement, VirtualEngine, fleet_section, homogeneous, kinds_of
from orchestrrl.sim.scenario import ARMS, Scenario
from orchestrrl.sim.static import StaticStep, dealt, run_partial, run_static
from orchestrrl.sim.workload import SimRequest, requests_of_step
from orchestrrl.sim.world import World
from planner.model import ConfigurationId

Report = Callable[[str, int, int], None]  # what is under way, done, in all

NEVER = 1e18  # a spread of load that no fleet has: the balancer then leaves everything where it is


@dataclass(slots=True)
class Span:
    """One engine on its GPUs, for pictures: how many sequences it ran from when on."""

    engine: str
    configuration: str
    first_gpu: int
    gpus: int
    started_s: float
    ended_s: float
    running: list[tuple[float, int]]


@dataclass(slots=True)
class SeedRun:
    """One arm over the measured steps of one seed. Pictures show the last step."""

    seed: int
    makespan_s: list[float] = field(default_factory=list)  # by step
    samples: int = 0
    output_tokens: int = 0
    idle_fraction: float = 0.0  # of all GPU seconds of the steps
    moves: int = 0
    switches: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    predicted_actual_s: list[tuple[float, float]] = field(default_factory=list)  # of each plan
    remaining: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    journal_digest: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.makespan_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.total_s


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


@dataclass(slots=True)
class Outcome:
    scenario: Scenario
    arms: list[ArmRun]
    static_makespan_s: dict[str, float]  # of the sweep behind verl_to, by configuration

    def arm(self, name: str) -> ArmRun | None:
        return next((run for run in self.arms if run.arm == name), None)

    def gain(self, run: ArmRun) -> float | None:
        """Samples per second over those of the tuned static baseline: median over seeds."""
        baseline = self.arm("verl_to")
        if baseline is None:
            return None
        pairs = zip(run.seeds, baseline.seeds, strict=True)
        return median(ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Control:
    """What of ours an arm switches on."""

    planning: bool
    balancing: bool
    routed: bool  # by the gateway, request by request; otherwise dealt as the framework deals
    knowledge: str = "forecast"


CONTROLLED = {
    "planning": Control(True, False, False),
    "balancing": Control(False, True, True),
    "both": Control(True, True, True),
    "mean_only": Control(True, True, True, "mean"),
    "oracle": Control(True, True, True, "oracle"),
}


def chosen_arms(names: Sequence[str], scenario: Scenario) -> list[str]:
    faults = [
        f"--arms[{i}]: must be one of {', '.join(ARMS)}, got {name!r}"
        for i, name in enumerate(names)
        if name not in ARMS
    ]
    if faults:
        raise ProblemFaults(faults)
    wanted = set(names or scenario.arms)
    return [arm for arm in ARMS if arm in wanted]


def run_scenario(scenario: Scenario, arms: Sequence[str], seeds: Sequence[int], report: Report) -> Outcome:
    """The static sweep always runs: it chooses what our arms begin with. Raises ProblemFaults, Permanent."""
    kinds = _usable_kinds(scenario)
    steps = {
        seed: [requests_of_step(scenario.workload, seed, k) for k in range(scenario.workload.steps)] for seed in seeds
    }
    total = len(kinds) * len(seeds)
    sweep: dict[ConfigurationId, list[SeedRun]] = {}
    for index, kind in enumerate(kinds.values()):
        sweep[kind.id] = []
        for position, seed in enumerate(seeds):
            report(f"static {kind.id}, seed {seed}", index * len(seeds) + position, total)
            sweep[kind.id].append(_static(scenario, kind, seed, steps[seed]))
    tuned = min(sweep, key=lambda name: median(run.total_s for run in sweep[name]))
    widest = max(kinds.values(), key=lambda kind: (kind.gpus <= scenario.gpus_per_node, kind.gpus)).id
    initial = ConfigurationId(scenario.engines.initial or tuned)
    runs = []
    for arm in arms:
        if arm in ("verl_to", "verl_lo"):
            name = tuned if arm == "verl_to" else widest
            runs.append(ArmRun(arm, name, sweep[name]))
        elif arm == "partial_rollout":
            runs.append(ArmRun(arm, tuned, [_partial(scenario, kinds[tuned], seed, steps[seed]) for seed in seeds]))
        else:
            runs.append(
                ArmRun(
                    arm,
                    initial,
                    [_controlled(scenario, kinds, initial, arm, seed, steps[seed], report) for seed in seeds],
                )
            )
    return Outcome(scenario, runs, {str(k): median(s for r in v for s in r.makespan_s) for k, v in sweep.items()})


def _usable_kinds(scenario: Scenario) -> dict[ConfigurationId, EngineKind]:
    """Configurations that have room for the longest request, and of which there is at least one engine."""
    longest = scenario.workload.prompt_tokens[1] + scenario.workload.max_tokens
    kinds = {}
    for kind in kinds_of(scenario).values():
        fits = kind.shape.blocks * kind.shape.block_tokens >= longest + kind.shape.block_tokens
        if fits and homogeneous(kind, scenario.gpus, scenario.gpus_per_node):
            kinds[kind.id] = kind
    if not kinds:
        raise ProblemFaults(
            [
                f"engines.configurations: none fits {scenario.gpus} GPUs and holds a request of {longest} tokens, "
                f"got {[str(name) for name in kinds_of(scenario)]}"
            ]
        )
    return kinds


def _measured(scenario: Scenario, items: Sequence[StaticStep]) -> Sequence[StaticStep]:
    return items[scenario.workload.warmup_steps :]


def _static(scenario: Scenario, kind: EngineKind, seed: int, steps: Sequence[Sequence[SimRequest]]) -> SeedRun:
    fleet = homogeneous(kind, scenario.gpus, scenario.gpus_per_node)
    ran = _measured(scenario, [run_static(kind, dealt(requests, len(fleet))) for requests in steps])
    return _static_run(scenario, kind, seed, fleet, ran)


def _partial(scenario: Scenario, kind: EngineKind, seed: int, steps: Sequence[Sequence[SimRequest]]) -> SeedRun:
    """What an earlier step cut goes first, dealt over all engines."""
    fleet = homogeneous(kind, scenario.gpus, scenario.gpus_per_node)
    carried: list[tuple[SimRequest, int]] = []
    ran = []
    for requests in steps:
        placement: list[list[tuple[SimRequest, int]]] = [carried[place :: len(fleet)] for place in range(len(fleet))]
        for place, held in enumerate(dealt(requests, len(fleet))):
            placement[place] += [(request, 0) for request in held]
        step = run_partial(kind, placement, scenario.partial_share)
        carried = step.carried
        ran.append(step)
    return _static_run(scenario, kind, seed, fleet, _measured(scenario, ran))


def _static_run(
    scenario: Scenario, kind: EngineKind, seed: int, fleet: Sequence[Placement], steps: Sequence[StaticStep]
) -> SeedRun:
    run = SeedRun(seed, [step.makespan_s for step in steps], sum(step.samples for step in steps))
    busy_s = sum(sum(step.busy_s) for step in steps) * kind.gpus
    run.idle_fraction = 1 - busy_s / (scenario.gpus * run.total_s)
    run.preemptions = sum(step.preemptions for step in steps)
    last = steps[-1]
    in_flight = len(last.finish_s) + len(last.carried)
    run.remaining = [(0.0, in_flight), *((at_s, in_flight - i - 1) for i, at_s in enumerate(last.finish_s))]
    for placement, ends in zip(fleet, last.finish_s_by_engine, strict=True):
        running = [(0.0, len(ends)), *((at_s, len(ends) - i - 1) for i, at_s in enumerate(sorted(ends)))]
        run.spans.append(Span(placement.engine, kind.id, placement.gpus[0], kind.gpus, 0.0, last.makespan_s, running))
    return run


def _controlled(
    scenario: Scenario,
    kinds: Mapping[ConfigurationId, EngineKind],
    initial: ConfigurationId,
    arm: str,
    seed: int,
    steps: Sequence[Sequence[SimRequest]],
    report: Report,
) -> SeedRun:
    with tempfile.TemporaryDirectory(prefix="orchestrrl-sim-") as folder:
        path = Path(folder) / "journal.sqlite"
        config = _config(scenario, kinds, CONTROLLED[arm])
        run = asyncio.run(_through_world(scenario, kinds, initial, arm, seed, steps, config, path, report))
        _read_journal(path, run)
    return run


def _config(scenario: Scenario, kinds: Mapping[ConfigurationId, EngineKind], control: Control) -> Config:
    """The scenario's daemon, with the loops that the arm leaves out made to hold."""
    sections = {name: dict(scenario.daemon.get(name) or {}) for name in ("fast", "slow")}
    if not control.balancing:
        sections["fast"]["theta"] = NEVER
    sections["slow"]["knowledge"] = control.knowledge
    daemon = {"mode": "act", **scenario.daemon, **sections}
    return scenario.model_copy(update={"daemon": daemon}).daemon_config(fleet_section(scenario, kinds))


async def _through_world(
    scenario: Scenario,
    kinds: Mapping[ConfigurationId, EngineKind],
    initial: ConfigurationId,
    arm: str,
    seed: int,
    steps: Sequence[Sequence[SimRequest]],
    config: Config,
    journal_path: Path,
    report: Report,
) -> SeedRun:
    control = CONTROLLED[arm]
    run = SeedRun(seed)
    world = World(config, kinds, scenario.control, scenario.gpus_per_node, journal_path)
    fleet = homogeneous(kinds[initial], scenario.gpus, scenario.gpus_per_node)
    world.deploy(initial, fleet)
    if not control.planning:
        world.plane.plans.pin("this arm does not plan", 0.0)
    if control.knowledge == "oracle":
        world.know({request.id: request.output_tokens for requests in steps for request in requests})
    async with world:
        world.schedule(scenario.faults)
        busy_s = 0.0
        for index, requests in enumerate(steps):
            measured = index >= scenario.workload.warmup_steps
            before = _Counts.of(world)
            engines = sorted(world.engines)
            to = None if control.routed else [engines[request.group_index % len(engines)] for request in requests]
            label = f"{arm}, seed {seed}, step {index + 1} of {len(steps)}"
            step = await world.run_step(requests, to, lambda done, total, label=label: report(label, done, total))  # type: ignore[misc]
            _check(step.finish_s, step.output_tokens, requests)
            if measured:
                busy_s += _Counts.of(world).take(before, run)
                run.makespan_s.append(step.makespan_s)
                run.samples += step.requests
                run.output_tokens += step.output_tokens
            if index == len(steps) - 1:
                ends = sorted(at_s - step.started_s for at_s in step.finish_s)
                run.remaining = [(0.0, len(ends)), *((at_s, len(ends) - i - 1) for i, at_s in enumerate(ends))]
                run.spans = _spans(world, step.started_s, max(step.finish_s))
            elif scenario.workload.gap_s:
                await world.advance(scenario.workload.gap_s)
        run.idle_fraction = 1 - busy_s / (scenario.gpus * run.total_s)
    return run


def _check(finish_s: Sequence[float], output_tokens: int, requests: Sequence[SimRequest]) -> None:
    """Every request has its whole answer, once."""
    wanted = sum(request.output_tokens for request in requests)
    if len(finish_s) != len(requests) or output_tokens != wanted:
        raise AssertionError(f"{len(finish_s)} of {len(requests)} answers, {output_tokens} of {wanted} tokens")


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of a whole run, to be taken before and after a step."""

    busy_gpu_s: float
    moves: int
    switches: int
    recomputed: int
    preemptions: int

    @classmethod
    def of(cls, world: World) -> "_Counts":
        engines = [*world.engines.values(), *world.past_engines]
        return cls(
            sum(engine.scheduler.busy_s * len(engine.gpus) for engine in engines),
            world.plane.state.totals.moves_done,
            world.deployer.starts_total,
            world.gateway.tokens_recomputed,
            sum(engine.scheduler.preemptions_total for engine in engines),
        )

    def take(self, before: "_Counts", run: SeedRun) -> float:
        run.moves += self.moves - before.moves
        run.switches += self.switches - before.switches
        run.tokens_recomputed += self.recomputed - before.recomputed
        run.preemptions += self.preemptions - before.preemptions
        return self.busy_gpu_s - before.busy_gpu_s


def _spans(world: World, from_s: float, to_s: float) -> list[Span]:
    engines: list[VirtualEngine] = [*world.past_engines, *world.engines.values()]
    spans = []
    for engine in engines:
        ended_s = to_s if engine.stopped_s is None else engine.stopped_s
        if ended_s <= from_s or engine.started_s >= to_s:
            continue
        running = [(max(0.0, at_s - from_s), count) for at_s, count in engine.running_at if at_s <= to_s]
        started_s = max(0.0, engine.started_s - from_s)
        spans.append(
            Span(engine.id, engine.kind.id, engine.gpus[0], len(engine.gpus), started_s, ended_s - from_s, running)
        )
    return spans


def _read_journal(path: Path, run: SeedRun) -> None:
    reader = JournalReader(path)
    digest = hashlib.sha256()
    for entry in reader.since(0, limit=10_000_000):
        digest.update(json.dumps([entry.at_s, entry.kind, entry.subject, entry.body], sort_keys=True).encode())
        if entry.kind == Kind.PLAN_ACTUAL and entry.body["predicted_makespan_s"] is not None:
            run.predicted_actual_s.append((entry.body["predicted_makespan_s"], entry.body["actual_makespan_s"]))
    reader.close()
    run.journal_digest = digest.hexdigest()
