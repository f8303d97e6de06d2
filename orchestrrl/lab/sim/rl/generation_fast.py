"""Simulate generation steps under the real planner and balancer, without the rest of the control plane. This simulation
is fast enough for the scoreboard.

The simulation includes the planner (forecast, plan admission and costs), called in the same way as in the daemon, the
balancer's packing, the engines' schedulers, and redeployments with their duration. Unlike `sim gen`, it excludes
agents, gateway, journal and operations. Telemetry is never delayed or stale. Moves and stops take no time. At the
beginning of a step, requests are distributed by KV capacity instead of being routed one by one. Predicted times are
not corrected by the outcomes of earlier plans, and there are no failures.

With a `kv_network`, the KV of requests is sent over the fabric when a plan replaces engines. If single requests move
between engines that remain, their KV arrives instantly. Without a `kv_network`, KV is recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import pairwise

from balancer.balance import BalanceSituation, decide_balance
from orchestrrl.core.config.schema import Config
from orchestrrl.daemon.planning import Planning
from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.net.fluid import summed
from orchestrrl.lab.sim.rl.generation_fleet import KvOutcome, Leaving, OverFabric
from orchestrrl.lab.sim.run import ControlledRun
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.admission import FREE, ControlState, OperatorControl
from planner.model import (
    Act,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FastPolicy,
    FinishedLength,
    GpuId,
    Mode,
    Plan,
    PlanId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.plan import History
from planner.solver.from_snapshot import instances_text

NEVER_CHANGES = OperatorControl(ControlState.PINNED, reason="this arm does not plan")


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request and its engine."""

    request: SimRequest
    engine: EngineId
    generated: int = 0
    moves: int = 0
    moved_s: float | None = None

    def leaving(self, source: "LiveEngine", kind: EngineKind, gpus: tuple[GpuId, ...]) -> Leaving:
        return Leaving(
            self.request.id,
            (source.kind.profile.parallelism, source.gpus),
            (kind.profile.parallelism, gpus),
            kind.profile.prefill_tokens_per_s,
            self.request.prompt_tokens + self.generated,
        )

    def view(self, running: set[RequestId]) -> RequestView:
        request = self.request
        return RequestView(
            id=request.id,
            engine=self.engine,
            state=RequestState.RUNNING if request.id in running else RequestState.WAITING,
            prompt_tokens=request.prompt_tokens,
            generated_tokens=self.generated,
            max_tokens=request.max_tokens,
            group=request.group,
            moves=self.moves,
        )


@dataclass(slots=True)
class LiveEngine:
    """A simulated engine, which begins to serve requests at `ready_s`."""

    id: EngineId
    kind: EngineKind
    gpus: tuple[GpuId, ...]
    ready_s: float
    scheduler: Scheduler = field(init=False)
    seen: tuple[float, int] = field(init=False)  # time of the last rate update, and the token count at that time
    decode_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        self.scheduler, self.seen = Scheduler(self.kind.shape, self.ready_s), (self.ready_s, 0)

    def submit(self, live: LiveRequest, at_s: float, *, prefilled: bool) -> None:
        live.request.submit(self.scheduler, max(at_s, self.ready_s), live.generated, prefilled=prefilled)

    def update_rate(self, now_s: float, window_s: float) -> None:
        """Update the measured decode rate if at least `window_s` seconds have passed since the last update."""
        since_s, tokens = self.seen
        if now_s - since_s >= window_s:
            made = self.scheduler.generated_tokens_total
            self.decode_tokens_per_s = (made - tokens) / (now_s - since_s) if self.scheduler.running else None
            self.seen = now_s, made

    def view(self) -> EngineView:
        scheduler, shape = self.scheduler, self.scheduler.shape
        capacity_tokens = shape.blocks * shape.block_tokens
        return EngineView(
            id=self.id,
            url="",
            configuration=self.kind.id,
            health=EngineHealth.OK,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_capacity_tokens=capacity_tokens,
            kv_free_tokens=capacity_tokens - scheduler.kv_used_tokens,
            max_sequences=self.kind.profile.max_sequences,
            decode_tokens_per_s=self.decode_tokens_per_s,
            age_s=0.0,
            gpus=self.gpus,
            preemptions_total=scheduler.preemptions_total,
        )


