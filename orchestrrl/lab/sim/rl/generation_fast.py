"""Generation steps under the real planner and balancer without the world around them: quick enough for a scoreboard.

What stays: the planner with its forecast, admission and costs as the daemon asks it, the balancer's packing, the
engines' schedulers, redeployments and their seconds. What is left out, against `sim gen`: agents, gateway, journal and
operations. Telemetry is never late or old, moves and stops are carried out in no time, requests are first routed by KV
room instead of one by one, plans are not corrected by how earlier ones came out, and nothing fails.
With a `kv_network` KV goes over the fabric when engines change, and is there at once where single requests move between
engines that stay; without one it is computed again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from balancer.balance import BalanceSituation, decide_balance
from orchestrrl.core.config.schema import Config
from orchestrrl.daemon.planning import Planning
from orchestrrl.lab.sim.controlled import ControlledRun
from orchestrrl.lab.sim.engines import homogeneous
from orchestrrl.lab.sim.rl.generation_fleet import summed
from orchestrrl.lab.sim.rl.generation_records import LiveEngine, LiveRequest, leaving_of, snapshot_of
from orchestrrl.lab.sim.rl.kv_moves import KvOutcome, Leaving, OverFabric
from orchestrrl.lab.sim.workload import SimRequest
from planner.admission import FREE, ControlState, OperatorControl
from planner.model import (
    Act,
    ConfigurationId,
    EngineId,
    FastPolicy,
    FinishedLength,
    Mode,
    Plan,
    PlanId,
    PlannedInstance,
    RequestId,
    Snapshot,
)
from planner.plan import History
from planner.solver.from_snapshot import instances_text

NEVER_CHANGES = OperatorControl(ControlState.PINNED, reason="this arm does not plan")


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change of engines, seconds from its step's beginning."""

    begin_s: float
    switch_s: float  # until the last new engine is up
    kv_s: float  # and then until its KV is there
    before: str
    engines: int  # new ones


@dataclass(slots=True)
class FastStep:
    """Seconds from the step's beginning."""

    finish_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    redeployments: list[FleetChange] = field(default_factory=list)
    fleet: str = ""  # at its end, in words
    tokens: dict[ConfigurationId, int] = field(default_factory=dict)  # that passed engines, generated and prefilled
    kv_tier_bytes: dict[str, float] = field(default_factory=dict)
    passed: list[Leaving] = field(default_factory=list)  # whose KV went from one engine to another beside everything

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)


def run_fast(run: ControlledRun, kv_network: OverFabric | None = None) -> list[FastStep]:
    """The run's steps one after another; its warm-up included."""
    fleet = _FastFleet(run, kv_network)
    return [fleet.step(requests) for requests in run.steps]


