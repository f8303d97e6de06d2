"""Pause the fleet as an operation: its steps, and how they are undone.

When the operation ends, either every gateway's engines are at rest for the duration of a lease, or requests continue as
before. core/operation.py runs, journals and resumes the steps; pause_lease.py defines the lease.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from orchestrrl.core.clock import Clock, until_set, within
from orchestrrl.core.errors import OrchestrRLError, Permanent, Retryable
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation import Description, OperationRun, Stage, StepEntry, steps_in
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import Action, CloseBarrier, OpenBarrier, OperationResult, OperationStatus, PauseMode
from orchestrrl.fleet.pause_lease import LEASE, LastRelease, PauseLease
from planner.model import NodeId

if TYPE_CHECKING:
    from orchestrrl.fleet.pause_barrier import PauseBarrier

logger = logging.getLogger(__name__)

# Seconds for a gateway's answer beyond the duration of the order itself.
ANSWER_S = 5.0
AGAIN_S = 1.0  # suggested delay before another attempt

BUSY_POLL_S = 0.25

Order = asyncio.Task[OperationResult]


@dataclass(slots=True, eq=False)
class PauseOrders:
    """Sends orders of the pause barrier to gateways. Callers need not wait for the gateways' responses."""

    _runner: OperationRunner
    _nodes: NodeRegistry
    _clock: Clock
    waiting: set[Order] = field(default_factory=set)

    def close(self, node: NodeId, lease: PauseLease, quiet_by_s: float, *, engines_run: bool = False) -> Order:
        terms = (lease.id, lease.holder, lease.mode, lease.frozen, lease.until_s)
        action = CloseBarrier(*terms, quiet_by_s, engines_run, lease.weights_change)
        return self._order(node, action, quiet_by_s - self._clock.now_s() + ANSWER_S)

    def open(self, node: NodeId, opened: LastRelease) -> Order:
        return self._order(node, OpenBarrier(opened.lease, opened.policy_version, opened.without), ANSWER_S)

    def open_all(self, opened: LastRelease) -> dict[NodeId, Order]:
        return {node: self.open(node, opened) for node in self._nodes.gateways()}

    def withdraw_closes(self, node: NodeId, *, but: PauseLease | None) -> list[str]:
        """Withdraw the gateway's unanswered orders to close the barrier, except those for lease `but`. If `but` is
        None, withdraw all of them. Return the lease ids of the withdrawn orders."""
        leases = []
        for each in self._runner.open_on(node):
            action = each.order.action
            if isinstance(action, CloseBarrier) and (but is None or action.lease != but.id):
                self._runner.withdraw(each, f"lease {action.lease} is over")
                leases.append(action.lease)
        return leases

    def opening(self, node: NodeId) -> bool:
        """Return whether an order to open the barrier was sent to the gateway and is still unanswered."""
        return any(isinstance(each.order.action, OpenBarrier) for each in self._runner.open_on(node))

    def _order(self, node: NodeId, action: Action, valid_for_s: float) -> Order:
        task = asyncio.create_task(self._runner.run(node, action, valid_for_s))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        return task


class PauseStepKind(StrEnum):
    ENGINES = "engines"  # wait until no engine is being started or stopped
    FINISH = "finish"  # requests run to their end
    REST = "rest"
    OPEN = "open"  # the undo step


@dataclass(frozen=True, slots=True)
class PauseStep:
    number: int
    kind: PauseStepKind
    within_s: None = None  # the lease's deadline comes first, with a better message

    def __str__(self) -> str:
        return self.kind


