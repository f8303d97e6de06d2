"""Make the daemon's decisions. Each tick takes a snapshot of the fleet, computes a decision, and starts the operations
that the decision requires.

The cycle is: observe, update the state, decide, admit, journal, act. `run_loops` calls `fast_tick` and `slow_tick` with
any clock, so that a simulation runs the same code. Reports and orders are handled in fleet_coordinator.py.
"""

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from balancer.balance import BalanceDecision, BalanceSituation, balanced_workers, decide_balance
from orchestrrl.core.clock import Clock, until_set
from orchestrrl.core.config.schema import Config
from orchestrrl.core.defects import FAST_LOOP, PLANS, SLOW_LOOP, Defects, is_cancelled
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operations import OperationEvidence
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.daemon.mode import ModeSwitch
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from planner.model import Act, Hold, Mode, Plan, PlanId, RequestMove, Snapshot
from planner.plan import History
from planner.sync_tree.network import LeftForMoves

logger = logging.getLogger(__name__)

QUIET_POLL_S = 0.25


class ControlPlane:
    """Makes the decisions of the fast loop and the slow loop for one fleet."""

    def __init__(
        self,
        fleet: FleetCoordinator,
        mode: ModeSwitch,
        pause_registry: PauseRegistry,
        turn: DeploymentTurn,
        redeployer: RedeploymentController | None,
        left_for_moves: Callable[[], LeftForMoves],
        offload: Offload = inline,
        stopwatch: Callable[[], float] = perf_counter,
    ) -> None:
        """Without a `redeployer`, plans that change engines are held. `left_for_moves` returns the NIC share that other
        traffic leaves for moves. `stopwatch` measures the duration of decisions. A simulation passes a simulated
        stopwatch, so that its journal is reproducible."""
        self.fleet = fleet
        self.mode = mode
        self.pause_registry = pause_registry
        self.redeployer = redeployer
        self.config, self.journal, self.clock = fleet.config, fleet.journal, fleet.clock
        self.plans, self.planning, self.defects = fleet.plans, fleet.planning, mode.defects
        self.started_s = self.clock.now_s()
        self.balance: BalanceDecision | None = None
        self.fast_tick_s = self.slow_tick_s = 0.0  # duration of the latest ticks
        self._turn = turn
        self._left_for_moves = left_for_moves
        self._offload = offload
        self._stopwatch = stopwatch
        self._planning = False  # the slow loop waits for a quiet fleet, or decides now

    def fast_tick(self) -> BalanceDecision:
        """Run one tick of the fast loop and return its decision."""
        began = self._stopwatch()
        self.mode.check_journal()
        self.planning.share_nics(self._left_for_moves())
        snapshot = self.fleet.state.snapshot(self.clock.now_s())
        seen = self.planning.identified(snapshot)
        self.fleet.runner.settle(lambda node: OperationEvidence(snapshot, self.fleet.state.last_report_s(node)))
        situation = BalanceSituation(
            self.mode.current,
            self.changes_open + self._turn.busy,
            self.fleet.moves_ended_s,
            self._planning,
            self.planning.configurations(),
            self.planning.remaining_tokens(snapshot),
            self.planning.distributions(snapshot),
            self.fleet.last_moves.within(self.config.fast.rest_after_move_s, snapshot.now_s),
            step_times=self.planning.step_times(seen),
            move_fixed_s=self.planning.costs.recompute_fixed_s,
        )
        decision = decide_balance(seen, self.config.fast, situation)
        still = self._standing_still(snapshot)
        if hold := still or self.pause_registry.hold(PauseScope.BALANCER):
            decision = replace(decision, verdict=hold)
        before, self.balance = self.balance, decision
        self.fleet.routes.reweigh(decision.load_index)
        acts = isinstance(decision.verdict, Act)
        if acts or before is None or before.verdict.code != decision.verdict.code:
            self._note_balance(decision, snapshot)
        if acts:
            self.fleet.start_moves(decision.moves, snapshot)
        if still is None:
            self.fleet.membership_changes.tick(snapshot)
        self.fleet.routes.send(snapshot.engines)
        self.fleet.note_remarks(snapshot)
        self.fast_tick_s = self._stopwatch() - began
        return decision

    async def slow_tick(self) -> Plan:
        """Run one tick of the slow loop and return its plan. If plan admission allows the plan, start to carry it out.
        A plan made while no request is in flight is recorded only if its verdict differs from that of the previous
        plan."""
        self._planning = self.mode.current is Mode.ACT
        try:
            plan, snapshot = await self._plan()
        finally:
            self._planning = False
        if isinstance(plan.verdict, Act):
            self.defects.begin(PLANS, self._act_on(plan, snapshot))
        return plan

    async def _plan(self) -> tuple[Plan, Snapshot]:
        if self._planning:
            await self._quiet()
        began = self._stopwatch()
        snapshot = self.fleet.state.snapshot(self.clock.now_s())
        plan_id = PlanId(f"p{self.journal.generation}-{int(snapshot.now_s * 1000) % 10**9:09d}")
        decide = self.planning.question(
            plan_id,
            snapshot,
            self._history(snapshot),
            mode=self.mode.current,
            control=self.plans.control,
            can_deploy=self.redeployer is not None,
        )
        plan: Plan = await self._offload(decide)
        self.slow_tick_s = self._stopwatch() - began
        plan = replace(plan, solve_s=self.slow_tick_s)
        latest = self.plans.latest
        if snapshot.requests or latest is None or latest.verdict.code != plan.verdict.code:
            self.plans.add(plan, _digest(snapshot))
        return plan, snapshot

    async def _quiet(self) -> None:
        """Wait until the fast loop's moves have ended and telemetry shows their effect, for at most
        `operation_expiry_s`. Without this limit, the wait might never end, because the fast loop moves requests most of
        the time."""
        until_s = self.clock.now_s() + self.config.fast.operation_expiry_s
        while self.clock.now_s() < until_s:
            hold = self._underway(self.fleet.state.snapshot(self.clock.now_s()))
            if hold is None or hold.code in ("deployment_open", "barrier_closed"):
                return
            await self.clock.sleep(QUIET_POLL_S)

    def reconfigure(self, config: Config) -> None:
        """Apply the parts of a reloaded configuration that may change at run time."""
        self.config, now_s = config, self.clock.now_s()
        self.fleet.reconfigure(config)
        if self.redeployer is not None:
            self.redeployer.reconfigure(config.fleet)
        self.planning.reconfigure(config, self.fleet.state.snapshot(now_s), self.journal)
        self.fleet.note(EntryKind.CONFIG_RELOADED, "", {"mode": config.mode})
        self.fleet.routes.send(self.fleet.state.engines(now_s))
        self.mode.reconfigure(config.mode)

    @property
    def changes_open(self) -> int:
        """Return the number of operations that move requests and have no result yet, including operations about to be
        sent."""
        return max(self.fleet.moves_open, len(self.defects.tasks))

    def _history(self, snapshot: Snapshot) -> History:
        return History(
            earlier_output_tokens=self.fleet.state.earlier_output_tokens,
            last_redeploy_s=self.plans.last_redeploy_s,
            underway=self._underway(snapshot),
            correction=self.plans.calibration.correction if self.config.slow.correct_predictions else 1.0,
            known_output_tokens=self.planning.known_output_tokens,
        )

    def _underway(self, snapshot: Snapshot) -> Hold | None:
        """Return a Hold while a change of the fleet is in progress or its effect has not been reported. Otherwise,
        return None."""
        still = self._standing_still(snapshot)
        if still is not None:
            return still
        if self._turn.busy:
            return Hold("deployment_open", "engines are being changed")
        if self.changes_open:
            return Hold("moves_open", f"{self.changes_open} earlier operations have no result yet")
        oldest_s = snapshot.now_s - (snapshot.inputs_age_s or 0.0)
        if self.fleet.moves_ended_s is not None and oldest_s <= self.fleet.moves_ended_s:
            return Hold("awaiting_telemetry", "not every engine and gateway has reported since the last moves")
        return None

    def _standing_still(self, snapshot: Snapshot) -> Hold | None:
        return self.fleet.barrier.state.hold(snapshot.now_s, self.config.fast.stall_grace_s)

    async def _act_on(self, plan: Plan, snapshot: Snapshot) -> None:
        """Carry out a plan and record the result."""
        if self.fleet.barrier.state.lease is not None:
            self.plans.acted(plan.id, done=False, detail="the fleet was paused before anything was done")
            return
        if plan.decision == "rebalance":
            moves = [RequestMove(move.request, move.source, move.destination) for move in plan.moves]
            moved = await self.fleet.carry_out(moves, snapshot)
            done = sum(item.done for item in moved.items)
            self.plans.acted(plan.id, done > 0, f"{done} of {len(moved.items)} requests moved")
            return
        assert self.redeployer is not None, "plan admission holds what no deployer can carry out"
        try:
            outcome = await self.redeployer.carry_out(plan)
        except OrchestrRLError as error:  # nothing was changed
            outcome = RedeploymentOutcome(done=False, detail=str(error), ended_s=self.clock.now_s())
        self.planning.costs.started(outcome.starts)
        self.plans.deployment_ended(plan.id, outcome)

    def _note_balance(self, decision: BalanceDecision, snapshot: Snapshot) -> None:
        verdict, balance = decision.verdict, decision.balance
        logger.info("balance: %s %s", verdict.code, verdict.detail)
        body = {
            "acts": isinstance(verdict, Act),
            "code": verdict.code,
            "detail": verdict.detail,
            "spread_before": balance.spread_before,
            "spread_after": balance.spread_after,
            "moves": [{"request": m.request, "from": m.from_engine, "to": m.to_engine} for m in balance.moves],
            "inputs_age_s": decision.inputs_age_s,
            "inputs_digest": _digest((self.config.fast.theta, balanced_workers(snapshot, self.config.fast))),
        }
        self.fleet.note(EntryKind.BALANCE, verdict.code, body)