class _FastFleet:
    def __init__(self, run: ControlledRun, kv_network: OverFabric | None) -> None:
        self._run, self._kv_network = run, kv_network
        self._config = _quick(run)
        self._planning = Planning(
            self._config, lambda _id, _facts: None, lambda: "", known_output_tokens=run.known_output_tokens
        )
        self._now_s = 0.0
        self._engines: dict[EngineId, LiveEngine] = {}
        self._past: list[LiveEngine] = []
        self._live: dict[RequestId, LiveRequest] = {}
        self._finished: list[FinishedLength] = []
        self._last_redeploy_s: float | None = None
        self._settling = False
        scenario, kind = run.scenario, run.kinds[run.initial]
        for placement in homogeneous(kind, scenario.gpus, scenario.gpus_per_node):
            self._engines[placement.engine] = LiveEngine.start(placement.engine, kind, placement.gpus, 0.0)

    def step(self, requests: Sequence[SimRequest]) -> FastStep:
        """From the first request to the last answer."""
        step, started_s = FastStep(), self._now_s
        self._finished = []
        before = self._tokens()
        self._submit(requests)
        fast_s, slow_s = self._config.fast.interval_s, self._config.slow.interval_s
        next_fast_s, next_slow_s = started_s + fast_s, started_s + min(fast_s, slow_s)
        while self._live:
            self._now_s = min(next_fast_s, next_slow_s)
            self._advance(step, started_s)
            if self._live and all(engine.ready_s <= self._now_s for engine in self._engines.values()):
                self._decide(step, started_s, slow=self._now_s >= next_slow_s)
            next_fast_s += fast_s if self._now_s >= next_fast_s else 0.0
            next_slow_s += slow_s if self._now_s >= next_slow_s else 0.0
        step.finish_s.sort()
        step.fleet = _configurations_text(self._engines.values())
        step.tokens = {name: count - before.get(name, 0) for name, count in self._tokens().items()}
        if step.passed and self._kv_network is not None:
            step.kv_tier_bytes = summed([step.kv_tier_bytes, self._kv_network.sent(step.passed)])
        self._planning.lengths.step_ended(tuple(self._finished))
        return step

    def _tokens(self) -> dict[ConfigurationId, int]:
        """That have passed engines of each configuration."""
        tokens: dict[ConfigurationId, int] = {}
        for engine in (*self._engines.values(), *self._past):
            passed = engine.scheduler.generated_tokens_total + engine.scheduler.prefilled_tokens_total
            tokens[engine.kind.id] = tokens.get(engine.kind.id, 0) + passed
        return tokens

    def _submit(self, requests: Sequence[SimRequest]) -> None:
        """Dealt as the arm does, or by KV room: fewest first, as the gateway's load index has it of idle engines."""
        engines = [self._engines[id] for id in sorted(self._engines)]
        queue = [(0.0, place) for place in range(len(engines))]
        heapify(queue)
        for request in requests:
            load, place = queue[0]
            if self._run.control.routed:
                capacity = engines[place].kind.profile.kv_capacity_tokens
                heapreplace(queue, (load + 1 / capacity, place))
            else:
                place = request.group_index % len(engines)
            live = LiveRequest(request, engines[place].id)
            self._live[request.id] = live
            engines[place].submit(live, self._now_s, prefilled=False)

    def _advance(self, step: FastStep, started_s: float) -> None:
        for engine in self._engines.values():
            if engine.ready_s > self._now_s:
                continue
            for progress in engine.scheduler.advance(self._now_s):
                live = self._live[progress.id]
                live.generated += progress.tokens
                if progress.finished_s is not None:
                    del self._live[progress.id]
                    step.finish_s.append(progress.finished_s - started_s)
                    step.output_tokens += live.generated
                    cut = live.generated >= live.request.max_tokens
                    self._finished.append(FinishedLength(live.generated, censored=cut))
            engine.update_rate(self._now_s, self._run.scenario.control.rate_window_s)

    def _decide(self, step: FastStep, started_s: float, *, slow: bool) -> None:
        """The slow loop first: it may change what the fast one would balance."""
        snapshot = snapshot_of(self._now_s, started_s, self._engines, self._live.values(), tuple(self._finished))
        if slow:
            plan = self._plan(snapshot)
            if isinstance(plan.verdict, Act) and plan.instances:
                self._carry_out(plan, step, started_s)
                return
        if self._config.fast.policy is not FastPolicy.NONE:
            self._balance(snapshot, step)

    def _plan(self, snapshot: Snapshot) -> Plan:
        known = self._planning.known_output_tokens
        return self._planning.question(
            PlanId(f"p{int(self._now_s * 1000):09d}"),
            snapshot,
            History(last_redeploy_s=self._last_redeploy_s, known_output_tokens=known),
            mode=Mode.ACT,
            control=FREE if self._run.control.planning else NEVER_CHANGES,
            can_deploy=True,
        )()

    def _balance(self, snapshot: Snapshot, step: FastStep) -> None:
        fast = self._config.fast
        moved_s = {id: live.moved_s for id, live in self._live.items() if live.moved_s is not None}
        rested = {id: at_s for id, at_s in moved_s.items() if self._now_s - at_s <= fast.rest_after_move_s}
        situation = BalanceSituation(
            Mode.ACT,
            configurations=self._planning.lines,
            remaining_tokens=self._planning.remaining_tokens(snapshot),
            distributions=self._planning.distributions(snapshot),
            moved_s=rested,
            settling=self._settling,
        )
        decision = decide_balance(snapshot, fast, situation)
        self._settling = bool(decision.moves)
        if isinstance(decision.verdict, Act):
            for move in decision.moves:
                self._move(move.request, move.to_engine, step, prefilled=self._kv_network is not None)

    def _carry_out(self, plan: Plan, step: FastStep, started_s: float) -> None:
        """Engines that go are stopped at once; new ones answer when they are up and their KV is there."""
        before = _configurations_text(self._engines.values())
        new = [each for each in plan.instances if not each.kept]
        kv = self._kv(plan.instances) if self._kv_network is not None else None
        kept = {each.id for each in plan.instances if each.kept}
        stopped = {id: self._engines.pop(id) for id in sorted(self._engines) if id not in kept}
        self._past += stopped.values()
        kinds = self._run.kinds
        ready_s = {each.id: self._now_s + kinds[each.configuration].profile.switch_s for each in new}
        up_s = max(ready_s.values(), default=self._now_s)
        for each in new:
            own_s = ready_s[each.id] + (kv.ready_s.get(each.gpus, 0.0) if kv else 0.0)  # the others' KV delays nobody
            self._engines[each.id] = LiveEngine.start(each.id, kinds[each.configuration], each.gpus, own_s)
        for each in plan.instances:
            for request in each.requests:
                live = self._live.get(request)
                if live is not None and live.engine != each.id:
                    held = stopped.get(live.engine)
                    prefilled = kv is not None and request in kv.transferred
                    self._move(request, each.id, step, prefilled=prefilled, source=held)
        if new:
            self._last_redeploy_s = self._now_s
            kv_s = max(0.0, max(self._engines[each.id].ready_s for each in new) - up_s)
            step.kv_tier_bytes = summed([step.kv_tier_bytes, kv.tier_bytes if kv else {}])
            change = FleetChange(self._now_s - started_s, up_s - self._now_s, kv_s, before, len(new))
            step.redeployments.append(change)

    def _kv(self, instances: Sequence[PlannedInstance]) -> KvOutcome:
        assert self._kv_network is not None
        running = {each.id for engine in self._engines.values() for each in engine.scheduler.running}
        leaving = []
        for each in instances:
            kind = self._run.kinds[each.configuration]
            for request in each.requests:
                live = self._live.get(request)
                if live is None or live.engine == each.id or request not in running:
                    continue
                leaving.append(leaving_of(live, self._engines[live.engine], kind, each.gpus))
        return self._kv_network(leaving)

    def _move(
        self, request: RequestId, to: EngineId, step: FastStep, *, prefilled: bool, source: LiveEngine | None = None
    ) -> None:
        live = self._live[request]
        engine = source or self._engines[live.engine]
        ran = any(each.id == request for each in engine.scheduler.running)
        engine.scheduler.abort([request])
        live.engine, live.moves, live.moved_s = to, live.moves + ran, self._now_s
        if ran and prefilled and source is None:
            step.passed.append(leaving_of(live, engine, self._engines[to].kind, self._engines[to].gpus))
        self._engines[to].submit(live, self._now_s, prefilled=prefilled)


def _quick(run: ControlledRun) -> Config:
    """Of a plan that is never carried out, only what it knows of step times is wanted: nothing is searched for it."""
    config = run.config()
    if run.control.planning:
        return config
    return config.model_copy(update={"slow": config.slow.model_copy(update={"work_budget": 1})})


def _configurations_text(engines: Iterable[LiveEngine]) -> str:
    return instances_text([engine.kind.id for engine in engines])
