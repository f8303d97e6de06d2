"""Close and open the pause barrier of every gateway: either all engines come to rest, or all requests continue as
before. pause_lease.py defines leases.

Gateways also enforce the end of a lease. They therefore open when the lease ends, even if an order of the daemon is
lost.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable, few
from orchestrrl.core.journal.kinds import FLEET_PAUSES
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.core.operation_runner import OperationRunner, answers
from orchestrrl.core.operations import FrozenRequests, OperationItemResult, OperationResult, PauseMode
from orchestrrl.engines.base import EngineSample
from orchestrrl.fleet.pause_lease import LEASE, PAUSE_STATE, LastRelease, LeaseEnd, PauseLease, PauseState, time_of_day
from orchestrrl.fleet.pause_operation import AGAIN_S, ANSWER_S, FleetPause, Order, PauseOrders, rested, why
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.fleet.reports import BarrierPhase, BarrierReport
from orchestrrl.fleet.state import FleetState
from planner.model import EngineId, NodeId

logger = logging.getLogger(__name__)

LEASE_S = 60.0  # the default
LEASE_LEAST_S = 0.001  # less is lost to rounding when it is added to the time of day
LEASE_MAX_S = 24 * 3600.0  # a holder that dies keeps the fleet paused at most this long
# A gateway that still reports the barrier closed this long after it opened has missed the order.
MISSED_S = 2.0
UNHEARD_S = 600.0  # after a longer outage of the daemon the last release is not sent again
LEASES_REMEMBERED = 256
NAMES_TOLD = 32
OUTDATED = "is not known to have the fleet's weights: gets no requests until `orchestrrl engines set-version`"


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A request to pause the fleet. A duration of 0 seconds selects the default."""

    mode: PauseMode = PauseMode.KEEP
    frozen: FrozenRequests = FrozenRequests.RECOMPUTE
    holder: str = ""
    lease_s: float = 0.0
    deadline_s: float = 0.0
    weights_change: bool = False  # the holder changes weights: if the lease expires, versions are unknown

    def lease(self, id: str, now_s: float) -> PauseLease:
        """Return a lease that begins at `now_s`. It does not end before the deadline by which the fleet must be at
        rest. Raises ProblemFaults if a duration is out of range."""
        faults = _seconds_faults("lease_s", self.lease_s) + _seconds_faults("deadline_s", self.deadline_s)
        if faults:
            raise ProblemFaults(faults)
        quiet_s = self.deadline_s or self.lease_s or LEASE_S
        lasts_s = max(self.lease_s or LEASE_S, quiet_s)
        until_s, quiet_by_s = now_s + lasts_s, now_s + quiet_s
        return PauseLease(id, self.holder, self.mode, self.frozen, now_s, until_s, quiet_by_s, self.weights_change)


@dataclass(frozen=True, slots=True)
class EngineAtRest:
    """The result of the latest closing or opening of the pause barrier for one engine."""

    engine: EngineId
    done: bool
    detail: str
    policy_version: int | None  # of the engine's weights