def _digest(inputs: object) -> str:
    """Return a digest that identifies a decision's inputs, so that a replay can compare them. The digest is computed
    from `repr`, which is canonical for frozen values."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


async def run_loops(control_plane: ControlPlane, clock: Clock, *, goes_on: bool = False) -> None:
    """Run both loops until cancelled. If `goes_on` is True, an unexpected exception ends only the current tick.
    Otherwise, as in simulations and tests, the exception is raised."""
    await control_plane.fleet.barrier.settle()
    tick = partial(_repeat, control_plane.defects, goes_on)
    async with asyncio.TaskGroup() as loops:
        loops.create_task(
            tick(FAST_LOOP, control_plane.fast_tick, lambda: clock.sleep(control_plane.config.fast.interval_s))
        )
        loops.create_task(tick(SLOW_LOOP, control_plane.slow_tick, partial(_interval_or_step, control_plane, clock)))


async def _interval_or_step(control_plane: ControlPlane, clock: Clock) -> None:
    """Wait until the slow loop's next tick is due. It is due when the loop's interval has passed. If a new step begins
    earlier, the tick is due one fast interval after the step begins, when the requests of the step have arrived."""
    began = control_plane.fleet.step_began
    await until_set(clock, began, control_plane.config.slow.interval_s)
    if began.is_set():
        began.clear()
        await clock.sleep(min(control_plane.config.fast.interval_s, control_plane.config.slow.interval_s))


async def _repeat(
    defects: Defects,
    goes_on: bool,
    part: str,
    tick: Callable[[], Awaitable[Any] | Any],
    pause: Callable[[], Awaitable[None]],
) -> None:
    while True:
        try:
            outcome = tick()
            if inspect.isawaitable(outcome):
                await outcome
            defects.passed(part)
        except (Exception, asyncio.CancelledError) as error:
            is_of_the_world = isinstance(error, OrchestrRLError)  # e.g. a full disk
            if not is_of_the_world and (not goes_on or is_cancelled()):
                raise
            defects.met(part, error)
        await pause()