class FleetPause(Description[PauseStep]):
    """An operation that brings the fleet to rest. Gateways that attach during the operation are included."""

    def __init__(self, lease: PauseLease, acts: "PauseBarrier", log: OperationJournal, clock: Clock) -> None:
        self.lease = lease
        self.engines_run = lease.mode is PauseMode.WAIT  # while requests finish
        self._acts = acts
        self._log = log
        self._clock = clock
        self._orders: dict[NodeId, Order] = {}
        self._late = asyncio.Event()  # a gateway has attached
        self._operation = OperationRun(self, log, clock, lambda: None)
        self.call_off = self._operation.call_off

    def __str__(self) -> str:
        return f"pause {self.lease.id} of {self.lease.holder or 'an unnamed holder'}"

    async def run(self) -> None:
        """Bring the fleet to rest. If the fleet does not come to rest by the lease's deadline, let requests continue
        and raise Retryable."""
        await self._operation.run()
        failure = self._operation.failure
        if failure is not None and self._is_held():  # it did not begin: the journal write failed
            await self._acts.abandon(self.lease, failure.why)
        self._end()
        if failure is not None and failure.step is not None:
            raise failure.error or Retryable(failure.why, AGAIN_S)
        if failure is not None:
            raise self._not_at_rest(failure.why)

    async def resume(self, steps: Sequence[JournalEntry]) -> None:
        """Complete or undo a pause that an earlier daemon left unfinished. `steps` are the journal entries of its
        steps. No caller waits for this pause."""
        await self._operation.resume(steps)
        self._end()

    def attached(self, node: NodeId, order: Order) -> None:
        """Include in the operation a gateway that attached after the operation began. `order` is the order to close the
        barrier that was sent to this gateway."""
        self._orders[node] = order
        self._late.set()

    # --- called by core/operation.py

    @property
    def id(self) -> str:
        return self.lease.id

    def forward(self) -> Sequence[Stage[PauseStep]]:
        finish = [PauseStepKind.FINISH] if self.lease.mode is PauseMode.WAIT else []
        kinds = (PauseStepKind.ENGINES, *finish, PauseStepKind.REST)
        return tuple(((PauseStep(place, kind),),) for place, kind in enumerate(kinds, 1))

    def intent(self) -> Mapping[str, Any]:
        return {"lease": LEASE.dump_python(self.lease, mode="json")}

    def record(self, step: PauseStep) -> Mapping[str, Any]:
        return {"kind": step.kind}

    async def do(self, step: PauseStep) -> str:
        match step.kind:
            case PauseStepKind.ENGINES:  # later changes of the deployment wait for the pause barrier
                while self._acts.turn.busy:
                    if self._clock.now_s() >= self.lease.quiet_by_s:
                        raise Retryable("cannot pause the fleet while engines are being started or stopped", ANSWER_S)
                    await self._clock.sleep(BUSY_POLL_S)
            case PauseStepKind.FINISH:  # an idle gateway must not freeze engines on which another's requests finish
                await self._all_closed()
                self.engines_run = False
            case PauseStepKind.REST:
                self._acts.at_rest(self.lease, await self._all_closed())
        return ""

    async def undo(self, step: PauseStep) -> str:
        failure = self._operation.failure
        await self._acts.abandon(self.lease, failure.why if failure else "")
        return ""

    async def observe(self) -> None:
        """Do nothing, since the daemon itself holds the state of the pause barrier."""

    def back(self, records: Sequence[StepEntry]) -> Sequence[Stage[PauseStep]]:
        return (((PauseStep(1, PauseStepKind.OPEN),),),)

    def restored(self) -> bool:
        return not self._is_held()

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        at_rest = self._is_held() and self._acts.state.quiet
        return frozenset(step.number for step in steps_in(self.forward())) if at_rest else None

    # --- inside

    def _is_held(self) -> bool:
        lease = self._acts.state.lease
        return lease is not None and lease.id == self.lease.id

    async def _all_closed(self) -> list[OperationResult]:
        """Order all gateways to close their barriers, and return the gateways' results. Raises Retryable as soon as one
        gateway fails to come to rest or the deadline passes."""
        self._orders.update(self._acts.close_all())
        left_s = self.lease.quiet_by_s + ANSWER_S - self._clock.now_s()
        try:
            await within(self._clock, left_s, self._closed())
        except Permanent:
            raise self._not_at_rest("the pause deadline has passed") from None
        return [order.result() for order in self._orders.values()]

    async def _closed(self) -> None:
        while True:
            self._late.clear()
            for node, order in self._orders.items():
                if order.done() and not rested(order.result()):
                    raise Retryable(f"cannot pause gateway {node}: {why(order.result())}", AGAIN_S)
            running = [order for order in self._orders.values() if not order.done()]
            if not running:
                return
            await until_set(self._clock, self._late, ANSWER_S, *running)

    def _not_at_rest(self, because: str) -> Retryable:
        reports = self._acts.reports
        words = [because]
        for node in [node for node, order in self._orders.items() if not order.done()]:
            report = reports.get(node)
            has = "has not reported" if report is None else f"still has {report.running} running requests"
            words.append(f"gateway {node} {has}")
        return Retryable(f"cannot pause the fleet: {'; '.join(words)}", AGAIN_S)

    def _end(self) -> None:
        try:
            self._log.end(self.id, {"state": self._operation.state, "detail": self._operation.detail})
        except OrchestrRLError as error:  # the next daemon finds the pause open and resumes it
            logger.error("cannot write the end of the %s to the journal: %s", self, error)


def rested(result: OperationResult | None) -> bool:
    """Return whether the gateway carried out its order. An order also counts as carried out if the gateway could not
    reach some engines. `result` is None if the gateway did not answer in time."""
    return result is not None and result.status in (OperationStatus.DONE, OperationStatus.PARTIAL)


def why(result: OperationResult | None) -> str:
    """Return why the gateway did not carry out its order. `result` is None if the gateway did not answer in time."""
    if result is None:
        return "did not answer in time"
    items = "; ".join(f"{item.id}: {item.detail}" for item in result.items if not item.done)
    return result.detail or items or f"{result.status}, no reason given"
