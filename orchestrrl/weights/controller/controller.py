"""Keep one weight version in the fleet: bring each version that a trainer publishes to every engine, or to none.

The controller collects the publications of a trainer's ranks until a version is complete. It runs one sync at a time
and repairs engines between syncs. A newer version replaces a version whose installation has not begun. The steps of a
sync are in run.py. Syncs that an earlier daemon left open are finished first. Syncs run in both modes of the daemon,
advise and act, because publishing is an explicit request. An operator can pause syncs.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from typing import Any

from orchestrrl.core.clock import Clock, stop, until_set
from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.delivery import REATTACH_S
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable, few
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operation_journal import OpenIntent
from orchestrrl.core.operations import FrozenRequests
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.weights.backends.base import BACKENDS, TREE, DirectBackend, make_direct
from orchestrrl.weights.controller.actions import FleetFence, SyncActions, SyncCircuits
from orchestrrl.weights.controller.carrying import Carrying
from orchestrrl.weights.controller.peer_hub import Heard, PeerHub
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
from orchestrrl.weights.publication import NOT_ATTACHED, Publication, PublicationSet, fingerprint
from planner.model import EngineId, PeerId
from planner.sync_tree.network import LeftForMoves, left_for_moves

logger = logging.getLogger(__name__)

ON_ITS_WAY_S = 1.0  # before the caller tries again
TICK_S = 0.5  # interval of polls for engines to repair and for ranks that have not published in time
RESTARTED = ("restarted", "the daemon ended before the version was committed: publish it again")
A_DEFECT = ("internal", "an internal error ended the sync, see the daemon's log: publish the version again")


class WeightSync:
    """The controller of all weight syncs of one daemon. The caller calls `recover` first and then runs `run` in a
    task."""

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
        """Create the controller. `engines` returns the engines of the fleet. `deploying` returns whether a deployment
        is starting or stopping engines. `stale` tracks the engines whose reported version is from before a restart."""
        self.book = WeightBook(journal, clock)
        self._serving = PeerAssignments(hub, clock, settings.patience_s, engines)
        self._acts = SyncActions(
            hub, clock, settings, fence, circuits, self.book, pause_registry, self._serving, stale, deploying, offload
        )
        self._hub = hub
        self._clock = clock
        self._settings = settings
        self._numbers = itertools.count(1)
        self._collecting: tuple[PublicationSet, SyncRecord] | None = None  # a version that some ranks have published
        self._next: SyncRun | None = None
        self._running: SyncRun | None = None
        self._repairs = EngineRepairs(self._acts)
        self._make_backend = cache(make_direct)  # a backend keeps its process groups from one version to the next
        self._left: list[OpenIntent[SyncReport]] = []
        self._why_left = RESTARTED
        self.defects = 0  # internal errors since the start
        self._news = asyncio.Event()
        hub.listen(self._on_news)

    # --- called by trainers

    def publish(self, publication: Publication) -> str:
        """Accept one rank's publication; return the sync's id. A repeated publication returns the same id. Raises
        ProblemFaults if the publication has faults, and Permanent if the version is being synced or was committed with
        other content. Raises Retryable if the rank's peer has not attached to this daemon yet."""
        version = publication.version
        backend = self._backend(publication)
        committed = self.book.fleet.committed
        for run in filter(None, (self._next, self._running)):
            if run.sync_record.report.version == version and not run.sync_record.report.over:
                if fingerprint(publication) in run.fingerprints:
                    return run.sync_record.id
                raise Permanent(
                    f"weight sync {run.sync_record.id} already syncs version {version} with other content; publish"
                    " under another number"
                )
        if committed is not None and committed.version == version:
            if fingerprint(publication) in committed.fingerprints:
                return committed.sync
            raise Permanent(f"version {version} is already committed with other content; publish under another number")
        collection, record = self._collecting or (PublicationSet(), None)
        if not collection.takes(publication):
            collection, record = PublicationSet(), None
        if faults := self._faults(collection, publication, backend):
            raise ProblemFaults(faults)
        if backend is None and publication.peer not in self._hub.peers:  # the daemon may have just restarted
            raise Retryable(f"{NOT_ATTACHED}, got {publication.peer!r}", REATTACH_S)
        if record is None:
            record = self._begin(collection, publication)
        collection.add(publication)
        record.put(published=tuple(sorted(collection.by_rank)))
        if len(collection.by_rank) == publication.world:
            self._collecting = None
            self._complete(collection, record, backend)
        return record.id

    def _backend(self, publication: Publication) -> DirectBackend | None:
        """Return the direct backend of a publication. Return None for the tree backend, and for an unknown backend
        name, which `_faults` reports. Raises ProblemFaults if the backend cannot be created."""
        if publication.backend == TREE or publication.backend not in BACKENDS:
            return None
        try:
            return self._make_backend(publication.backend)
        except Permanent as error:
            raise ProblemFaults([f"backend: {error}"]) from error

    def _faults(self, collection: PublicationSet, publication: Publication, backend: DirectBackend | None) -> list[str]:
        faults = collection.faults(publication)
        if publication.backend not in BACKENDS:
            faults.append(f"backend: must be one of {', '.join(BACKENDS.names())}, got {publication.backend!r}")
        if backend is not None:
            faults += backend.faults(publication)
        before = collection.by_rank.get(publication.rank)
        if before is not None and fingerprint(before) != fingerprint(publication):
            faults.append(f"rank: {publication.rank} has published version {publication.version} with other content")
        return faults

    def _begin(self, collection: PublicationSet, publication: Publication) -> SyncRecord:
        id = f"s{self.book.log.generation}-{next(self._numbers)}"
        record = self.book.began(
            SyncReport(
                id,
                publication.version,
                SyncState.PUBLISHING,
                self._clock.now_s(),
                backend=publication.backend,
                world=publication.world,
            )
        )
        if self._collecting is not None:
            why = f"version {self._collecting[1].report.version} was incomplete when {publication.version} arrived"
            self._drop(self._collecting[1], SyncState.SUPERSEDED, "superseded", why)
        record.begins(SyncPhase.PUBLISH)
        self._collecting = (collection, record)
        return record

    def _complete(self, collection: PublicationSet, record: SyncRecord, backend: DirectBackend | None) -> None:
        publications = [each for _, each in sorted(collection.by_rank.items())]
        record.ends(SyncPhase.PUBLISH)
        slowest = max(publications, key=lambda each: each.offload_s + each.gather_s)
        if slowest.began_s:
            elapsed_s = slowest.offload_s + slowest.gather_s
            # The offset of its host's clock is known only roughly: staging ended before the publication arrived.
            began_s = min(self._hub.ours_s(slowest.peer, slowest.began_s), self._clock.now_s() - elapsed_s)
            before = (
                PhaseTime(SyncPhase.OFFLOAD, began_s, began_s + slowest.offload_s),
                PhaseTime(SyncPhase.GATHER, began_s + slowest.offload_s, began_s + elapsed_s),
            )
            record.put(phases=(*before, *record.report.phases))
        why = f"version {record.report.version} was published"
        if self._next is not None:
            self._drop(self._next.sync_record, SyncState.SUPERSEDED, "superseded", why)
        self._next = SyncRun(self._acts, record, publications, backend)
        record.state(SyncState.PLANNING)
        if self._running is not None and self._running.sync_record.report.state in MAY_BE_REPLACED:
            self._running.call_off(SyncState.SUPERSEDED, "superseded", why)
        self._news.set()

    def _expire_ranks(self) -> None:
        """Abort a partly published version if the remaining ranks have not published it within the time limit."""
        within_s = self._settings.publish_within_s
        if self._collecting is None or self._clock.now_s() < self._collecting[1].report.began_s + within_s:
            return
        collection, record = self._collecting
        missing = [str(rank) for rank in range(record.report.world) if rank not in collection.by_rank]
        why = f"ranks {few(missing, 32, ', ')} did not publish within {within_s:g} s"
        self._drop(record, SyncState.ABORTED, "trainer_lost", why)

    def _drop(self, record: SyncRecord, state: SyncState, code: str, why: str) -> None:
        """End a sync that has not started to run. `state`, `code` and `why` are recorded in its report."""
        if self._next is not None and self._next.sync_record is record:
            self._next = None
        if self._collecting is not None and self._collecting[1] is record:
            self._collecting = None
        record.over(state, code, why)
        self.book.ended(record)

    async def relayed(
        self, sync_id: str, rank: int, number: int, call: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Relay a trainer rank's call to the direct backend; return the response. `number` is the number of the
        trainer's step. Raises Permanent if the sync currently accepts no calls from the trainer. Also raises the
        backend's own errors."""
        run = self._running
        if run is None or run.sync_record.id != sync_id or run.direct is None:
            raise Permanent(f"weight sync {sync_id} does not currently accept calls from a trainer")
        return await run.direct.relayed(rank, number, call, body)

    # --- called by operators and trainers

    def status(self) -> WeightsStatus:
        fleet = self.book.fleet
        latest = self.history(1)
        return WeightsStatus(
            fleet.version,
            latest[0] if latest else None,
            tuple(EngineStatus(e, EngineSync.QUARANTINED, why) for e, why in sorted(fleet.quarantined.items())),
            tuple(_peer_status(state.peer, state.attached) for _, state in sorted(self._hub.peers.items())),
        )

    def report(self, sync_id: str = "", version: int | None = None) -> SyncReport:
        """Return the newest report with this id and version; an omitted argument matches every report. If both are
        omitted, return the report of the running sync or, if no sync is running, of the latest sync. Raises Permanent
        if no report matches."""
        for report in self.history(0):
            if (not sync_id or report.id == sync_id) and (version is None or report.version == version):
                return report
        what = f" {sync_id}" if sync_id else f" of version {version}" if version is not None else ""
        raise Permanent(f"there is no weight sync{what}")

    def history(self, limit: int) -> list[SyncReport]:
        """Return at most `limit` reports. The report of the running sync comes first, then the reports of other syncs,
        newest first. A limit of 0 returns all stored reports."""
        running = [self._running.sync_record.report] if self._running is not None else []
        waiting = [record.report for record in reversed(self.book.open.values())]
        reports = {report.id: report for report in (*running, *waiting, *reversed(self.book.over))}
        return list(reports.values())[: limit or None]

    async def follow(self, sync_id: str) -> AsyncIterator[SyncReport]:
        """Yield the report of a sync now and after each change, until the sync is over. Raises Permanent if the id is
        unknown."""
        record = self.book.open.get(sync_id)
        if record is None:
            yield self.report(sync_id)
            return
        async for report in record.follow():
            yield report

    def abort(self, sync_id: str, reason: str) -> SyncReport:
        """Abort the sync with this id; return its report. If the id is empty, abort the running sync or, if no sync is
        running, the latest one. The method may return before the sync has ended. Raises Permanent if there is no such
        sync, or if it is over, committed or left open by an earlier daemon."""
        report = self.report(sync_id)
        outcome = (SyncState.ABORTED, "operator", reason or "aborted by an operator")
        record = self.book.open.get(report.id)
        if record is None:
            raise Permanent(f"cannot abort weight sync {report.id}: it has already ended with state {report.state}")
        if self._running is not None and self._running.sync_record is record:
            self._running.call_off(*outcome)
        elif record in self._not_begun():
            self._drop(record, *outcome)
        else:
            raise Permanent(
                f"cannot abort weight sync {report.id}: an earlier daemon left it open, and it is now being finished"
            )
        return record.report

    def _not_begun(self) -> list[SyncRecord]:
        waiting = [] if self._next is None else [self._next.sync_record]
        return waiting if self._collecting is None else [*waiting, self._collecting[1]]

    def install_now(self, sync_id: str, reason: str) -> SyncReport:
        """Install the prepared version without waiting for the next pause; return the sync's report. An empty `sync_id`
        refers to the running sync. Raises Permanent if the sync is not running or its version is not prepared."""
        run = self._running
        if run is None or (sync_id and run.sync_record.id != sync_id):
            raise Permanent(
                "no version is waiting to be installed, because"
                f" {f'weight sync {sync_id} is not' if sync_id else 'no weight sync is'} running"
            )
        run.install_now()
        run.sync_record.note(f"installed by order of an operator: {reason or 'no reason given'}")
        return run.sync_record.report

    # --- called by the pause barrier and the balancer

    async def before_resume(self, until_s: float, told: int | None = None) -> tuple[int | None, tuple[EngineId, ...]]:
        """Return the version that the holder of the pause barrier must report when it opens the barrier, and the
        engines without that version. The holder is not a weight sync. A version that waits for a pause is installed
        first if this is possible by `until_s`. `told` is the version that the holder reports for the engines. If `told`
        is a version that this controller syncs, raises Permanent if the version could not be installed, and Retryable
        if the sync is still running."""
        fence, run = self._acts.fence, self._running
        lease = fence.state.lease
        if lease is None or lease.holder.startswith(HOLDER):
            return told, ()
        if run is not None and run.takes_closed_barrier and told in (None, run.sync_record.report.version):
            version, without = await run.borrow(until_s, lease.frozen is FrozenRequests.TAKEN_BACK)
            if told not in (None, version):
                why = run.sync_record.report.notes[-1:] or ("it was aborted",)
                raise Permanent(
                    f"cannot install version {told}: {why[0]}; to continue with the previous weights, resume"
                    " without a version"
                )
            return version, without
        self._acts.notice_others()
        committed, newest = self.book.fleet.committed, fence.state.newest
        if committed is not None:
            # If the barrier has received another version since the commit, that version is valid.
            is_news = newest is None or (newest != committed.version and committed.sync in self.book.open)
            if told == committed.version or (told is None and is_news):
                await self._acts.refresh(committed.has)
                return committed.version, self._without(committed)
        if told is not None:
            self._not_on_its_way(told)
        return told, ()

    def restarted(self) -> list[EngineId]:
        """Return the engines that have restarted and whose version has been unknown since then."""
        return [engine for engine in sorted(self._acts.engines()) if engine in self._acts.stale]

    def _without(self, committed: CommittedVersion) -> tuple[EngineId, ...]:
        has = set(committed.has).difference(self._acts.lacking(committed.version, committed.has))
        return tuple(sorted(engine for engine in self._acts.engines() if engine not in has))

    def _not_on_its_way(self, version: int) -> None:
        for record in self.book.open.values():
            if record.report.version == version:
                raise Retryable(
                    f"engines do not have version {version} yet, because weight sync {record.id} is still"
                    f" {record.report.state}; try again later, or resume without a version",
                    ON_ITS_WAY_S,
                )

    @property
    def left_for_moves(self) -> LeftForMoves:
        """Return the share of NIC bandwidth that the running sync leaves for KV transfers between engine hosts."""
        carrying = self._carrying
        if carrying is None:
            return LeftForMoves()
        peers = [id for id, state in self._hub.peers.items() if state.peer.engines]
        running = ((edge.src, edge.dst, edge.rate_gbps) for edge in carrying.progress.live)
        return left_for_moves(running, carrying.network.stations, peers)

    # --- run

    def recover(self) -> None:
        """Recover the state of the fleet's weights and the syncs that the previous daemon left open."""
        self._left = self.book.recover()
        committed, state = self.book.fleet.committed, self._acts.fence.state
        if committed is not None and state.newest is not None:
            for engine in committed.has:
                if engine not in state.versions:  # the previous daemon may have detected a restart
                    self._acts.stale.restarted(engine)

    async def run(self) -> None:
        """Run syncs and repairs until cancelled. If an internal error interrupts a sync, the sync is recovered like a
        sync that a previous daemon left open."""
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
                logger.exception("assigning engines to peers failed")
            await self._clock.sleep(self._settings.patience_s / 10)

    async def _until_cancelled(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:
                self.defects += 1
                logger.exception("running weight syncs failed")
                await self._clock.sleep(self._settings.patience_s / 10)
                if not self._left:
                    self._why_left, self._left = A_DEFECT, self._half_done()

    def _half_done(self) -> list[OpenIntent[SyncReport]]:
        """Return the open syncs that have started but that no task runs. Return an empty list if the journal cannot be
        read."""
        ids = self.book.open.keys() - {record.id for record in self._not_begun()}
        try:
            return [left for left in self.book.left_open() if left.id in ids]
        except OrchestrRLError as error:  # the pause barrier stays closed until the journal can be read
            logger.error("%s", error)
            return []

    async def _work(self) -> None:
        code, why = self._why_left
        while self._left:  # finish a committed sync, undo any other
            left = self._left[0]
            record = self.book.open[left.id]
            record.note("the daemon was restarted" if code == "restarted" else "an internal error ended the sync")
            await SyncRun(self._acts, record, left=(SyncState.ABORTED, code, why)).resume(left.steps)
            del self._left[0]
        while True:
            self._news.clear()
            self._expire_ranks()
            if self._next is not None:
                self._running, self._next = self._next, None
                try:
                    await self._running.run()
                finally:
                    self._running = None
            elif not await self._repair():
                self._news.clear()
                await until_set(self._clock, self._news, TICK_S)

    # --- inside

    async def _repair(self) -> bool:
        """Repair the first engine that is due for repair; return whether there was one. Return False while an operator
        pauses syncs. A repair is cancelled if a new version is ready to be synced."""
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
            while not task.done() and self._next is None:  # a new version takes precedence over a repair
                self._news.clear()
                await until_set(self._clock, self._news, TICK_S, task)
        finally:
            await stop(task)
        if not task.cancelled() and task.exception() is not None:
            await task
        return True

    @property
    def _carrying(self) -> Carrying | None:
        """Return the transfer of the running sync, or None if no transfer is running."""
        return None if self._running is None else self._running.tree.carrying

    def _on_news(self, peer: PeerId, news: Heard) -> None:
        for each in (self._carrying, self._repairs.carrying):
            if each is not None:
                each.on_news(peer, news)
        if isinstance(news, Peer):
            try:
                self._repairs.on_peer(news)
            except OrchestrRLError as error:
                logger.error("the versions of peer %s's engines could not be recorded: %s", peer, error)
        if news is None or isinstance(news, Peer):
            self._news.set()


def _peer_status(peer: Peer, is_attached: bool) -> PeerStatus:
    return PeerStatus(
        peer.id,
        peer.role,
        peer.host,
        is_attached,
        tuple(each.engine for each in peer.engines),
        tuple(held.version for held in peer.held if held.complete),
        peer.place.pod,
        peer.place.tor,
        peer.ranks_of,
    )
