"""One arm in which the control plane acts: the steps of one seed through a simulated world, and its results."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrrl.core.config.schema import Config
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.lab.sim.engines import EngineKind, VirtualEngine, fleet_section, homogeneous
from orchestrrl.lab.sim.scenario import GenerationScenario
from orchestrrl.lab.sim.static import countdown
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.sim.world import StepRecord, World
from planner.model import ConfigurationId, EngineId, RequestId


@dataclass(slots=True)
class EngineSpan:
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
    busy_gpu_s: float = 0.0
    idle_fraction: float = 0.0  # of all GPU seconds of the steps
    moves: int = 0
    redeployments: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    transfers: int = 0  # of KV, instead of computing it again
    predicted_actual_s: list[tuple[float, float]] = field(default_factory=list)  # of each plan
    remaining: list[tuple[float, int]] = field(default_factory=list)
    spans: list[EngineSpan] = field(default_factory=list)
    journal_digest: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.makespan_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.total_s


Report = Callable[[str, int, int], None]  # what is under way, done, in all


@dataclass(frozen=True, slots=True)
class ArmControl:
    """What of ours an arm switches on."""

    planning: bool
    policy: str | None  # of the fast loop; None: what the scenario's daemon says
    routed: bool = True  # by the gateway, request by request; otherwise dealt as the framework deals
    knowledge: str = "forecast"


# A gain that no plan brings.
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
    """Everything that decides how it goes."""

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
        """An oracle's knowledge of every answer; None for the other arms."""
        if self.control.knowledge != "oracle":
            return None
        return {request.id: request.output_tokens for requests in self.steps for request in requests}

    def run(self, report: Report, keep_journal: Path | None = None) -> SeedRun:
        """The journal goes away afterwards, unless it is to be kept at a path."""
        with tempfile.TemporaryDirectory(prefix="orchestrrl-sim-") as folder:
            path = keep_journal or Path(folder) / "journal.sqlite"
            run = asyncio.run(self._run(path, report))
            _read_journal(path, run)
        return run

    def config(self) -> Config:
        """The scenario's daemon, with the loops that the arm leaves out made to hold."""
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
                step = await world.run_step(requests, self._dealt(world, requests), partial(report, label))
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

    def _dealt(self, world: World, requests: Sequence[SimRequest]) -> list[EngineId] | None:
        """Whole prompts in turn over the engines there are; None: the gateway routes them."""
        if self.control.routed:
            return None
        engines = sorted(world.engines)
        return [engines[request.group_index % len(engines)] for request in requests]


def check_answers(finish_s: Sequence[float], output_tokens: int, requests: Sequence[SimRequest]) -> None:
    """Raise AssertionError unless every request has its whole answer, once."""
    wanted = sum(request.output_tokens for request in requests)
    if len(finish_s) != len(requests) or output_tokens != wanted:
        raise AssertionError(f"{len(finish_s)} of {len(requests)} answers, {output_tokens} of {wanted} tokens")


def _engines(world: World) -> list[VirtualEngine]:
    return [*world.past_engines, *world.engines.values()]


def _busy_gpu_s(world: World) -> float:
    return sum(engine.scheduler.busy_s * len(engine.gpus) for engine in _engines(world))


def _add(run: SeedRun, world: World, sign: int) -> None:
    """Add the world's counters so far to the run's, or take them off."""
    run.moves += sign * world.fleet.state.totals.moves_done
    run.redeployments += sign * world.machines.starts_total
    run.tokens_recomputed += sign * world.gateway.tokens_recomputed
    run.preemptions += sign * sum(engine.scheduler.preemptions_total for engine in _engines(world))


def _picture(world: World, step: StepRecord, run: SeedRun) -> None:
    from_s, to_s = step.started_s, max(step.finish_s)
    run.remaining = countdown(sorted(at_s - from_s for at_s in step.finish_s))
    for engine in _engines(world):
        ended_s = to_s if engine.stopped_s is None else engine.stopped_s
        if ended_s <= from_s or engine.started_s >= to_s:
            continue
        running = [(max(0.0, at_s - from_s), count) for at_s, count in engine.running_at if at_s <= to_s]
        started_s = max(0.0, engine.started_s - from_s)
        first_gpu, gpus = engine.gpus[0], len(engine.gpus)
        run.spans.append(EngineSpan(engine.id, engine.kind.id, first_gpu, gpus, started_s, ended_s - from_s, running))


def _read_journal(path: Path, run: SeedRun) -> None:
    """What the plans foresaw, and a digest of all that was written down."""
    reader = JournalReader(path)
    digest = hashlib.sha256()
    for entry in reader.since(0, limit=10_000_000):
        digest.update(json.dumps([entry.at_s, entry.kind, entry.subject, entry.body], sort_keys=True).encode())
        if entry.kind == EntryKind.PLAN_ACTUAL and entry.body["predicted_makespan_s"] is not None:
            run.predicted_actual_s.append((entry.body["predicted_makespan_s"], entry.body["actual_makespan_s"]))
    reader.close()
    run.journal_digest = digest.hexdigest()
