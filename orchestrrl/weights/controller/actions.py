"""Single actions of a sync on engines and peers, such as pausing, installing and probing. If an action fails, it raises
SyncFailed with a report code."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import OrchestrRLError, cut, few
from orchestrrl.core.offload import Offload
from orchestrrl.core.operations import FrozenRequests
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.weights import orders
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.reports import SyncPhase
from orchestrrl.weights.controller.serving import PeerAssignments
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.controller.state import HOLDER, LOOK_S, WORDS, EngineNow, FleetWeights, WeightBook
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import Order, OrderOutcome, PeerResult
from planner.model import EngineId, PeerId
from planner.sync_tree.network import SyncNetwork

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # for the answer to an order that takes no time itself
LOOK_WITHIN_S = 15.0  # must exceed the time for which peers wait for an engine


OnPhase = Callable[[SyncPhase], None]


class ClosedLease(Protocol):
    """The lease that keeps the fleet paused. Its `str()` names the holder."""

    @property
    def id(self) -> str: ...
    @property
    def holder(self) -> str: ...
    @property
    def frozen(self) -> FrozenRequests: ...


class FleetVersions(Protocol):
    """The state of the pause barrier, and the weight version of each engine. See fleet/pause_lease.py."""

    @property
    def lease(self) -> ClosedLease | None: ...
    @property
    def versions(self) -> Mapping[EngineId, int]: ...
    @property
    def newest(self) -> int | None: ...
    @property
    def left_out(self) -> Collection[EngineId]: ...


class FleetFence(Protocol):
    """The interface through which a weight sync uses the pause barrier. No request runs between `pause` and `resume`.
    Methods raise the errors of fleet/pause_barrier.py."""

    @property
    def state(self) -> FleetVersions: ...

    def is_manned(self) -> bool:
        """Return whether a gateway is attached. If a gateway is attached, gateways pause the engines. Otherwise, peers
        pause them."""
        ...

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        """Pause the fleet, and return the lease's id once no request runs. If `empty` is set, requests are also
        withdrawn from the engines."""
        ...

    async def renew(self, lease: str, lease_s: float) -> None: ...

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None: ...

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None: ...

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        """Mark the versions of these engines as unknown. If the fleet has a version, these engines then receive no
        requests."""
        ...


@dataclass(frozen=True, slots=True)
class BroughtUp:
    """The network after the circuits of a sync were brought up. `notes` lists each deviation of the circuits from the
    plan, with its cause. If there are no deviations, the plan is valid."""

    network: SyncNetwork
    notes: tuple[str, ...] = ()


class SyncCircuits(Protocol):
    """The network for weight syncs, and the circuits of one sync. See daemon/weight_circuits.py."""

    def network(self) -> SyncNetwork:
        """Return the network that a sync can use for its transfer."""
        ...

    async def bring_up(
        self, sync_id: str, planned: PlannedSync, on_phase: OnPhase, *, still: bool = False
    ) -> BroughtUp:
        """Bring up the circuits of a plan, and return the resulting network. `on_phase` is called when a phase of this
        work begins. `still` is set if the trainer sends no traffic during this call."""
        ...

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        """Release the circuits of a sync. Return notes for the report of the sync."""
        ...


class SyncFailed(OrchestrRLError):
    """Raised when an attempt to sync a version fails. `without` contains the engines that the next attempt leaves out,
    with reasons if available. `again` is set if another attempt may succeed. `unchanged` is set if the failed order had
    no effect."""

    def __init__(
        self, code: str, detail: str, without: Collection[EngineId] = (), *, again: bool = True, unchanged: bool = False
    ) -> None:
        detail = cut(detail, WORDS)
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        own = without if isinstance(without, Mapping) else dict.fromkeys(without, detail)
        self.without: Mapping[EngineId, str] = {engine: cut(str(why)) for engine, why in own.items()}
        self.again = again
        self.unchanged = unchanged


async def each_done(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all awaitables in `work`, and return the results in the same order. If one fails, cancel the others and
    raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await stop(*tasks)


@dataclass(frozen=True, slots=True)
class SyncActions:
    """The components that a weight sync uses, and its single actions on peers and engines."""

    hub: PeerHub
    clock: Clock
    settings: WeightSettings
    fence: FleetFence
    circuits: SyncCircuits
    book: WeightBook
    pause_registry: PauseRegistry
    serving: PeerAssignments
    stale: StaleVersions
    deploying: Callable[[], bool]  # whether a deployment is starting or stopping engines
    offload: Offload
    rested: set[EngineId] = field(default_factory=set)  # engines that peers have paused

    # --- which engines are available

    def engines(self) -> Mapping[EngineId, EngineNow]:
        return self.serving.engines()

    def awaited(self) -> list[EngineId]:
        """Return the engines whose peers are expected to attach again soon. These are engines whose peer has just
        detached. If the daemon has just restarted, they also include the engines that had the fleet's version, or all
        known engines if there was no version."""
        now_s, patience_s, known = self.clock.now_s(), self.settings.patience_s, self.engines()
        attached = {each.engine for peer in self.hub.attached().values() for each in peer.engines}
        gone = [
            state.peer
            for state in self.hub.peers.values()
            if not state.attached and now_s < state.last_report_s + patience_s
        ]
        away = {each.engine for peer in gone for each in peer.engines} - attached
        away |= {engine for peer in gone for engine in peer.ranks_of}
        away &= set(known)
        since_s, committed = self.book.recovered_s, self.book.fleet.committed
        if since_s is not None and now_s < since_s + patience_s:
            had = known if committed is None else committed.has
            away |= {e for e in had if e not in known or not known[e].healthy or e not in attached}
        return sorted(away)

    def installed(self, engine: EngineId) -> int | None:
        """Return the version that an engine's attached peer reports, or None if unknown. A report from before a restart
        of the engine is ignored, unless the pause barrier has received the engine's version after the restart."""
        if engine in self.stale and engine in self.fence.state.versions:
            self.stale.dispel(engine, self.stale.of(engine))
        if engine in self.stale:
            return None
        peer = self.hub.peer_of(engine)
        return next((each.installed for each in peer.engines if each.engine == engine), None) if peer else None

    def lacking(self, version: int, engines: Iterable[EngineId]) -> list[EngineId]:
        """Return the engines whose last valid report does not show the version. An engine without an attached peer is
        included only if it has been restarted."""
        return [
            engine
            for engine in engines
            if self.installed(engine) != version and (self.hub.peer_of(engine) is not None or engine in self.stale)
        ]

    def gone(self, engine: EngineId) -> bool:
        """Return whether an engine that was known earlier has left the fleet, because it was stopped or removed. Its
        absence does not count as a failure."""
        return engine not in self.engines() and engine in self.serving.seen

    # --- the pause barrier

    @property
    def is_closed(self) -> bool:
        return self.fence.state.lease is not None

    def own_lease(self, sync_id: str) -> str:
        """Return the id of the pause barrier's lease if the sync holds the lease, and an empty string otherwise."""
        lease = self.fence.state.lease
        return lease.id if lease is not None and lease.holder == HOLDER + sync_id else ""

    async def close_barrier(self, sync_id: str, *, empty: bool) -> str:
        """Close the pause barrier for a sync, and return the lease's id. If `empty` is set, requests are also withdrawn
        from the engines."""
        lease_s, deadline_s = self.settings.lease_s, self.settings.fence_within_s
        return await self.fence.pause(HOLDER + sync_id, empty=empty, lease_s=lease_s, deadline_s=deadline_s)

    def notice_others(self) -> bool:
        """Return whether the pause barrier has received another version since the last commit, and if so, record that
        the committed version is no longer the fleet's. Return False if the barrier has no version, or if it still has
        the version from before the commit because it has not received the committed version yet."""
        committed, newest = self.book.fleet.committed, self.fence.state.newest
        if committed is None or newest is None:
            return False
        if newest == committed.version:
            self.book.was_reported = True
            return False
        if not self.book.was_reported and newest == committed.before:
            return False
        logger.warning("the fleet has version %d from outside weight sync, in place of %d", newest, committed.version)
        self.book.stands(FleetWeights())
        return True

    # --- actions

    async def done(
        self, peer: PeerId, order: Order, within_s: float, code: str, engine: EngineId | None = None
    ) -> PeerResult:
        """Send an order to a peer and return the result. Raises SyncFailed, with the code `peer_lost` if the peer does
        not answer, and with `code` if the order fails. The next attempt then leaves out `engine` or, if `engine` is
        None, all engines that need the peer's bytes."""
        try:
            result = await self.hub.send_order(peer, order, within_s, self.settings.patience_s)
        except OrchestrRLError as error:
            without = self.hub.engines_of([peer]) if engine is None else [engine]
            raise SyncFailed("peer_lost", str(error), without) from error
        if result.outcome is OrderOutcome.DONE:
            return result
        words = f"{result.outcome}: {result.detail}".rstrip(": ")
        if engine is None:
            raise SyncFailed(
                code,
                f"order {order.kind} on peer {peer} ended with outcome {words}",
                self.hub.engines_of([peer]),
            )
        raise SyncFailed(
            code,
            f"order {order.kind} on engine {engine} ended with outcome {words}",
            [engine],
            unchanged=result.outcome is OrderOutcome.FAILED,
        )

    async def send_order(self, engine: EngineId, order: Order, within_s: float, code: str) -> PeerResult:
        """Send an order to the peer of an engine and return the result. Raises SyncFailed, with the code `peer_lost` if
        the peer is not attached or does not answer, and with `code` if the order fails. The next attempt then leaves
        out only this engine."""
        peer = self.hub.peer_of(engine)
        if peer is None:
            raise SyncFailed("peer_lost", f"cannot reach engine {engine}: {self.serving.why_not(engine)}", [engine])
        return await self.done(peer.id, order, within_s, code, engine)

    async def install(
        self, engine: EngineId, version: int, until_s: float | None = None, *, anew: bool = False
    ) -> PeerResult:
        within_s = self.settings.install_within_s
        now_s = self.clock.now_s()
        valid_until_s = min(now_s + within_s, until_s if until_s is not None else now_s + within_s)
        order, doubt = orders.InstallVersion(version, engine, valid_until_s, anew), self.stale.of(engine)
        result = await self.send_order(engine, order, max(0.0, valid_until_s - now_s) + ANSWER_S, "install_failed")
        self.stale.dispel(engine, doubt)
        return result

    async def refresh(self, engines: Iterable[EngineId]) -> None:
        """Query the current versions of engines, because a restart may have been missed. If an engine does not answer,
        its version is marked as unknown. If its peer does not answer, the last report stays valid."""

        async def one(engine: EngineId) -> None:
            peer, doubt = self.hub.peer_of(engine), self.stale.of(engine)
            if peer is None:
                return
            try:
                result = await self.hub.send_order(peer.id, orders.QueryVersion(engine), LOOK_WITHIN_S, 0.0)
            except OrchestrRLError as error:
                logger.warning("%s: its version could not be queried: %s", engine, error)
                return
            if result.outcome is OrderOutcome.DONE:
                self.stale.dispel(engine, doubt)
            else:
                self.stale.restarted(engine)
                self.fence.forget([engine], f"did not report its version: {result.detail}")

        await each_done(one(engine) for engine in sorted(engines))

    async def reinstall_restarted(self, engines: Iterable[EngineId]) -> None:
        """Install the fleet's version into engines that were restarted and have lost it, if peers store the version."""
        committed = self.book.fleet.committed
        if committed is not None and committed.is_kept:
            doubted = [engine for engine in engines if engine in self.stale and engine in self.engines()]
            failed = await self.try_each(doubted, lambda engine: self.install(engine, committed.version))
            for engine, why in failed.items():
                logger.warning("%s was restarted, and its weights could not be installed again: %s", engine, why)

    async def probe(self, engine: EngineId, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        within_s = self.settings.probe_within_s
        order = orders.ProbeWeights(engine, prompt, max_tokens, self.clock.now_s() + within_s)
        return (await self.send_order(engine, order, within_s + ANSWER_S, "verify_failed")).tokens

    async def rest(self, engine: EngineId, at_rest: bool, drain_s: float = 0.0, *, ends: bool = False) -> None:
        if at_rest:
            self.rested.add(engine)
        order = orders.RestEngine(engine, at_rest, drain_s, ends)
        await self.send_order(engine, order, self.settings.fence_within_s + drain_s, "not_quiet")
        if not at_rest:
            self.rested.discard(engine)

    async def try_each(
        self, engines: Iterable[EngineId], act: Callable[[EngineId], Awaitable[object]]
    ) -> dict[EngineId, str]:
        """Perform `act` on each engine. Return the engines for which it failed, with the reasons."""
        failed: dict[EngineId, str] = {}

        async def one(engine: EngineId) -> None:
            try:
                await act(engine)
            except SyncFailed as failure:
                failed[engine] = failure.detail

        await each_done(one(engine) for engine in sorted(engines))
        return failed

    async def wait_until(self, done: Callable[[], bool], within_s: float) -> bool:
        """Wait until `done()` returns true or `within_s` has passed. Return whether `done()` returned true."""
        until_s = self.clock.now_s() + within_s
        while not done():
            if self.clock.now_s() >= until_s:
                return False
            await self.clock.sleep(LOOK_S)
        return True

    async def let_go(self, version: int) -> None:
        """End all transfers of the version between peers, on all attached peers."""
        await self._notify_all(lambda _: orders.EndEdges(version))

    async def keep(self, *, but: int | None = None) -> None:
        """Have peers discard all versions except the fleet's version, the versions of open syncs, and newer versions
        that trainers have staged. If `but` is given, have peers discard only the version `but`, unless it is the
        fleet's version or the version of several open syncs."""
        committed = self.book.fleet.version
        wanted = [record.report.version for record in self.book.open.values()]
        if committed == but or sum(version == but for version in wanted) > 1:
            return

        def order(peer: Peer) -> orders.KeepVersions:
            newer = {held.version for held in peer.held if held.staged_by and held.version > (committed or 0)}
            others = newer if but is None else {held.version for held in peer.held}
            versions = {*wanted, *others, *([] if committed is None else [committed])}
            return orders.KeepVersions(tuple(sorted(versions - {but})))

        await self._notify_all(order)

    async def _notify_all(self, order: Callable[[Peer], Order]) -> None:
        async def one(peer: Peer) -> None:
            if why := await self.hub.try_order(peer.id, order(peer), ANSWER_S):
                logger.warning("peer %s: %s", peer.id, why)

        await each_done(one(peer) for peer in self.hub.attached().values())


def results_by_engine(why: Mapping[EngineId, str]) -> str:
    return few([f"{engine}: {words}" for engine, words in sorted(why.items())])
