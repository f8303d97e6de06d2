"""One version of the weights for the fleet: what trainers publish is brought to every engine, or to none.

This keeps the order: one version at a time, a newer one instead of one that has not begun to be installed, repairs in
between. A version's way is run.py's; what a daemon before has left, and who lags behind, is seen to first and
last. It acts in both modes: whoever publishes wants it done; an operator's pause of syncs is what holds it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from orchestrrl.core.clock import Clock, stop, until_set
from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operation_journal import OpenIntent
from orchestrrl.core.operations import FrozenRequests
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.weights.backends.base import BACKENDS, TREE, DirectBackend, make_direct
from orchestrrl.weights.controller.actions import SyncActions
from orchestrrl.weights.controller.circuits import SyncCircuits
from orchestrrl.weights.controller.fence import FleetFence
from orchestrrl.weights.controller.peer_hub import Heard, PeerHub, PeerState
from orchestrrl.weights.controller.publications import PublicationCollector, PublicationSet, fingerprint, fingerprints
from orchestrrl.weights.controller.repair import EngineRepairs
from orchestrrl.weights.controller.reports import (
    EngineStatus,
    EngineSync,
    PeerStatus,
    PhaseTime,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)
from orchestrrl.weights.controller.run import MAY_BE_REPLACED, SyncRun
from orchestrrl.weights.controller.serving import PeerAssignments
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.controller.state import HOLDER, CommittedVersion, EngineNow, SyncRecord, WeightBook
from orchestrrl.weights.model import Peer
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId
from planner.sync_tree.nic_share import LeftForMoves, left_for_moves

__all__ = ["EngineNow", "WeightSync"]

logger = logging.getLogger(__name__)

ON_ITS_WAY_S = 1.0  # how soon it may have been carried
TICK_S = 0.5  # how often it is looked for engines to repair, and for ranks that do not come
RESTARTED = ("restarted", "the daemon ended before it was committed: publish it again")
A_DEFECT = ("internal", "a defect of ours ended it, which is in the daemon's log: publish it again")


class WeightSync:
    """One daemon's. The caller keeps `run` as a task, after `recover`."""

    def __init__(
        self,
        hub: PeerHub,
        fence: FleetFence,
        circuits: SyncCircuits,
        journal: Journal,
        pause_registry: PauseRegistry,
        clock: Clock,
        settings: WeightSettings,
        *,
        engines: Callable[[], Mapping[EngineId, EngineNow]],
        deploying: Callable[[], bool] = lambda: False,
        stale: StaleVersions,
        offload: Offload = inline,
    ) -> None:
        """`deploying`: engines are being started or stopped by order. `stale` are engines that have lost what they
        had."""
        self.book = WeightBook(journal, clock)
        seen: set[EngineId] = set()

        def there() -> Mapping[EngineId, EngineNow]:
            now = engines()
            seen.update(now)
            return now

        self._serving = PeerAssignments(hub, clock, settings.patience_s, there)
        self._acts = SyncActions(
            hub,
            clock,
            settings,
            fence,
            circuits,
            self.book,
            pause_registry,
            there,
            self._wanted,
            deploying=deploying,
            settled=lambda: self._serving.settled,
            why_not_served=self._serving.why_not,
            seen=seen,
            stale=stale,
            offload=offload,
        )
        self._hub = hub
        self._clock = clock
        self._settings = settings
        self._collector = PublicationCollector(self.book, hub, clock, settings, self._complete, self._record)
        self.report, self.history = self._collector.report, self._collector.history
        self.follow = self._collector.follow
        self._next: SyncRun | None = None
        self._running: SyncRun | None = None
        self._repairs = EngineRepairs(self._acts)
        self._make_backend = cache(make_direct)  # what one has joined serves more than one version
        self._left: list[OpenIntent[SyncReport]] = []
        self._why_left = RESTARTED
        self.defects = 0  # faults of ours that were met while running
        self._news = asyncio.Event()
        hub.listen(self._on_news)

    # --- told by trainers

    def publish(self, publication: Publication) -> str:
        """The sync's id; the same again is answered again. Raises ProblemFaults; Permanent where the version is
        another's, or the fleet's already; Retryable while the rank's peer has not attached yet."""
        version = publication.version
        backend = self._backend(publication)
        committed = self.book.fleet.committed
        for run in filter(None, (self._next, self._running)):
            if run.sync_record.report.version == version and not run.sync_record.report.over:
                if fingerprint(publication) in run.fingerprints:  # as it was told, wherever it is installed
                    return run.sync_record.id
                raise Permanent(f"version {version} is on its way with other content, as {run.sync_record.id}")
        if committed is not None and committed.version == version:
            if fingerprint(publication) in committed.fingerprints:
                return committed.sync
            raise Permanent(f"version {version} is the fleet's, with other content: publish under another number")
        return self._collector.take(publication, backend)

    def _backend(self, publication: Publication) -> DirectBackend | None:
        """None: the tree, or one that nobody knows, which is told with what else is wrong. Raises ProblemFaults."""
        if publication.backend == TREE or publication.backend not in BACKENDS:
            return None
        try:
            return self._make_backend(publication.backend)
        except Permanent as error:
            raise ProblemFaults([f"backend: {error}"]) from error

    def _record(self) -> SyncRecord | None:
        return None if self._running is None else self._running.sync_record

    def _complete(self, collection: PublicationSet, record: SyncRecord) -> None:
        words = collection.publications
        record.ends(SyncPhase.PUBLISH)
        slowest = max(words, key=lambda word: word.offload_s + word.gather_s)
        if slowest.began_s:
            elapsed_s = slowest.offload_s + slowest.gather_s
            # Its host's clock is known about: all was there when it said so.
            began_s = min(self._acts.hub.ours_s(slowest.peer, slowest.began_s), self._clock.now_s() - elapsed_s)
            before = (
                PhaseTime(SyncPhase.OFFLOAD, began_s, began_s + slowest.offload_s),
                PhaseTime(SyncPhase.GATHER, began_s + slowest.offload_s, began_s + elapsed_s),
            )
            record.put(phases=(*before, *record.report.phases))
        if not words[0].install:
            words = tuple(replace(word, install=self._settings.install.value) for word in words)
        why = f"version {collection.version} was published"
        if self._next is not None:
            self._collector.drop(self._next.sync_record, SyncState.SUPERSEDED, "superseded", why)
        named = fingerprints(collection.publications)
        self._next = SyncRun(self._acts, record, words, named, self._backend(words[0]))
        record.state(SyncState.PLANNING)
        if self._running is not None and self._running.sync_record.report.state in MAY_BE_REPLACED:
            self._running.call_off(SyncState.SUPERSEDED, "superseded", why)
        self._news.set()

    async def relayed(
        self, sync_id: str, rank: int, number: int, call: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Of a trainer's rank that sends by itself. Raises Permanent where nothing of the kind is asked, and as the
        backend does."""
        run = self._running
        if run is None or run.sync_record.id != sync_id or run.direct is None:
            raise Permanent(f"weight sync {sync_id} asks nothing of a trainer")
        return await run.direct.relayed(rank, number, call, body)

    # --- asked by operators

    def status(self) -> WeightsStatus:
        fleet = self.book.fleet
        latest = self.history(1)
        return WeightsStatus(
            fleet.version,
            latest[0] if latest else None,
            tuple(EngineStatus(e, EngineSync.QUARANTINED, why) for e, why in sorted(fleet.quarantined.items())),
            tuple(_stands(state) for _, state in sorted(self._hub.peers.items())),
        )

    def abort(self, sync_id: str, reason: str) -> SyncReport:
        """Empty: the one under way. It may take a moment until it is over. Raises Permanent where it is over or
        committed."""
        report = self.report(sync_id)
        why = reason or "an operator has called it off"
        record = self._collector.records.get(report.id)
        if report.over or record is None:
            raise Permanent(f"weight sync {report.id} is over: {report.state}")
        if self._running is not None and self._running.sync_record is record:
            self._running.call_off(SyncState.ABORTED, "operator", why)
        elif self._next is not None and self._next.sync_record is record:
            self._next = None
            self._collector.drop(record, SyncState.ABORTED, "operator", why)
        elif self._collector.collecting is record:
            self._collector.abandon(SyncState.ABORTED, "operator", why)
        else:
            raise Permanent(f"weight sync {report.id} was left open by the daemon before, which is being seen to")
        return record.report

    def install_now(self, sync_id: str, reason: str) -> SyncReport:
        """Raises Permanent where nothing is prepared."""
        run = self._running
        if run is None or (sync_id and run.sync_record.id != sync_id):
            raise Permanent(f"weight sync {sync_id or 'under way'}: there is none, so nothing waits to be installed")
        run.install_now()
        run.sync_record.note(f"installed by an operator's word: {reason or 'no reason given'}")
        return run.sync_record.report

    # --- asked by the pause barrier, and by the balancer

    async def before_resume(self, until_s: float, told: int | None = None) -> tuple[int | None, tuple[EngineId, ...]]:
        """Somebody else's closed barrier is to be opened: what with, and without whom. What waits for that is installed
        first, as far as it can be by `until_s`. `told`: the version that they say engines have. Where it is one of ours
        it is so only where we brought it: raises Permanent where it could not be, Retryable where it is on its way."""
        fence, run = self._acts.fence, self._running
        lease = fence.state.lease
        if lease is None or lease.holder.startswith(HOLDER):
            return told, ()
        if (
            run is not None
            and (run.waits_for_barrier or run.borrows)
            and told in (None, run.sync_record.report.version)
        ):
            version, without = await run.borrow(until_s, lease.frozen is FrozenRequests.TAKEN_BACK)
            if told not in (None, version):
                why = run.sync_record.report.notes[-1:] or ("it was called off",)
                raise Permanent(
                    f"version {told} could not be installed, so engines have not got it: {why[0]}; resume without a"
                    " version, and all goes on as before"
                )
            return version, without
        self._acts.notice_others()
        committed = self.book.fleet.committed
        if told is not None:
            if committed is not None and committed.version == told:
                await self._acts.refresh(committed.has)
                return told, self._without(committed)
            self._not_on_its_way(told)
            return told, ()
        if committed is None or fence.state.newest == committed.version:
            return None, ()
        record = self._collector.records.get(committed.sync)
        # Where it was told of before, somebody has told another version since.
        if fence.state.newest is None or (record is not None and not record.report.over):
            await self._acts.refresh(committed.has)
            return committed.version, self._without(committed)
        return None, ()

    def restarted(self) -> list[EngineId]:
        """Engines of which nobody knows what they have, since they were started anew."""
        return [engine for engine in sorted(self._acts.engines()) if engine in self._acts.stale]

    def _without(self, committed: CommittedVersion) -> tuple[EngineId, ...]:
        has = set(committed.has).difference(self._acts.lacking(committed.version, committed.has))
        return tuple(sorted(engine for engine in self._acts.engines() if engine not in has))

    def _not_on_its_way(self, version: int) -> None:
        for record in self._collector.records.values():
            if record.report.version == version and not record.report.over:
                raise Retryable(
                    f"version {version} is on its way to engines, as {record.id} ({record.report.state}): they have not"
                    " got it yet; ask again, or resume without a version",
                    ON_ITS_WAY_S,
                )

    @property
    def left_for_moves(self) -> LeftForMoves:
        """Of engine hosts' NICs, what is left for moves of KV."""
        run = self._running
        if run is None or run.carrying is None or run.preparation.network is None:
            return LeftForMoves()
        peers = [id for id, state in self._hub.peers.items() if state.peer.engines]
        running = ((edge.src, edge.dst, edge.rate_gbps) for edge in run.carrying.progress.live)
        return left_for_moves(running, run.preparation.network.stations, peers)

    # --- run

    def recover(self) -> None:
        """Take up what the daemon before has left."""
        self._left = self.book.recover()
        for left in self._left:
            self._collector.records[left.id] = SyncRecord(left.intent, self._clock)
        committed, state = self.book.fleet.committed, self._acts.fence.state
        if committed is not None and state.newest is not None:
            for engine in committed.has:
                if engine not in state.versions:  # the daemon before may have seen that it was restarted
                    self._acts.stale.restarted(engine)

    async def run(self) -> None:
        """Until cancelled. What a defect leaves is seen to as what a daemon before has left."""
        serving = asyncio.ensure_future(self._keep_serving())
        try:
            await self._until_cancelled()
        finally:
            serving.cancel()

    async def _keep_serving(self) -> None:
        while True:
            try:
                await self._serving.run()
            except Exception:
                self.defects += 1
                logger.exception("peers were not told which engines there are")
            await self._clock.sleep(self._settings.patience_s / 10)

    async def _until_cancelled(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:
                self.defects += 1
                logger.exception("weight syncs")
                await self._clock.sleep(self._settings.patience_s / 10)
                if not self._left:
                    self._why_left, self._left = A_DEFECT, self._half_done()

    def _half_done(self) -> list[OpenIntent[SyncReport]]:
        """Nobody carries it out any more, and it is not over."""
        waiting = [self._next.sync_record] if self._next is not None else []
        waiting += [self._collector.collecting] if self._collector.collecting is not None else []
        ids = {record.id for record in self._collector.records.values() if not record.report.over}
        ids -= {record.id for record in waiting}
        try:
            return [left for left in self.book.left_open() if left.id in ids]
        except OrchestrRLError as error:  # the pause barrier's lease keeps requests from engines until it can be read
            logger.error("%s", error)
            return []

    async def _work(self) -> None:
        while self._left:
            await self._settle(self._left[0])
            del self._left[0]
        while True:
            self._news.clear()
            self._collector.expire_ranks()
            if self._next is not None:
                self._running, self._next = self._next, None
                try:
                    await self._running.run()
                finally:
                    self._running = None
            elif not await self._repair():
                self._news.clear()
                await until_set(self._clock, self._news, TICK_S)

    async def close(self) -> None:
        """After `run` was cancelled: streams end, and peers attach to the next daemon."""
        self._hub.close()

    # --- inside

    async def _settle(self, left: OpenIntent[SyncReport]) -> None:
        """Bring it to its end: finished where it is committed, undone where it is not."""
        record = self._collector.records[left.id]
        code, why = self._why_left
        record.note("the daemon was restarted" if code == "restarted" else "a defect of ours ended it")
        await SyncRun(self._acts, record, left=(SyncState.ABORTED, code, why)).resume(left.steps)

    async def _repair(self) -> bool:
        """Whether there was something to do."""
        if self._acts.pause_registry.hold(PauseScope.SYNC) is not None:
            return False
        try:
            due = self._repairs.poll()
        except OrchestrRLError as error:
            logger.error("%s", error)
            return False
        if not due:
            return False
        task = asyncio.ensure_future(self._repairs.one(due[0]))
        try:
            while not task.done() and self._next is None:  # a new version is more than a repair
                self._news.clear()
                await until_set(self._clock, self._news, TICK_S, task)
        finally:
            await stop(task)
        if not task.cancelled() and task.exception() is not None:
            await task
        return True

    def _on_news(self, peer: PeerId, news: Heard) -> None:
        carrying = self._running.carrying if self._running is not None else None
        for each in (carrying, self._repairs.carrying):
            if each is not None:
                each.on_news(peer, news)
        if isinstance(news, Peer):
            try:
                self._repairs.on_peer(news)
            except OrchestrRLError as error:
                logger.error("what engines of peer %s have is not written down: %s", peer, error)
        if news is None or isinstance(news, Peer):
            self._news.set()

    def _wanted(self) -> list[int]:
        runs = [run.sync_record.report.version for run in (self._running, self._next) if run is not None]
        return runs + ([] if self._collector.collecting is None else [self._collector.collecting.report.version])


def _stands(state: PeerState) -> PeerStatus:
    peer = state.peer
    return PeerStatus(
        peer.id,
        peer.role,
        peer.host,
        state.attached,
        tuple(each.engine for each in peer.engines),
        tuple(held.version for held in peer.held if held.complete),
        peer.place.pod,
        peer.place.tor,
        peer.ranks_of,
    )
