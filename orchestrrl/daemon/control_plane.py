"""The daemon without its sockets: reports and results come in, ticks decide, orders go out to attached nodes.

observe -> state -> decide -> admit -> journal -> act -> observe. Time is the clock's; whoever owns the loops calls
`fast_tick` and `slow_tick`.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from balancer.balance import BalanceDecision, BalanceSituation, balance_problem, decide_balance
from balancer.move_limits import LastMoves
from orchestrrl.core.addresses import host_id
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import Config
from orchestrrl.core.defects import ACTING, MOVES, PLANS, REPEATED, Defect, Defects
from orchestrrl.core.errors import OrchestrRLError, few
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import Attachment, NodeHello, NodeKind, NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationResult,
)
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.core.unknown_outcomes import OperationEvidence
from orchestrrl.daemon.plan_book import PlanBook, Redeployer
from orchestrrl.daemon.planning import Planning
from orchestrrl.fleet.cancellation import Canceller
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.engine_facts import engine_facts
from orchestrrl.fleet.membership_changes import MembershipChanges
from orchestrrl.fleet.move_orders import MovedRequest, MovesOutcome, checked_move, moved_requests, run_moves
from orchestrrl.fleet.pause_barrier import PauseBarrier
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.outcomes import RedeploymentOutcome
from orchestrrl.fleet.redeployment.steps import (
    ServedWeights,
)
from orchestrrl.fleet.reports import EngineReport, GatewayReport, ReportAck
from orchestrrl.fleet.routes import RoutingTable
from orchestrrl.fleet.state import FleetState, GenerationStep, StateCapacity
from planner.model import (
    Act,
    ConfigurationId,
    EngineHealth,
    EngineId,
    Hold,
    Mode,
    NodeId,
    Plan,
    PlanId,
    RequestId,
    RequestMove,
    Snapshot,
)
from planner.move_methods import choose_move_methods
from planner.plan import History

if TYPE_CHECKING:  # its solvers are heavy, and most daemons have no fabric
    from orchestrrl.fabric.circuit_executor import CircuitExecutor
    from orchestrrl.fabric.coordinator import CircuitCoordinator
    from orchestrrl.fabric.generation_circuits import GenerationCircuits
    from orchestrrl.fabric.packet_routing import FabricRouting
    from orchestrrl.fabric.verification import FabricVerifier
    from orchestrrl.weights.controller.controller import WeightSync

logger = logging.getLogger(__name__)

QUIET_POLL_S = 0.25
MOVES_SHOWN = 64  # of those that ended last

WatchDeployed = Callable[[Mapping[EngineId, str]], None]
Offload = Callable[[Callable[[], Plan]], Awaitable[Plan]]


async def inline(work: Callable[[], Plan]) -> Plan:
    """Decide here and now; the daemon decides in a thread, so that telemetry flows meanwhile."""
    return work()


class ControlPlane:
    """One fleet under control. Construction recovers what the journal holds."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        clock: Clock,
        offload: Offload = inline,
        stopwatch: Callable[[], float] = perf_counter,
    ) -> None:
        """`stopwatch` tells how long decisions take; a simulation brings its own, so that its journal is the same."""
        self.config = config
        self.journal = journal
        self.clock = clock
        self.defects = Defects(clock, self._stop_acting)
        limits = config.limits
        capacity = StateCapacity(limits.engines, limits.gateways, limits.requests)
        self.state = FleetState(engine_facts(config), capacity=capacity, host=host_id())
        self.nodes = NodeRegistry(limits.nodes)
        self.runner = OperationRunner(journal, self.nodes, clock, self._closed)
        self.routes = RoutingTable(config, self.state, self.nodes, self.runner, journal, clock)
        self.membership_changes = MembershipChanges(
            config, self.state, self.routes, journal, clock, self._start_moves, lambda: self.barrier.check_open()
        )
        self.barrier = PauseBarrier(
            self.runner,
            self.nodes,
            journal,
            clock,
            engines=lambda: [engine.id for engine in self.state.engines(clock.now_s())],
            reports=lambda: self.state.barriers,
            busy=lambda: self._deploying,
            changed=self._barrier_changed,
        )
        self.canceller = Canceller(self.runner, self.nodes, clock)
        self.plans = PlanBook(journal, clock)
        self.pause_registry = PauseRegistry(journal, clock)
        self.planning = Planning(config, self._note_costs, self._today)
        self.started_s = clock.now_s()
        self.balance: BalanceDecision | None = None
        self.latest_moves: deque[MovedRequest] = deque(maxlen=MOVES_SHOWN)
        self.deployment: Redeployer | None = None  # who can change engines; None: plans that want to are held
        self.redeployer: RedeploymentController | None = None  # the same, for operators
        self.circuits: CircuitExecutor | None = None  # who sends to switches
        self.fabric: CircuitCoordinator | None = None  # who changes circuits; None: there is no optical fabric
        self.routing: FabricRouting | None = None  # who has packets follow them
        self.verifier: FabricVerifier | None = None  # who holds both against the site
        self.gen_circuits: GenerationCircuits | None = None  # whose circuits follow the deployment
        self.weights: WeightSync | None = None  # who brings new weights to engines by way of peers
        # To be done before the pause barrier opens; given when it opens by itself.
        self.before_resume: Callable[[float], Awaitable[str]] | None = None
        self.watch_deployed: WatchDeployed | None = None  # who reads engines that no agent does
        self.fast_tick_s = self.slow_tick_s = 0.0  # seconds that the latest ticks took
        self.step_began = asyncio.Event()  # set with each new step, for who waits for one
        self._offload = offload
        self._stopwatch = stopwatch
        self._began_step: GenerationStep | None = None
        self._ended_step: GenerationStep | None = None  # the last one whose end is written down
        self._moves_ended_s: float | None = None
        self._last_moves = LastMoves()
        self._health: dict[EngineId, EngineHealth] = {}
        self._remarks: dict[EngineId, tuple[str, ...]] = {}  # on how engines are named and reported, as written down
        self._doubles: dict[NodeId, NodeId] = {}  # nodes that have one id with another node, as written down
        self._moving: set[asyncio.Task[MovesOutcome]] = set()
        self._acting: set[asyncio.Task[None]] = set()  # plans that are being carried out
        self._planning = False  # the slow loop waits for a quiet fleet, or decides
        self.mode_reason = ""  # why the mode is what it is; empty: it is the configured one
        self.mode = self._recovered_mode()
        self.plans.recover()
        self.planning.recover(journal)
        self.routes.recover()
        self.barrier.recover()
        self.state.weights = self.barrier.state
        operations = self.runner.recover()
        self._note(EntryKind.DAEMON_STARTED, "", {"mode": self.mode, "open_operations": operations})

    # --- observe

    def engine_reported(self, report: EngineReport, stream: int) -> ReportAck:
        """Raises LimitReached."""
        now_s = self.clock.now_s()
        report = replace(report, agent=self.nodes.id_of(report.agent, report.incarnation, stream))
        self.state.check_engine_report(report, now_s)
        engine = self.state.engine_of(report, now_s)
        report = replace(report, engine=engine, capabilities=self.state.offered(report))
        taken = self.state.fold_engine(report, now_s, stream)
        if taken:
            if report.sample is not None:
                self.barrier.sampled(report.engine, report.sample)
            # An engine that stands still teaches nothing.
            closed = self.barrier.state.lease is not None
            configured = self.state.configuration_of(report.engine)
            self.planning.offered(report.engine, configured, self.state.capabilities(report.engine))
            self.planning.observe(report, None if closed else self._configuration_of(report.engine))
        if taken and self._health.get(report.engine) is not report.health:
            before = self._health.get(report.engine)
            self._health[report.engine] = report.health
            if len(self._health) > 2 * self.config.limits.engines:  # most are of engines that are forgotten
                self._health = {e: health for e, health in self._health.items() if self.state.reported(e)}
            detail = {"health": report.health, "before": before, "detail": report.health_detail, "url": report.url}
            self._note(EntryKind.ENGINE_HEALTH, report.engine, detail)
            logger.info("engine %s is %s %s", report.engine, report.health, report.health_detail)
            self.routes.changed(lost=report.health is not EngineHealth.OK)
        self._note_step_end()
        self.nodes.on_report(report.agent, now_s)
        return ReportAck(report.sequence, self.journal.generation, now_s)

    def gateway_reported(self, report: GatewayReport, stream: int) -> ReportAck:
        """Raises LimitReached."""
        now_s = self.clock.now_s()
        report = replace(report, gateway=self.nodes.id_of(report.gateway, report.incarnation, stream))
        self.state.check_gateway_report(report, now_s)
        self.state.fold_gateway(report, now_s, stream)
        if enough := self.state.groups.take():
            self.canceller.redundant(self.state.gateways_of_groups(enough))
        for failovers in self.state.take_failovers():
            self._note(
                EntryKind.ENGINE_FAILOVERS, failovers.engine, {"gateway": report.gateway, **asdict(failovers.counts)}
            )
        self.barrier.reported(report.gateway, report.barrier)
        self._note_step_end()
        self.nodes.on_report(report.gateway, now_s)
        return ReportAck(report.sequence, self.journal.generation, now_s)

    def stream_ended(self, stream: int) -> None:
        """No report will come on this stream any more."""
        self.state.stream_ended(stream)
        self.nodes.stream_ended(stream)

    def attach(self, hello: NodeHello) -> Attachment:
        """A node's stream of orders begins. Its routes come first, then what is still open with it. Raises
        LimitReached."""
        now_s = self.clock.now_s()
        self.state.check_hello(hello, now_s)
        attachment = self.nodes.attach(hello, now_s)
        try:
            self._attach(attachment.hello, now_s)
        except BaseException:  # e.g. the journal cannot be written: the node is not there
            self.nodes.detach(attachment, now_s)
            raise
        return attachment

    def _attach(self, hello: NodeHello, now_s: float) -> None:
        """Take in a node that is attached, and send it what it needs first."""
        self.state.fold_hello(hello, now_s)
        self._note(
            EntryKind.NODE_ATTACHED, hello.node, {"kind": hello.kind, "version": hello.version, "url": hello.url}
        )
        logger.info("%s %s attached", hello.kind, hello.node)
        if hello.kind is NodeKind.GATEWAY:
            self.state.weights = self.barrier.state
            self.routes.attached(hello.node)
            self.routes.send(self.state.engines(now_s))
            self.barrier.attaching(hello.node)
        self.runner.attached(hello.node)
        if hello.kind is NodeKind.GATEWAY:
            self.barrier.attached(hello.node)

    def detach(self, attachment: Attachment) -> None:
        if self.nodes.detach(attachment, self.clock.now_s()):
            self._note(EntryKind.NODE_DETACHED, attachment.hello.node, {"kind": attachment.hello.kind})
            logger.info("%s %s detached", attachment.hello.kind, attachment.hello.node)
            if attachment.hello.kind is NodeKind.GATEWAY:
                self.barrier.detached(attachment.hello.node)

    def result_received(self, result: OperationResult) -> None:
        self.nodes.on_report(result.node, self.clock.now_s())
        self.runner.receive(result)

    # --- decide and act

    def fast_tick(self) -> BalanceDecision:
        """One turn of the fast loop."""
        began = self._stopwatch()
        if self.mode is Mode.ACT and self.journal.damage:
            self._only_advise(_damage_of(self.journal))
        self._share_nics()
        snapshot = self.state.snapshot(self.clock.now_s())
        seen = self.planning.identified(snapshot)
        self.runner.settle(lambda node: OperationEvidence(snapshot, self.state.last_report_s(node)))
        situation = BalanceSituation(
            self.mode,
            self.changes_open + self._deploying,
            self._moves_ended_s,
            self._planning,
            self.planning.configurations(),
            self.planning.remaining_tokens(snapshot),
            self.planning.distributions(snapshot),
            self._last_moves.within(self.config.fast.rest_after_move_s, snapshot.now_s),
            settling=self.balance is not None and bool(self.balance.moves),
            step_times=self.planning.step_times(seen),
            move_fixed_s=self.planning.costs.recompute_fixed_s,
        )
        decision = decide_balance(seen, self.config.fast, situation)
        still = self._standing_still(snapshot)
        if hold := still or self.pause_registry.hold(PauseScope.BALANCER):
            decision = replace(decision, verdict=hold)
        before, self.balance = self.balance, decision
        self.routes.load_index = decision.load_index
        acts = isinstance(decision.verdict, Act)
        if acts or before is None or before.verdict.code != decision.verdict.code:
            self._note_balance(decision, snapshot)
        if acts:
            self._start_moves(decision.moves, snapshot)
        if still is None:
            self.membership_changes.tick(snapshot)
        self.routes.send(snapshot.engines)
        self._note_remarks(snapshot)
        self.fast_tick_s = self._stopwatch() - began
        return decision

    async def slow_tick(self) -> Plan:
        """One turn of the slow loop, and the beginning of what its plan wants done. A plan made while nothing is in
        flight is kept only when its verdict is new."""
        self._planning = self.mode is Mode.ACT
        try:
            plan, snapshot = await self._plan()
        finally:
            self._planning = False
        if isinstance(plan.verdict, Act):
            task = asyncio.create_task(self._act_on(plan, snapshot))
            self._acting.add(task)
            task.add_done_callback(self._acted)
        return plan

    def _share_nics(self) -> None:
        """Moves of KV are priced with what a weight sync leaves them."""
        if self.weights is not None:
            left = self.weights.left_for_moves
            self.planning.nic_share, self.planning.nic_taken_by = left.share, left.taken_by

    async def _plan(self) -> tuple[Plan, Snapshot]:
        if self._planning:
            await self._quiet()
        began = self._stopwatch()
        snapshot = self.state.snapshot(self.clock.now_s())
        plan_id = PlanId(f"p{self.journal.generation}-{int(snapshot.now_s * 1000) % 10**9:09d}")
        decide = self.planning.question(
            plan_id,
            snapshot,
            self._history(snapshot),
            mode=self.mode,
            control=self.plans.control,
            can_deploy=self.deployment is not None,
        )
        plan = await self._offload(decide)
        self.slow_tick_s = self._stopwatch() - began
        plan = replace(plan, solve_s=self.slow_tick_s)
        latest = self.plans.latest
        if snapshot.requests or latest is None or latest.verdict.code != plan.verdict.code:
            self.plans.add(plan, _digest(snapshot))
        return plan, snapshot

    async def _quiet(self) -> None:
        """Let moves of the fast loop end, and their effect be reported. It moves something most of the time: a plan
        that waited for it to have nothing to do would never come."""
        until_s = self.clock.now_s() + self.config.fast.operation_expiry_s
        while self.clock.now_s() < until_s:
            hold = self._underway(self.state.snapshot(self.clock.now_s()))
            if hold is None or hold.code in ("deployment_open", "barrier_closed"):
                return
            await self.clock.sleep(QUIET_POLL_S)

    async def move(self, request: RequestId, to_engine: EngineId) -> MovesOutcome:
        """An operator's own move. Raises ProblemFaults for what does not exist, Permanent for what must not move."""
        self.barrier.check_open()
        snapshot = self.state.snapshot(self.clock.now_s())
        to_engine = self.state.engine_called(to_engine, snapshot.now_s)
        return await self._move((checked_move(snapshot, request, to_engine),), snapshot)

    # --- what a redeployment asks of it

    def plan_named(self, plan: str) -> Plan:
        return self.plans.get(PlanId(plan))

    def current_weights(self) -> ServedWeights:
        newest, source = self.barrier.state.newest, self.barrier.state.newest_source
        ours = self.weights is not None and newest is not None and self.weights.book.fleet.version == newest
        return ServedWeights(
            newest, source, tensors_only=ours and bool(source)
        )  # a peer's folder has a version's tensors

    def redeployment_hold(self) -> str:
        """Why engines must not be changed now; empty: they may be."""
        lease = self.barrier.state.lease
        return "" if lease is None else f"the pause barrier is closed: {lease}"

    async def move_for_redeployment(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> MovesOutcome:
        return await self._move(moves, snapshot)

    def weights_reported(self, engines: Sequence[EngineId], weights: ServedWeights) -> None:
        known = {view.id for view in self.state.engines(self.clock.now_s())}  # an operator may have removed some
        if weights.version is not None and (there := [engine for engine in engines if engine in known]):
            with self._although_unwritten():
                self.barrier.set_version(there, weights.version, "brought by a redeployment")
            self.state.weights = self.barrier.state

    @contextmanager
    def _although_unwritten(self) -> Iterator[None]:
        """What is so of engines is so where the journal cannot take it, too: a redeployment has to go on."""
        try:
            yield
        except OrchestrRLError as error:
            logger.error("the weights of engines cannot be written down: %s", error)

    def engine_stopped(self, engine: EngineId) -> None:
        """It is none any more, nor are its weights any of the fleet's."""
        self.state.remove_engine(engine)
        with self._although_unwritten():
            self.barrier.gone([engine])
        self.state.weights = self.barrier.state

    def engines_deployed(self) -> None:
        """Whom a deployer has started has changed."""
        if self.watch_deployed is not None and self.redeployer is not None:
            self.watch_deployed({id: up.url for id, up in self.redeployer.deployed.items() if up.url and not up.lent})
        self.routes.send(self.state.engines(self.clock.now_s()))

    async def circuits_follow(self, engines: Sequence[EngineSpec]) -> str:
        if self.gen_circuits is None:
            return ""
        return await self.gen_circuits.follow(engines)

    def redeployment_ended(self, plan: PlanId, outcome: RedeploymentOutcome) -> None:
        self.planning.costs.started(outcome.starts)
        self.plans.deployment_ended(plan, outcome)
        if plan:
            self.plans.acted(plan, outcome.done, outcome.detail)

    def set_mode(self, mode: Mode, reason: str) -> Mode:
        """The mode from now on, also after a restart while the configured one stays the same; returns the previous."""
        previous = self.mode
        body = {"mode": mode, "previous": previous, "reason": reason, "configured": self.config.mode}
        if mode is Mode.ACT:
            self.journal.confirm_damage(self.clock.now_s(), reason)
        self._note(EntryKind.MODE, mode, body)
        self.mode, self.mode_reason = mode, reason
        if mode is Mode.ACT:
            self.defects.start_anew()
        logger.info("mode is %s (was %s) %s", mode, previous, reason)
        return previous

    def _stop_acting(self, defect: Defect) -> None:
        """The same exception has ended a part's turn time and again: decide and explain, and change nothing more."""
        if self.mode is not Mode.ACT or defect.part not in ACTING:
            return
        self._only_advise(f"{defect.part} ended {REPEATED} times running by {defect}")

    def _only_advise(self, reason: str) -> None:
        """Until an operator sets the mode back. Does not raise."""
        logger.error("mode is advise from now on: %s; `orchestrrl mode act` sets it back", reason)
        try:
            self.set_mode(Mode.ADVISE, reason)
        except Exception as error:  # noqa: BLE001  # perhaps it is the journal that fails
            self.mode = Mode.ADVISE
            self.mode_reason = f"{reason} (not written down: {error})"

    def reconfigure(self, config: Config) -> None:
        """Take over a reloaded configuration, as far as it may change while running."""
        configured, self.config = self.config.mode, config
        self.routes.config = self.membership_changes.config = config
        self.state.set_facts(engine_facts(config))
        if self.redeployer is not None:
            self.redeployer.configurations = {each.id: each for each in config.fleet.configuration_values()}
            self.planning.unstartable = self.redeployer.unstartable()
        self.planning.reconfigure(config, self.state.snapshot(self.clock.now_s()), self.journal)
        self._note(EntryKind.CONFIG_RELOADED, "", {"mode": config.mode})
        self.routes.send(self.state.engines(self.clock.now_s()))
        if config.mode is Mode.ACT and self.journal.damage:
            logger.warning("mode stays advise: %s", self.mode_reason)
        elif config.mode is not configured:
            self.set_mode(config.mode, "configuration reloaded")

    async def close(self, drain_s: float) -> None:
        """Let results that are on their way come in; what stays open is the next generation's to settle."""
        left = await self.runner.drain(drain_s)
        self.routes.close()
        tasks = [*self._moving, *self._acting, *self.barrier.close(), *self.canceller.close()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.nodes.end_all()
        self.plans.close()
        self._note(EntryKind.DAEMON_STOPPED, "", {"open_operations": left})

    @property
    def moves_open(self) -> int:
        """Operations that move requests and have no result yet."""
        return sum(isinstance(opened.operation.action, MoveRequests) for opened in self.runner.open)

    @property
    def changes_open(self) -> int:
        """The same, those included that are about to be sent."""
        return max(self.moves_open, len(self._moving) + len(self._acting))

    # --- inside

    def _history(self, snapshot: Snapshot) -> History:
        return History(
            earlier_output_tokens=self.state.earlier_output_tokens,
            last_redeploy_s=self.plans.last_redeploy_s,
            underway=self._underway(snapshot),
            correction=self.plans.calibration.correction if self.config.slow.correct_predictions else 1.0,
            known_output_tokens=self.planning.known_output_tokens,
        )

    def _underway(self, snapshot: Snapshot) -> Hold | None:
        """What changes the fleet already: first let it end, then look again."""
        still = self._standing_still(snapshot)
        if still is not None:
            return still
        if self._deploying:
            return Hold("deployment_open", "engines are being changed")
        if self.changes_open:
            return Hold("moves_open", f"{self.changes_open} earlier operations have no result yet")
        oldest_s = snapshot.now_s - (snapshot.inputs_age_s or 0.0)
        if self._moves_ended_s is not None and oldest_s <= self._moves_ended_s:
            return Hold("awaiting_telemetry", "not every engine and gateway has reported since the last moves")
        return None

    @property
    def _deploying(self) -> bool:
        return self.deployment is not None and self.deployment.busy

    def _standing_still(self, snapshot: Snapshot) -> Hold | None:
        return self.barrier.state.hold(snapshot.now_s, self.config.fast.stall_grace_s)

    def _barrier_changed(self) -> None:
        self.state.weights = self.barrier.state
        self.routes.send(self.state.engines(self.clock.now_s()))

    async def _act_on(self, plan: Plan, snapshot: Snapshot) -> None:
        """Carry a plan out, and write down what became of it."""
        if self.barrier.state.lease is not None:
            self.plans.acted(plan.id, False, "requests were brought to rest before anything was done")
            return
        if plan.decision == "rebalance":
            moves = [RequestMove(move.request, move.source, move.destination) for move in plan.moves]
            moved = await self._move(moves, snapshot)
            done = sum(item.done for item in moved.items)
            self.plans.acted(plan.id, done > 0, f"{done} of {len(moved.items)} requests moved")
            return
        assert self.deployment is not None, "plan admission holds what no deployer can carry out"
        try:
            outcome = await self.deployment.carry_out(plan, snapshot)
        except OrchestrRLError as error:  # nothing was begun
            outcome = RedeploymentOutcome(False, str(error), self.clock.now_s())
        self.redeployment_ended(plan.id, outcome)

    def _acted(self, task: asyncio.Task[None]) -> None:
        self._acting.discard(task)
        self._ended(PLANS, task)

    async def _move(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> MovesOutcome:
        versions = self.routes.kv_versions(snapshot.engines)
        priced = choose_move_methods(moves, self.planning.identified(snapshot), self.planning.move_costing(versions))
        named = [replace(m, from_engine=self.state.own_name(m.request, m.from_engine)) for m in priced]
        return await run_moves(self.runner, named, self.state.gateway_of, self.config.fast.operation_expiry_s)

    def _start_moves(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> asyncio.Task[MovesOutcome]:
        task = asyncio.create_task(self._move(moves, snapshot))
        self._moving.add(task)
        task.add_done_callback(self._moved)
        return task

    def _moved(self, task: asyncio.Task[MovesOutcome]) -> None:
        self._moving.discard(task)
        self._ended(MOVES, task)

    def _ended(self, part: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.defects.passed(part)
        elif isinstance(error, OrchestrRLError):  # a failure of the world, which the next turn may not meet
            logger.error("%s failed: %s", part, error)
        else:
            self.defects.met(part, error)

    def _closed(self, operation: Operation, result: OperationResult) -> None:
        if isinstance(operation.action, MoveRequests):
            self._moves_ended_s = self.clock.now_s()
            carried_out = moved_requests(self._moves_ended_s, operation.action.moves, result.items)
            self._last_moves.moved(self._moves_ended_s, (moved.move.request for moved in carried_out))
            self.state.fold_result(result)
            self.planning.costs.moved(operation.action, result, self._configuration_of)
            self.latest_moves.extend(carried_out)

    def _recovered_mode(self) -> Mode:
        """The configured mode, unless an operator set another since it was configured so."""
        if self.journal.damage:
            self.mode_reason = _damage_of(self.journal)
            return Mode.ADVISE
        written = self.journal.newest(EntryKind.MODE, _mode_in)
        latest = self.journal.latest(EntryKind.MODE)
        if latest is not None and latest.sequence in self.journal.set_aside:
            self.mode_reason = f"the last mode that was set cannot be read (journal entry {latest.sequence})"
            return Mode.ADVISE
        if written is None or written[1] != self.config.mode:
            return self.config.mode
        mode, _, self.mode_reason = written
        if mode is not self.config.mode:
            words = (mode, self.mode_reason or "no reason given", self.config.mode)
            logger.warning("mode is %s, as it was set (%s); configured is %s", *words)
        return mode

    def _configuration_of(self, engine: EngineId) -> ConfigurationId | None:
        """The configured one, else what the engine's own facts stand for."""
        return self.state.configuration_of(engine) or self.planning.implicit_configuration(engine)

    def _note_step_end(self) -> None:
        step = self.state.step
        if step is not None and step.ended_s is None and step is not self._began_step:
            self._began_step = step
            self.step_began.set()
        if step is None or step.ended_s is None or step is self._ended_step:
            return
        self._ended_step = step
        lengths = self.planning.lengths.step_ended(self.state.finished)
        self._note(EntryKind.STEP_ENDED, "", {"started_s": step.started_s, "ended_s": step.ended_s, "lengths": lengths})
        self.plans.step_ended(step, self.barrier.still_s)

    def _note(self, kind: EntryKind, subject: str, body: dict[str, Any]) -> None:
        self.journal.append(self.clock.now_s(), kind, subject, body)

    def _note_costs(self, configuration: ConfigurationId, body: dict[str, Any]) -> None:
        self._note(EntryKind.PROFILE_REFITTED, configuration, body)

    def _today(self) -> str:
        return datetime.fromtimestamp(self.clock.now_s(), UTC).date().isoformat()

    def remarks(self, engines: Iterable[EngineId]) -> dict[EngineId, tuple[str, ...]]:
        """What is wrong with how these engines are named and reported, one sentence each."""
        now_s = self.clock.now_s()
        others, found = self.state.names(now_s).others, {}
        for engine in engines:
            remarks = [f"{name} of {node} is the same server as {engine}" for node, name in others.get(engine, ())]
            if agents := self.state.reported_by(engine, now_s):
                second = ", ".join(agents[1:])
                remarks.insert(0, f"{len(agents)} agents report {engine}: {agents[0]}, which counts, and {second}")
            if remarks:
                found[engine] = tuple(remarks)
        return found

    def node_remarks(self) -> tuple[str, ...]:
        """Nodes that share an id, one sentence each."""
        return tuple(
            f"two nodes have the id {node}: the second is listed as {listed}"
            for listed, node in sorted(self.nodes.doubles().items())
        )

    def _note_remarks(self, snapshot: Snapshot) -> None:
        """Write down when a fault in how engines are named and reported begins and ends."""
        remarks = self.remarks(engine.id for engine in snapshot.engines)
        for engine in sorted(remarks.keys() | self._remarks.keys()):
            now, before = remarks.get(engine, ()), self._remarks.get(engine, ())
            if now != before:
                self._note(EntryKind.ENGINE_REMARKS, engine, {"remarks": list(now)})
            for remark in now:
                if remark not in before:
                    logger.warning("%s", remark)
            for remark in before:
                if remark not in now:
                    logger.info("no longer: %s", remark)
        self._remarks = remarks
        doubles = self.nodes.doubles()
        for listed, node in doubles.items():
            if listed not in self._doubles:
                self._note(EntryKind.NODE_DOUBLE, node, {"listed": listed})
                logger.warning("two nodes have the id %s: the second is listed as %s", node, listed)
        self._doubles = doubles

    def _note_balance(self, decision: BalanceDecision, snapshot: Snapshot) -> None:
        verdict, balance = decision.verdict, decision.balance
        logger.info("balance: %s %s", verdict.code, verdict.detail)
        body = {
            "acts": isinstance(verdict, Act),
            "code": verdict.code,
            "detail": verdict.detail,
            "spread_before": balance.spread_before,
            "spread_after": balance.spread_after,
            "moves": [{"request": m.request, "from": m.source, "to": m.destination} for m in balance.moves],
            "inputs_age_s": decision.inputs_age_s,
            "inputs_digest": _digest(balance_problem(snapshot, self.config.fast)),
        }
        self._note(EntryKind.BALANCE, verdict.code, body)


def _mode_in(body: Mapping[str, Any]) -> tuple[Mode, str, str]:
    """The mode, the one that was configured then, and why it was set."""
    return Mode(body["mode"]), str(body["configured"]), str(body.get("reason", ""))


def _damage_of(journal: Journal) -> str:
    return f"the journal is damaged: {few(journal.damage, 4)}; `orchestrrl mode act` confirms it"


def _digest(inputs: object) -> str:
    """Names the inputs of a decision, so that a replay can tell whether it has the same. `repr` of frozen values is
    canonical."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]