@dataclass(slots=True)
class FastStep:
    """The results of one step. Times are in seconds from the step's beginning."""

    finish_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    engines_started: int = 0
    phases: list[tuple[float, str]] = field(default_factory=list)  # begin and name: fleets, and changes of fleets
    tokens: dict[ConfigurationId, int] = field(default_factory=dict)  # generated and prefilled by engines
    kv_tier_bytes: dict[str, float] = field(default_factory=dict)
    passed: list[Leaving] = field(default_factory=list)  # requests whose KV moved between engines that remained

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)

    @property
    def phases_s(self) -> dict[str, float]:
        """The time in seconds spent with each fleet, in redeployments and in KV moves. The times add up to the duration
        of the step. Engines that remain keep decoding during a redeployment."""
        phases_s: dict[str, float] = {}
        end_s = self.makespan_s
        for (begin_s, name), (until_s, _) in pairwise([*self.phases, (end_s, "")]):
            seconds = min(until_s, end_s) - min(begin_s, end_s)
            if seconds > 0:
                phases_s[name] = phases_s.get(name, 0.0) + seconds
        return phases_s


def run_fast(run: ControlledRun, kv_network: OverFabric | None = None) -> list[FastStep]:
    """Run all steps, including the warm-up steps, and return their results. `kv_network` simulates the transfer of KV.
    If it is None, KV is recomputed."""
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
        scenario, kind = run.scenario, run.kinds[run.initial]
        for id, gpus in homogeneous(kind, scenario.gpus, scenario.gpus_per_node).items():
            self._engines[id] = LiveEngine(id, kind, gpus, 0.0)

    def step(self, requests: Sequence[SimRequest]) -> FastStep:
        """Run a step from the first request to the last answer."""
        step, started_s = FastStep(phases=[(0.0, self._fleet_text())]), self._now_s
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
        step.tokens = {name: count - before.get(name, 0) for name, count in self._tokens().items()}
        if step.passed and self._kv_network is not None:
            step.kv_tier_bytes = summed([step.kv_tier_bytes, self._kv_network.sent(step.passed)])
        self._planning.lengths.step_ended(tuple(self._finished))
        return step

    def _tokens(self) -> dict[ConfigurationId, int]:
        """Return the number of tokens generated and prefilled so far by the engines of each configuration."""
        tokens: dict[ConfigurationId, int] = {}
        for engine in (*self._engines.values(), *self._past):
            passed = engine.scheduler.generated_tokens_total + engine.scheduler.prefilled_tokens_total
            tokens[engine.kind.id] = tokens.get(engine.kind.id, 0) + passed
        return tokens

    def _submit(self, requests: Sequence[SimRequest]) -> None:
        """Submit requests to engines. If the arm routes requests, each request goes to the engine with the fewest
        requests in proportion to its KV capacity. The gateway's load index ranks idle engines in the same way.
        Otherwise, prompts are assigned round-robin."""
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
        """Run the slow loop, then the fast loop unless the slow loop has changed the fleet."""
        snapshot = self._snapshot(started_s)
        if slow:
            plan = self._plan(snapshot)
            if isinstance(plan.verdict, Act) and plan.instances:
                self._carry_out(plan, step, started_s)
                return
        if self._config.fast.policy is not FastPolicy.NONE:
            self._balance(snapshot, step)

    def _snapshot(self, started_s: float) -> Snapshot:
        """Return the snapshot of telemetry that agents and a gateway would report without delay: every age is 0."""
        running = self._running()
        return Snapshot(
            now_s=self._now_s,
            engines=tuple(self._engines[id].view() for id in sorted(self._engines)),
            requests=tuple(self._live[id].view(running) for id in sorted(self._live)),
            finished=tuple(self._finished),
            requests_age_s=0.0,
            step_started_s=started_s,
        )

    def _running(self) -> set[RequestId]:
        return {each.id for engine in self._engines.values() for each in engine.scheduler.running}

    def _fleet_text(self) -> str:
        return instances_text([engine.kind.id for engine in self._engines.values()])

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
        situation = BalanceSituation(
            Mode.ACT,
            configurations=self._planning.lines,
            remaining_tokens=self._planning.remaining_tokens(snapshot),
            distributions=self._planning.distributions(snapshot),
            moved_s={id: live.moved_s for id, live in self._live.items() if live.moved_s is not None},
        )
        decision = decide_balance(snapshot, fast, situation)
        if isinstance(decision.verdict, Act):
            for move in decision.moves:
                self._move(self._live[move.request], move.to_engine, step, prefilled=self._kv_network is not None)

    def _carry_out(self, plan: Plan, step: FastStep, started_s: float) -> None:
        """Carry out a plan. Removed engines stop at once. New engines serve requests after they have started and
        received KV."""
        new = [each for each in plan.instances if not each.kept]
        kept = {each.id for each in plan.instances if each.kept}
        moved = [
            (live, each)
            for each in plan.instances
            for request in each.requests
            if (live := self._live.get(request)) is not None and live.engine != each.id
        ]
        kv, running = KvOutcome({}, frozenset(), 0.0, {}), self._running()
        if self._kv_network is not None:
            kv = self._kv_network(
                [
                    live.leaving(self._engines[live.engine], self._run.kinds[each.configuration], each.gpus)
                    for live, each in moved
                    if live.request.id in running
                ]
            )
        stopped = {id: self._engines.pop(id) for id in sorted(self._engines) if id not in kept}
        self._past += stopped.values()
        up_s = self._now_s
        for each in new:
            kind = self._run.kinds[each.configuration]
            own_s = self._now_s + kind.profile.switch_s
            up_s = max(up_s, own_s)
            own_s += kv.ready_s.get(each.gpus, 0.0)  # KV of other engines does not delay this one
            self._engines[each.id] = LiveEngine(each.id, kind, each.gpus, own_s)
        for live, each in moved:
            prefilled = live.request.id in kv.transferred
            self._move(live, each.id, step, prefilled=prefilled, source=stopped.get(live.engine))
        if not new:
            step.phases[-1] = step.phases[-1][0], self._fleet_text()
            return
        self._last_redeploy_s = self._now_s
        step.kv_tier_bytes = summed([step.kv_tier_bytes, kv.tier_bytes])
        step.engines_started += len(new)
        begin_s = self._now_s - started_s
        started_up_s = begin_s + (up_s - self._now_s)
        kv_s = max(0.0, max(self._engines[each.id].ready_s for each in new) - up_s)
        step.phases += [
            (begin_s, "redeploying"),
            (started_up_s, "moving KV"),
            (started_up_s + kv_s, self._fleet_text()),
        ]

    def _move(
        self, live: LiveRequest, to: EngineId, step: FastStep, *, prefilled: bool, source: LiveEngine | None = None
    ) -> None:
        engine = source or self._engines[live.engine]
        ran = any(each.id == live.request.id for each in engine.scheduler.running)
        engine.scheduler.abort([live.request.id])
        live.engine, live.moves, live.moved_s = to, live.moves + ran, self._now_s
        if ran and prefilled and source is None:
            step.passed.append(live.leaving(engine, self._engines[to].kind, self._engines[to].gpus))
        self._engines[to].submit(live, self._now_s, prefilled=prefilled)


def _quick(run: ControlledRun) -> Config:
    """Return the run's configuration. If the arm does not carry out plans, the search budget is minimal, because its
    plans serve only to estimate step times."""
    config = run.config()
    if run.control.planning:
        return config
    return config.model_copy(update={"slow": config.slow.model_copy(update={"work_budget": 1})})
