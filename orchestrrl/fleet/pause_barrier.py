"""Close and open every gateway's barrier: intent -> all at rest, or all as before. What a lease is and means is
pause_lease.py's.

Gateways keep the time of a lease themselves, so what the daemon does not get to tell them happens without it.
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

LEASE_S = 60.0  # where none is asked for
LEASE_LEAST_S = 0.001  # less is lost when it is added to the time of day
LEASE_MAX_S = 24 * 3600.0  # whoever dies with a lease keeps the fleet for so long
# Gateways that say that a pause barrier is closed which was opened so long ago have not heard of it.
MISSED_S = 2.0
UNHEARD_S = 600.0  # a daemon that was away for so long need not hurry
LEASES_REMEMBERED = 256
NAMES_TOLD = 32
OUTDATED = "has not the fleet's weights, as far as anybody told: gets no requests until its version is told"


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """What somebody asks for who wants to pause. 0 seconds: the usual."""

    mode: PauseMode = PauseMode.KEEP
    frozen: FrozenRequests = FrozenRequests.RECOMPUTE
    holder: str = ""
    lease_s: float = 0.0
    deadline_s: float = 0.0
    weights_change: bool = False  # by us, who would otherwise say which weights engines have when the lease is over

    def lease(self, id: str, now_s: float) -> PauseLease:
        """It lasts at least until the deadline. Raises ProblemFaults."""
        faults = _seconds_faults("lease_s", self.lease_s) + _seconds_faults("deadline_s", self.deadline_s)
        if faults:
            raise ProblemFaults(faults)
        quiet_s = self.deadline_s or self.lease_s or LEASE_S
        lasts_s = max(self.lease_s or LEASE_S, quiet_s)
        until_s, quiet_by_s = now_s + lasts_s, now_s + quiet_s
        return PauseLease(id, self.holder, self.mode, self.frozen, now_s, until_s, quiet_by_s, self.weights_change)


@dataclass(frozen=True, slots=True)
class EngineAtRest:
    """What became of an engine when the pause barrier closed or opened last."""

    engine: EngineId
    done: bool
    detail: str
    policy_version: int | None  # of its weights


class PauseBarrier:
    """One fleet's barrier. `changed` is called when routes have another version or may be used again, `restarted` with
    an engine whose weights are gone."""

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
        self._pausing: FleetPause | None = None  # the fleet on its way to rest, for the lease that lasts
        self._running: set[asyncio.Task[None]] = set()  # pauses, also those that go back
        self._rests: dict[EngineId, OperationItemResult] = {}  # of each engine, when it was closed or opened last
        self._generated: dict[EngineId, int] = {}  # tokens, as each engine last counted
        self._still_since_s: float | None = None
        self._still: deque[tuple[float, float]] = deque(maxlen=LEASES_REMEMBERED)  # from quiet to open
        self._over: dict[str, LastRelease] = {}  # how leases ended, the latest last: a gateway may have missed any
        self._unheard: LastRelease | None = None  # of which gateways may not have heard, as the daemon before died
        self._ordered: set[NodeId] = set()  # of that
        self.expired = 0  # leases since the daemon's start
        self._paused_s = 0.0  # the same, of leases that have ended

    # --- ask

    @property
    def state(self) -> PauseState:
        """As of now. A lease that has run out is written down by who looks first."""
        now = self._fleet.weights.at(self._clock.now_s())
        if now is not self._fleet.weights:
            logger.warning("barrier: %s", now.opened.detail if now.opened else "")
            self._take(now, "expired")
            self._break_off("the lease has run out")
        return self._fleet.weights

    @property
    def paused_s(self) -> float:
        lease = self.state.lease
        return self._paused_s + (self._clock.now_s() - lease.began_s if lease else 0.0)

    def still_s(self, from_s: float, to_s: float) -> float:
        """For how much of a time of late everything was at rest by order."""
        spans = [*self._still]
        if self._still_since_s is not None:
            spans.append((self._still_since_s, to_s))
        return sum(max(0.0, min(to_s, ended_s) - max(from_s, began_s)) for began_s, ended_s in spans)

    def gateways(self) -> dict[NodeId, BarrierReport | None]:
        """The attached ones, by id, each with its latest word."""
        reports = self.reports
        return {node: reports.get(node) for node in self._nodes.gateways()}

    def rests(self) -> list[EngineAtRest]:
        """Every engine, by id."""
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
        """The latest of every gateway, also of those that are not attached."""
        return self._fleet.barriers

    def check_open(self) -> None:
        """Raises Permanent while requests stand still."""
        state = self.state
        if state.lease is not None:
            raise Permanent(
                f"requests stand still while weights change: the pause barrier is {state.phase}, {state.lease}"
            )

    # --- act

    def recover(self) -> None:
        """Take up the pause barrier as the daemon before left it. Nobody waits any more for a fleet that was to come to
        rest."""
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
        # It is written down before gateways are told, who refuse what they have done. Older ones tell what they missed.
        if opened is not None and self._fleet.weights.lease is None and self._clock.now_s() - opened.at_s < UNHEARD_S:
            self._unheard = opened

    async def settle(self) -> None:
        """End the pauses that an earlier daemon left open."""
        for left in self._log.left_open(lambda entry: LEASE.validate_python(entry.body["lease"])):
            await FleetPause(left.intent, self, self._log, self._clock).resume(left.steps)

    async def pause(self, wish: PauseRequest) -> PauseState:
        """Answers when every gateway's engines are at rest. Raises ProblemFaults; Permanent where another holds the
        barrier or no gateway is attached; Retryable when it did not come to that, and all goes on as before."""
        state = self.state
        lease = wish.lease(f"g{self._journal.generation}-{next(self._leases)}", self._clock.now_s())
        if not self._nodes.gateways() and state.lease is None:
            raise Permanent("no gateway is attached, so nothing can be brought to rest: see `orchestrrl status`")
        self._take(state.paused(lease), "pause")
        self._rests = {}
        pausing = self._pausing = FleetPause(lease, self, self._log, self._clock)
        running = asyncio.create_task(pausing.run())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._break_off("nobody waits any more for the fleet to come to rest")
            raise
        finally:
            if self._pausing is pausing:  # by now another may have begun
                self._pausing = None
        return self._fleet.weights

    async def renew(self, lease_id: str, lease_s: float) -> PauseState:
        """From now, everywhere. Raises Permanent when the lease has ended, Retryable when a gateway has not been told,
        which opens when the lease was to end before."""
        faults = _seconds_faults("lease_s", lease_s)
        if not lease_id:
            faults.append(f"lease_id: must not be empty, got {lease_id!r}")
        if faults:
            raise ProblemFaults(faults)
        before = self.state.require_lease(lease_id)
        self._take(self._fleet.weights.renewed(lease_id, self._clock.now_s() + (lease_s or LEASE_S)), "renew")
        orders = self.close_all()
        if not self._fleet.weights.quiet:
            return self._fleet.weights  # who waits for the fleet to come to rest hears of failures
        results = await answers(orders, self._clock, ANSWER_S)
        late = [f"{node}: {why(result)}" for node, result in results.items() if not rested(result)]
        late += [f"{node}: is not attached" for node in self._away(lease_id)]
        if late:
            until = time_of_day(before.until_s)
            words = "; ".join(late)
            raise Retryable(f"not every gateway has extended the lease, some may open at {until}: {words}", AGAIN_S)
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
        """Raises ProblemFaults for unknown engines, Permanent when the lease has ended. The same again is answered
        again. A gateway that does not answer opens by itself, and is named in how the pause barrier opened."""
        state, engines = self.state, self._engines()
        if faults := _engine_faults("without_engine_ids", without, engines):
            raise ProblemFaults(faults)
        if state.lease is None and (over := state.opened) is not None and lease_id == over.lease:
            was = (over.how, over.policy_version, over.weights_source, set(without) & set(over.without))
            if was == (LeaseEnd.RESUMED, policy_version, weights_source, set(without)):
                return state  # it was resumed in these words already, and the answer got lost
        if policy_version is not None:  # an engine that was not brought to rest had nothing done to it
            without = {*without, *(engine for engine, item in self._rests.items() if not item.done)}
        now_s = self._clock.now_s()
        resumed = state.resumed(lease_id, now_s, engines, policy_version, without, reason, weights_source)
        self._take(resumed, "resume")
        self._break_off("somebody has opened the pause barrier")
        self._changed()
        opened = self._fleet.weights.opened
        assert opened is not None
        results = await answers(self._orders.open_all(opened), self._clock, ANSWER_S)
        self._rest(results.values())
        silent = [f"gateway {node}: {why(result)}" for node, result in results.items() if not rested(result)]
        if silent and self._fleet.weights.opened is opened:
            detail = f"{opened.detail}; not opened yet, which they do by themselves: {'; '.join(silent)}"
            self._take(replace(self._fleet.weights, opened=replace(opened, detail=detail)), "resume")
        return self._fleet.weights

    def set_version(
        self, engines: Collection[EngineId], policy_version: int, reason: str = "", weights_source: str = ""
    ) -> int:
        """The fleet's newest. Raises ProblemFaults."""
        faults = _engine_faults("engine_ids", engines, self._engines())
        if not engines:
            faults.append("engine_ids: names no engine, got []")
        if faults:
            raise ProblemFaults(faults)
        for engine in engines:  # of one that was restarted before, only what it generates from now on counts
            self._generated.pop(engine, None)
        self._take(self.state.with_versions(engines, policy_version, weights_source), "version", reason)
        self._changed()
        assert self._fleet.weights.newest is not None
        return self._fleet.weights.newest

    def attaching(self, node: NodeId) -> None:
        """Before a gateway is told again what it has not answered: an order to close for a lease that is over by now
        would keep it closed. It opens where it has closed for one, unless weights are being changed."""
        state = self.state
        for lease in self._orders.withdraw_closes(node, but=state.lease):
            if not state.quiet:
                self._orders.open(node, self._end(lease))

    def attached(self, node: NodeId) -> None:
        """A gateway that has come while requests stand still must not send any to engines at rest. One that stands
        still for a lease that was given up goes on, and can be closed again."""
        if self._unheard is not None and node not in self._ordered:
            self._ordered.add(node)
            self._orders.open(node, self._unheard)
        if self.state.lease is not None:
            order = self._order_close(node)
            if self._pausing is not None:
                self._pausing.attached(node, order)

    def detached(self, node: NodeId) -> None:
        """A gateway that goes while the fleet comes to rest leaves nobody to say so."""
        self._break_off(f"gateway {node} has gone away")

    def reported(self, node: NodeId, report: BarrierReport) -> None:
        """A gateway that has not heard of the end of a lease is told again."""
        if report.phase is BarrierPhase.OPEN or self._fleet.weights.lease is not None or report.lease not in self._over:
            return
        opened = self._end(report.lease)
        missed = self._clock.now_s() - opened.at_s > MISSED_S
        if missed and not self._orders.opening(node) and node in self._nodes.gateways():
            self._orders.open(node, opened)

    def sampled(self, engine: EngineId, sample: EngineSample) -> None:
        """An engine whose count goes back was restarted, and has not the weights any more that were told."""
        before = self._generated.get(engine, 0)
        self._generated[engine] = sample.generation_tokens_total
        if sample.generation_tokens_total >= before:
            return
        self._restarted(engine)
        self.forget([engine], "was restarted")

    def forget(self, engines: Iterable[EngineId], why: str) -> None:
        """What is known of their weights holds no longer."""
        told = sorted(engine for engine in engines if engine in self._fleet.weights.versions)
        if told:
            reason = f"{', '.join(told)} {why}"
            logger.warning("barrier: %s: no requests go there until a policy version is told", reason)
            self._take(self.state.forgotten(told), "forgotten", reason)
            self._changed()

    def gone(self, engines: Iterable[EngineId]) -> None:
        """They were stopped, or sleep: what they had is no weights of the fleet's any longer."""
        told = sorted(engine for engine in engines if engine in self._fleet.weights.versions)
        for engine in told:
            self._generated.pop(engine, None)
            self._restarted(engine)
        if told:
            self._take(self.state.forgotten(told), "forgotten", f"{', '.join(told)} stopped")

    @property
    def waiting(self) -> list[asyncio.Task[Any]]:
        """Tasks that wait for gateways, which do what they were told all the same."""
        return [*self._running, *self._orders.waiting]

    # --- what fleet/pause_operation.py asks of it

    def close_all(self) -> dict[NodeId, Order]:
        return {node: self._order_close(node) for node in self._nodes.gateways()}

    def at_rest(self, lease: PauseLease, results: Iterable[OperationResult]) -> None:
        """Raises Permanent where the lease has ended."""
        self._rest(results)
        self._take(self.state.at_rest(lease.id), "quiet")

    async def abandon(self, lease: PauseLease, because: str) -> None:
        """Have all go on as before, unless the lease has ended otherwise, and wait for the gateways' answers."""
        if self._fleet.weights.lease is not None and self._fleet.weights.lease.id == lease.id:
            logger.warning("barrier: %s: %s", lease, because)
            self._take(self._fleet.weights.abandoned(lease.id, self._clock.now_s(), because), "gave_up")
        if self._fleet.weights.lease is None and self._fleet.weights.opened is not None:
            await answers(self._orders.open_all(self._fleet.weights.opened), self._clock, ANSWER_S)

    # --- inside

    def _engines(self) -> list[EngineId]:
        return [engine.id for engine in self._fleet.engines(self._clock.now_s())]

    def _away(self, lease_id: str) -> list[NodeId]:
        """Gateways that have closed for this lease, and of which nobody knows whether they are still there."""
        now_s, attached = self._clock.now_s(), self._nodes.gateways()
        return [
            node
            for node, report in self.reports.items()
            if node not in attached and report.lease == lease_id and now_s < report.lease_until_s
        ]

    def _end(self, lease: str) -> LastRelease:
        """What is to be said of it now. Which weights engines had at the end of an older one is no news."""
        opened = self._over.get(lease) or LastRelease(lease, 0.0, LeaseEnd.GAVE_UP, "ended under a daemon before")
        return opened if opened is self._fleet.weights.opened else replace(opened, policy_version=None, without=())

    def _order_close(self, node: NodeId) -> Order:
        lease = self._fleet.weights.lease
        assert lease is not None
        quiet_by_s = lease.until_s if self._fleet.weights.quiet else lease.quiet_by_s
        running = self._pausing is not None and self._pausing.engines_run
        return self._orders.close(node, lease, quiet_by_s, engines_run=running)

    def _rest(self, results: Iterable[OperationResult | None]) -> None:
        """An engine is at rest where it is so for every gateway."""
        for item in (item for result in results if result is not None for item in result.items):
            known = self._rests.get(EngineId(item.id))
            if known is None or known.done:
                self._rests[EngineId(item.id)] = item

    def _break_off(self, because: str) -> None:
        if self._pausing is not None:
            with suppress(Permanent):  # it goes back already
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
        return [f"{name}: must be 0 (the usual) or >= {LEASE_LEAST_S:g}, got {value}"]
    return [f"{name}: must be from 0 (the usual) to {LEASE_MAX_S:g}, got {value}"]


def _engine_faults(name: str, engines: Iterable[EngineId], known: Collection[EngineId]) -> list[str]:
    names = few(sorted(known), NAMES_TOLD, ", ") or "none"
    return [f"{name}: is not a known engine (known: {names}), got {e!r}" for e in engines if e not in known]