class PauseBarrier:
    """The fleet's pause barrier. It calls `changed` if weight versions have changed or requests were resumed, so that
    the routes are sent again. It calls `restarted` for an engine that has lost its weights."""

    def __init__(
        self,
        runner: OperationRunner,
        nodes: NodeRegistry,
        state: FleetState,
        turn: DeploymentTurn,
        journal: Journal,
        clock: Clock,
        changed: Callable[[], None],
        restarted: Callable[[EngineId], None],
    ) -> None:
        self._nodes = nodes
        self._journal = journal
        self._log = OperationJournal(journal, clock, FLEET_PAUSES)
        self._clock = clock
        self.turn = turn
        self._fleet = state
        self._changed = changed
        self._restarted = restarted
        self._leases = itertools.count(1)
        self._orders = PauseOrders(runner, nodes, clock)
        self._pausing: FleetPause | None = None  # the pause in progress, for the current lease
        self._running: set[asyncio.Task[None]] = set()  # pauses in progress, including those being undone
        self._rests: dict[EngineId, OperationItemResult] = {}  # per engine, of the latest close or open
        self._generated: dict[EngineId, int] = {}  # tokens generated, per engine, as last sampled
        self._still_since_s: float | None = None
        self._still: deque[tuple[float, float]] = deque(maxlen=LEASES_REMEMBERED)  # from quiet to open
        self._over: dict[str, LastRelease] = {}  # how leases ended, oldest first
        self._unheard: LastRelease | None = None  # of the previous daemon; gateways may have missed it
        self._ordered: set[NodeId] = set()  # gateways that `_unheard` was sent to
        self.expired = 0  # leases expired since the daemon's start
        self._paused_s = 0.0  # since the daemon's start, over leases that have ended

    # --- queries

    @property
    def state(self) -> PauseState:
        """Return the current state. The first read after a lease expires records the expiry."""
        now = self._fleet.weights.at(self._clock.now_s())
        if now is not self._fleet.weights:
            logger.warning("barrier: %s", now.opened.detail if now.opened else "")
            self._take(now, "expired")
            self._break_off("the lease has expired")
        return self._fleet.weights

    @property
    def paused_s(self) -> float:
        lease = self.state.lease
        return self._paused_s + (self._clock.now_s() - lease.began_s if lease else 0.0)

    def still_s(self, from_s: float, to_s: float) -> float:
        """Return the time, in seconds, during which the fleet was at rest between `from_s` and `to_s`. Only the most
        recent leases are taken into account."""
        spans = [*self._still]
        if self._still_since_s is not None:
            spans.append((self._still_since_s, to_s))
        return sum(max(0.0, min(to_s, ended_s) - max(from_s, began_s)) for began_s, ended_s in spans)

    def gateways(self) -> dict[NodeId, BarrierReport | None]:
        """Return a mapping from the id of each attached gateway to its latest report. The value is None if the gateway
        has not reported."""
        reports = self.reports
        return {node: reports.get(node) for node in self._nodes.gateways()}

    def rests(self) -> list[EngineAtRest]:
        """Return the result of the latest closing or opening of the barrier for every engine, sorted by engine id.
        While the barrier is open, engines without the fleet's weights are not `done`."""
        state = self.state
        rests = []
        for engine in sorted(self._engines()):
            item = self._rests.get(engine)
            outdated = state.lease is None and not state.serves(engine)
            detail = OUTDATED if outdated else item.detail if item is not None else ""
            done = not outdated and (item is None or item.done)
            rests.append(EngineAtRest(engine, done, detail, state.versions.get(engine)))
        return rests

    @property
    def reports(self) -> Mapping[NodeId, BarrierReport]:
        """Return the latest report of every gateway, including gateways that are not attached."""
        return self._fleet.barriers

    def check_open(self) -> None:
        """Raise Permanent if the barrier is closed."""
        state = self.state
        if state.lease is not None:
            raise Permanent(
                f"requests are paused while weights change; the pause barrier is {state.phase}: lease {state.lease}"
            )

    # --- actions

    def recover(self) -> None:
        """Restore the barrier from the journal. A pause that had not completed is abandoned, because the caller that
        requested it is gone."""
        state = self._journal.newest(EntryKind.BARRIER, lambda body: PAUSE_STATE.validate_python(body["state"]))
        if state is not None:
            self._fleet.weights = state
            if self._fleet.weights.opened is not None:
                self._ended(self._fleet.weights.opened)
            if self._fleet.weights.lease is not None and self._fleet.weights.quiet:
                self._still_since_s = self._fleet.weights.lease.began_s
        lease = self.state.lease
        if lease is not None and not self._fleet.weights.quiet:
            detail = "the daemon was restarted while the fleet was coming to rest"
            self._take(self._fleet.weights.abandoned(lease.id, self._clock.now_s(), detail), "gave_up")
        opened = self._fleet.weights.opened
        # The release is journalled before it is sent; gateways refuse one that they have carried out.
        if opened is not None and self._fleet.weights.lease is None and self._clock.now_s() - opened.at_s < UNHEARD_S:
            self._unheard = opened

    async def settle(self) -> None:
        """Complete or undo the pauses that an earlier daemon left unfinished."""
        for left in self._log.left_open(lambda entry: LEASE.validate_python(entry.body["lease"])):
            await FleetPause(left.intent, self, self._log, self._clock).resume(left.steps)

    async def pause(self, wish: PauseRequest) -> PauseState:
        """Close the barrier and return when the engines of every gateway are at rest.

        Raises ProblemFaults if a duration is out of range, and Permanent if another lease holds the barrier or no
        gateway is attached. Raises Retryable if the fleet does not come to rest, in which case requests continue as
        before.
        """
        state = self.state
        lease = wish.lease(f"g{self._journal.generation}-{next(self._leases)}", self._clock.now_s())
        if not self._nodes.gateways() and state.lease is None:
            raise Permanent("no gateway is attached, so the fleet cannot be paused; see `orchestrrl status`")
        self._take(state.paused(lease), "pause")
        self._rests = {}
        pausing = self._pausing = FleetPause(lease, self, self._log, self._clock)
        running = asyncio.create_task(pausing.run())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._break_off("the caller stopped waiting for the fleet to come to rest")
            raise
        finally:
            if self._pausing is pausing:  # another pause may have begun meanwhile
                self._pausing = None
        return self._fleet.weights

    async def renew(self, lease_id: str, lease_s: float) -> PauseState:
        """Extend the lease on every gateway to `lease_s` seconds from now, where 0 selects the default. Raises
        ProblemFaults if an argument is invalid, and Permanent if the lease has ended. Raises Retryable if a gateway did
        not confirm the extension. That gateway opens at the previous end of the lease."""
        faults = _seconds_faults("lease_s", lease_s)
        if not lease_id:
            faults.append(f"lease_id: must not be empty, got {lease_id!r}")
        if faults:
            raise ProblemFaults(faults)
        before = self.state.require_lease(lease_id)
        self._take(self._fleet.weights.renewed(lease_id, self._clock.now_s() + (lease_s or LEASE_S)), "renew")
        orders = self.close_all()
        if not self._fleet.weights.quiet:
            return self._fleet.weights  # the pause in progress reports failures
        results = await answers(orders, self._clock, ANSWER_S)
        late = [f"{node}: {why(result)}" for node, result in results.items() if not rested(result)]
        late += [f"{node}: is not attached" for node in self._away(lease_id)]
        if late:
            until = time_of_day(before.until_s)
            words = "; ".join(late)
            raise Retryable(
                f"cannot extend the lease on some gateways, which may resume requests at {until}: {words}",
                AGAIN_S,
            )
        self.state.require_lease(lease_id)
        return self._fleet.weights

    async def resume(
        self,
        lease_id: str,
        policy_version: int | None,
        without: Collection[EngineId],
        reason: str = "",
        weights_source: str = "",
    ) -> PauseState:
        """Open the barrier. The arguments have the same meaning as in `PauseState.resumed`. A repeated identical call
        returns the same state. A gateway that does not respond opens later and is named in `opened.detail` of the
        result.

        Raises ProblemFaults if an engine is unknown, and Permanent if the lease has ended.
        """
        state, engines = self.state, self._engines()
        if faults := _engine_faults("without_engine_ids", without, engines):
            raise ProblemFaults(faults)
        if state.lease is None and (over := state.opened) is not None and lease_id == over.lease:
            was = (over.how, over.policy_version, over.weights_source, set(without) & set(over.without))
            if was == (LeaseEnd.RESUMED, policy_version, weights_source, set(without)):
                return state  # a repeat: the first answer was lost
        if policy_version is not None:  # an engine that was not at rest got no new weights
            without = {*without, *(engine for engine, item in self._rests.items() if not item.done)}
        now_s = self._clock.now_s()
        resumed = state.resumed(lease_id, now_s, engines, policy_version, without, reason, weights_source)
        self._take(resumed, "resume")
        self._break_off("the pause barrier was opened")
        self._changed()
        opened = self._fleet.weights.opened
        assert opened is not None
        results = await answers(self._orders.open_all(opened), self._clock, ANSWER_S)
        self._rest(results.values())
        silent = [f"gateway {node}: {why(result)}" for node, result in results.items() if not rested(result)]
        if silent and self._fleet.weights.opened is opened:
            detail = f"{opened.detail}; not opened yet, will open later: {'; '.join(silent)}"
            self._take(replace(self._fleet.weights, opened=replace(opened, detail=detail)), "resume")
        return self._fleet.weights

    def set_version(
        self, engines: Collection[EngineId], policy_version: int, reason: str = "", weights_source: str = ""
    ) -> int:
        """Set the policy version of these engines' weights and return the fleet's newest version. Raises ProblemFaults
        if an engine is unknown or none is given."""
        faults = _engine_faults("engine_ids", engines, self._engines())
        if not engines:
            faults.append("engine_ids: must name at least one engine, got []")
        if faults:
            raise ProblemFaults(faults)
        for engine in engines:  # a restart before this must not be detected later
            self._generated.pop(engine, None)
        self._take(self.state.with_versions(engines, policy_version, weights_source), "version", reason)
        self._changed()
        assert self._fleet.weights.newest is not None
        return self._fleet.weights.newest

    def attaching(self, node: NodeId) -> None:
        """Withdraw a gateway's unanswered orders to close that belong to ended leases. Otherwise, these orders would be
        sent again when the gateway attaches, and would keep it closed. Also order the gateway to open for these leases,
        unless the fleet is at rest under another lease."""
        state = self.state
        for lease in self._orders.withdraw_closes(node, but=state.lease):
            if not state.quiet:
                self._orders.open(node, self._end(lease))

    def attached(self, node: NodeId) -> None:
        """Order a newly attached gateway to close if a lease is in effect, so that it sends no requests to engines at
        rest. A gateway that may have missed the last release of an earlier daemon is ordered to open first, and can
        then close again."""
        if self._unheard is not None and node not in self._ordered:
            self._ordered.add(node)
            self._orders.open(node, self._unheard)
        if self.state.lease is not None:
            order = self._order_close(node)
            if self._pausing is not None:
                self._pausing.attached(node, order)

    def detached(self, node: NodeId) -> None:
        """Abort a pause in progress, because a detached gateway cannot report that its engines are at rest."""
        self._break_off(f"gateway {node} detached")

    def reported(self, node: NodeId, report: BarrierReport) -> None:
        """Handle a gateway's report. If it still names a lease that ended a while ago, order the gateway to open once
        more."""
        if report.phase is BarrierPhase.OPEN or self._fleet.weights.lease is not None or report.lease not in self._over:
            return
        opened = self._end(report.lease)
        missed = self._clock.now_s() - opened.at_s > MISSED_S
        if missed and not self._orders.opening(node) and node in self._nodes.gateways():
            self._orders.open(node, opened)

    def sampled(self, engine: EngineId, sample: EngineSample) -> None:
        """Mark the weights of an engine as unknown if its token counter decreased. A decrease shows that the engine was
        restarted and has lost its weights."""
        before = self._generated.get(engine, 0)
        self._generated[engine] = sample.generation_tokens_total
        if sample.generation_tokens_total >= before:
            return
        self._restarted(engine)
        self.forget([engine], "was restarted")

    def forget(self, engines: Iterable[EngineId], why: str) -> None:
        """Mark the weights of these engines as unknown, so that the engines get no requests."""
        known = sorted(engine for engine in engines if engine in self._fleet.weights.versions)
        if known:
            reason = f"{', '.join(known)} {why}"
            logger.warning("barrier: %s: no requests until a policy version is set", reason)
            self._take(self.state.forgotten(known), "forgotten", reason)
            self._changed()

    def gone(self, engines: Iterable[EngineId]) -> None:
        """Drop the weight versions of engines that were stopped or put to sleep."""
        known = sorted(engine for engine in engines if engine in self._fleet.weights.versions)
        for engine in known:
            self._generated.pop(engine, None)
            self._restarted(engine)
        if known:
            self._take(self.state.forgotten(known), "forgotten", f"{', '.join(known)} stopped")

    @property
    def waiting(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that wait for gateways. Gateways carry out their orders even if these tasks are
        cancelled."""
        return [*self._running, *self._orders.waiting]

    # --- called by fleet/pause_operation.py

    def close_all(self) -> dict[NodeId, Order]:
        return {node: self._order_close(node) for node in self._nodes.gateways()}

    def at_rest(self, lease: PauseLease, results: Iterable[OperationResult]) -> None:
        """Record that the fleet is at rest. Raises Permanent if the lease has ended."""
        self._rest(results)
        self._take(self.state.at_rest(lease.id), "quiet")

    async def abandon(self, lease: PauseLease, because: str) -> None:
        """End the lease, unless it has ended already. Wait, for a limited time, until gateways have resumed
        requests."""
        if self._fleet.weights.lease is not None and self._fleet.weights.lease.id == lease.id:
            logger.warning("barrier: %s: %s", lease, because)
            self._take(self._fleet.weights.abandoned(lease.id, self._clock.now_s(), because), "gave_up")
        if self._fleet.weights.lease is None and self._fleet.weights.opened is not None:
            await answers(self._orders.open_all(self._fleet.weights.opened), self._clock, ANSWER_S)

    # --- inside

    def _engines(self) -> list[EngineId]:
        return [engine.id for engine in self._fleet.engines(self._clock.now_s())]

    def _away(self, lease_id: str) -> list[NodeId]:
        """Return the gateways that closed for this lease and are not attached, so that their present state is
        unknown."""
        now_s, attached = self._clock.now_s(), self._nodes.gateways()
        return [
            node
            for node, report in self.reports.items()
            if node not in attached and report.lease == lease_id and now_s < report.lease_until_s
        ]

    def _end(self, lease: str) -> LastRelease:
        """Return the release with which gateways open after the given lease has ended. The release has a weight version
        only if it is the fleet's latest release."""
        opened = self._over.get(lease) or LastRelease(lease, 0.0, LeaseEnd.GAVE_UP, "ended under an earlier daemon")
        return opened if opened is self._fleet.weights.opened else replace(opened, policy_version=None, without=())

    def _order_close(self, node: NodeId) -> Order:
        lease = self._fleet.weights.lease
        assert lease is not None
        quiet_by_s = lease.until_s if self._fleet.weights.quiet else lease.quiet_by_s
        running = self._pausing is not None and self._pausing.engines_run
        return self._orders.close(node, lease, quiet_by_s, engines_run=running)

    def _rest(self, results: Iterable[OperationResult | None]) -> None:
        """Record the result of each engine. An engine is at rest only if every gateway reports it at rest."""
        for item in (item for result in results if result is not None for item in result.items):
            known = self._rests.get(EngineId(item.id))
            if known is None or known.done:
                self._rests[EngineId(item.id)] = item

    def _break_off(self, because: str) -> None:
        if self._pausing is not None:
            with suppress(Permanent):  # the pause is being undone already
                self._pausing.call_off(because)

    def _ended(self, opened: LastRelease) -> None:
        self._over[opened.lease] = opened
        if len(self._over) > LEASES_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _take(self, state: PauseState, event: str, reason: str = "") -> None:
        before, self._fleet.weights = self._fleet.weights.lease, state
        if before is not None and state.lease is None and state.opened is not None:
            self._ended(state.opened)
            self.expired += state.opened.how is LeaseEnd.EXPIRED
            self._paused_s += state.opened.at_s - before.began_s
            if self._still_since_s is not None:
                self._still.append((self._still_since_s, state.opened.at_s))
                self._still_since_s = None
        elif state.quiet and self._still_since_s is None:
            self._still_since_s = self._clock.now_s()
        written = PAUSE_STATE.dump_python(state, mode="json")
        body = {"event": event, "phase": state.phase, "reason": reason, "state": written}
        lease = state.lease or before
        self._journal.append(self._clock.now_s(), EntryKind.BARRIER, lease.id if lease else "", body)
        logger.info("barrier %s: %s %s", event, state.phase, lease or "")


def _seconds_faults(name: str, value: float) -> list[str]:
    if value == 0 or LEASE_LEAST_S <= value <= LEASE_MAX_S:
        return []
    if 0 < value < LEASE_LEAST_S:
        return [f"{name}: must be 0 (the default) or >= {LEASE_LEAST_S:g}, got {value}"]
    return [f"{name}: must be from 0 (the default) to {LEASE_MAX_S:g}, got {value}"]


def _engine_faults(name: str, engines: Iterable[EngineId], known: Collection[EngineId]) -> list[str]:
    names = few(sorted(known), NAMES_TOLD, ", ") or "none"
    return [f"{name}: must be a known engine ({names}), got {e!r}" for e in engines if e not in known]
