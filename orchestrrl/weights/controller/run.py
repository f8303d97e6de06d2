"""One version's way: planned, carried, fenced, installed, verified, committed. Before that last step everything can be
undone and begun again; after it nothing is.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, few
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.weights.backends.base import DirectBackend
from orchestrrl.weights.controller.actions import SyncActions, results_by_engine
from orchestrrl.weights.controller.barrier_release import go_back, is_closed, own_lease, resume_new
from orchestrrl.weights.controller.carrying import Carrying, SyncFailed, each_done
from orchestrrl.weights.controller.direct import DirectTransfer
from orchestrrl.weights.controller.foreign_versions import notice_others
from orchestrrl.weights.controller.installing import BorrowedPause, Installing
from orchestrrl.weights.controller.participants import LOOK_S, SyncAttempt, SyncParticipants
from orchestrrl.weights.controller.preparing import Preparation
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.controller.state import HOLDER, CommittedVersion, SyncRecord
from orchestrrl.weights.model import (
    VersionMap,
)
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId

logger = logging.getLogger(__name__)

MAY_BE_REPLACED = frozenset({SyncState.PLANNING, SyncState.CARRYING, SyncState.PREPARED})


class SyncRun:
    """A publication that is complete. `run` ends when it is over; errors of the world end in its report."""

    def __init__(
        self,
        acts: SyncActions,
        record: SyncRecord,
        publications: Sequence[Publication],
        fingerprints: tuple[str, ...],
        backend: DirectBackend | None = None,
    ) -> None:
        self.record = record
        self.publications = publications
        self.fingerprints = fingerprints
        self.carrying: Carrying | None = None
        self.preparation = Preparation(acts, record, publications)
        self.direct = None if backend is None else DirectTransfer(acts, record, publications, backend)  # None: the tree
        self._acts = acts
        self._going: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None  # the pause barrier's lease
        self._stop: tuple[SyncState, str, str] | None = None
        self._go = asyncio.Event()  # install it, whoever waits for what
        self._at_once = publications[0].install == "at_once"
        self._borrowed: BorrowedPause | None = None
        self._waits_for_barrier = False
        self._committed = False
        self._participants = SyncParticipants(acts, record, is_direct=backend is not None)
        self._installing = Installing(acts, record, publications, self.direct)

    # --- told from outside

    def call_off(self, state: SyncState, code: str, why: str) -> None:
        """Raises Permanent where it is too late."""
        if self._committed or self.record.report.over:
            raise Permanent(f"weight sync {self.record.id} is {self.record.report.state}: it cannot be called off")
        if self._stop is None:
            self._stop = (state, code, why)
            if self._going is not None:
                self._going.cancel()

    def install_now(self) -> None:
        """Raises Permanent where nothing is prepared."""
        if self.record.report.state is not SyncState.PREPARED:
            raise Permanent(
                f"weight sync {self.record.id} is {self.record.report.state}: nothing waits to be installed"
            )
        self._go.set()

    @property
    def waits_for_barrier(self) -> bool:
        """All bytes are there, and a closed barrier would do."""
        return self._waits_for_barrier and self._borrowed is None and self._stop is None

    async def borrow(self, until_s: float, may_probe: bool) -> tuple[int | None, tuple[EngineId, ...]]:
        """Install while somebody else has the pause barrier closed: the version to open it with, and engines without
        it. Whoever asks again, as the answer was lost, waits for the same."""
        if self._borrowed is None:
            self._borrowed = BorrowedPause(until_s, may_probe, asyncio.get_running_loop().create_future())
            self._go.set()
        return await asyncio.shield(self._borrowed.outcome)

    @property
    def borrows(self) -> bool:
        """Somebody else's closed barrier is used to install it."""
        return self._borrowed is not None

    def let_go(self) -> None:
        """It is over, whatever came of it: nobody waits for it any longer."""
        self._give_back()

    # --- run

    async def run(self) -> None:
        acts, record = self._acts, self.record
        without: dict[EngineId, str] = {}
        while True:
            attempt = SyncAttempt(dict(without), frozenset(without))
            failure = await self._forward(attempt)
            if failure is None:
                break
            record.note(f"attempt {record.report.attempt}: {failure.code}: {failure.detail}")
            if self.direct is not None:
                self.direct.broken()
            await self._back(attempt)
            self._give_back()
            await self.preparation.torn_down()
            if not {*acts.engines()} <= {*without, *failure.without}:  # where none is left, all are tried again
                without |= failure.without
            if self._stop is not None:
                await self._over(*self._stop)
                return
            by_order = acts.all_gone(failure.without)  # that engines leave the fleet is no failure of it
            if not failure.again or (record.report.attempt >= acts.settings.attempts and not by_order):
                await self._over(SyncState.ABORTED, failure.code, failure.detail)
                return
            logger.warning("weight sync %s begins again: %s", record.id, failure)
            if not by_order:
                record.put(attempt=record.report.attempt + 1)
        await self._finish()

    async def _finish(self) -> None:
        try:
            await self._after_commit()
        except (SyncFailed, OrchestrRLError) as error:  # it is the fleet's version all the same
            self.record.note(str(error))
            logger.error("weight sync %s: %s", self.record.id, error)
        quarantined = self._acts.book.fleet.quarantined
        code, detail = "done", ""
        if quarantined:
            code = "some_quarantined"
            detail = results_by_engine(quarantined)
        await self._over(SyncState.DONE, code, detail)

    async def _after_commit(self) -> None:
        if self._borrowed is not None:
            await resume_new(self._acts, self.record)  # tells who has what; the pause barrier is opened by its holder
            self._give_back()
            await self._acts.keep()
            return
        await each_done([self._acts.keep(), resume_new(self._acts, self.record)])

    async def _over(self, state: SyncState, code: str, detail: str) -> None:
        await self.preparation.torn_down()
        if state is not SyncState.DONE:  # before a trainer hears of it, and stages anew
            await self._acts.discard(self.record.report.version)
        self.record.over(state, code, detail)
        try:
            self._acts.book.ended(self.record.report)
        except OrchestrRLError as error:
            logger.error("the end of weight sync %s cannot be written down: %s", self.record.id, error)

    async def _forward(self, attempt: SyncAttempt) -> SyncFailed | None:
        self._going = asyncio.ensure_future(self._to_commit(attempt))
        if self._stop is not None:
            self._going.cancel()
        try:
            await self._going
        except asyncio.CancelledError:
            if self._stop is None:  # the daemon ends: the next one takes it up
                self._going.cancel()
                await asyncio.gather(self._going, return_exceptions=True)
                raise
            return SyncFailed(self._stop[1], self._stop[2], again=False)
        except SyncFailed as failure:
            return failure
        except ProblemFaults as error:
            return SyncFailed("unreachable", few(error.faults), again=False)
        except OrchestrRLError as error:
            return SyncFailed("internal", str(error))
        except Exception as error:  # a defect must not leave the fleet between two versions
            logger.exception("weight sync %s", self.record.id)
            return SyncFailed("internal", f"a defect: {error!r}", again=False)
        finally:
            self._waits_for_barrier = False
            if self._renewing is not None:
                self._renewing.cancel()
        return None

    async def _back(self, attempt: SyncAttempt) -> None:
        while True:
            try:
                return await go_back(self._acts, self.record, attempt.changed, attempt.untouched, attempt.reported)
            except (OrchestrRLError, SyncFailed) as error:
                # Nothing else may be done to engines before this is; the pause barrier's lease keeps requests from
                # them.
                logger.error("weight sync %s cannot be undone: %s", self.record.id, error)
                await self._acts.clock.sleep(self._acts.settings.patience_s / 10)

    async def _to_commit(self, attempt: SyncAttempt) -> None:
        record, acts = self.record, self._acts
        await self._not_held()
        await self._participants.engines_there(attempt)
        await self._participants.served()
        targets = self._participants.targets(attempt)
        receivers = self._participants.receivers(targets)
        map = await self._prepared(targets, receivers)
        acts.book.step(record.id, "prepared")
        for engine in targets:
            record.engine(engine, EngineSync.PREPARED)
        lease = await self._close_barrier()
        notice_others(acts)
        targets = self._participants.still_there(attempt, targets, receivers)
        has, prompt, answers = await self._installing.install(attempt, targets, lease, self._borrowed)
        self._commit(lease, has, map, prompt, answers)

    # --- its steps

    async def _prepared(self, targets: Mapping[EngineId, PeerId], receivers: Collection[PeerId]) -> VersionMap:
        """All that can be done before the fence."""
        record, acts = self.record, self._acts
        if self.direct is not None:
            return await self.direct.prepare(list(targets))
        planned, map = await self.preparation.plan(receivers)
        record.state(SyncState.CARRYING)
        assert self.preparation.network is not None
        self.carrying = Carrying(acts.context, record, planned, map, self.preparation.network)
        try:
            await self.carrying.run()
        finally:
            self.carrying = None
            self.preparation.tear_down()
        return map

    async def _not_held(self) -> None:
        """An operator may have paused syncs."""
        told = ""
        while (hold := self._acts.pause_registry.hold(PauseScope.SYNC)) is not None:
            if hold.detail != told:
                told = hold.detail
                self.record.put(detail=f"waits: {told}")
            await self._acts.clock.sleep(LOOK_S)
        if told:
            self.record.put(detail="")

    async def _close_barrier(self) -> str:
        """The lease; empty: somebody else's, or there is no gateway and peers keep engines still."""
        record = self.record
        record.state(SyncState.PREPARED)
        self._waits_for_barrier = True
        if not self._at_once:
            with record.phase(SyncPhase.NEXT_PAUSE):
                await self._go.wait()
        await self._not_held()
        record.begins(SyncPhase.FENCE)
        try:
            return await self._fenced()
        finally:
            record.ends(SyncPhase.FENCE)

    async def _fenced(self) -> str:
        record, acts, settings = self.record, self._acts, self._acts.settings
        until_s = acts.clock.now_s() + settings.fence_within_s
        while self._borrowed is None:
            if is_closed(acts):  # before it opens we are asked
                record.put(detail=f"waits: {acts.fence.state.lease} has the pause barrier closed")
                if acts.clock.now_s() >= until_s:
                    raise SyncFailed("not_quiet", f"the pause barrier is held by another: {acts.fence.state.lease}")
            elif acts.deploying():  # which does not begin while the pause barrier is closed, and has limits of its own
                record.put(detail="waits: engines are being started or stopped")
                until_s = acts.clock.now_s() + settings.fence_within_s
            elif not acts.settled() and acts.clock.now_s() < until_s:
                record.put(detail="waits: peers are being told of engines that have come")
            else:
                break
            await acts.clock.sleep(LOOK_S)
        self._waits_for_barrier = False
        record.state(SyncState.FENCING)
        acts.book.step(record.id, "fence")
        if self._borrowed is not None or not acts.fence.is_manned():
            return ""
        try:
            lease = await acts.fence.pause(
                HOLDER + record.id,
                empty=bool(self._installing.prompt[0]),
                lease_s=settings.lease_s,
                deadline_s=settings.fence_within_s,
            )
        except OrchestrRLError as error:
            raise SyncFailed("not_quiet", str(error)) from error
        self._renewing = asyncio.ensure_future(self._renew(lease))
        return lease

    async def _renew(self, lease: str) -> None:
        lease_s = self._acts.settings.lease_s
        while True:
            await self._acts.clock.sleep(lease_s / 3)
            try:
                await self._acts.fence.renew(lease, lease_s)
            except Permanent as error:
                logger.error("weight sync %s: %s", self.record.id, error)
                return  # it is seen before the commit
            except OrchestrRLError as error:
                logger.warning("weight sync %s: %s", self.record.id, error)

    def _commit(
        self,
        lease: str,
        has: Sequence[EngineId],
        map: VersionMap,
        prompt: tuple[int, ...],
        answers: Mapping[str, tuple[int, ...]],
    ) -> None:
        record, acts = self.record, self._acts
        if lease and own_lease(acts, record.id) != lease:
            raise SyncFailed("not_quiet", "the pause barrier has opened by itself while engines were being changed")
        if not lease and self._borrowed is not None and not is_closed(acts):
            raise SyncFailed("not_quiet", "the pause barrier was opened while engines were being changed")
        if not lease and self._borrowed is None and acts.fence.is_manned():
            raise SyncFailed("not_quiet", "a gateway has come while peers kept engines still")
        has = [engine for engine in has if not acts.gone(engine)]
        if not has:
            raise SyncFailed("no_engines", "no engine is left that could have it", again=False)
        if lost := acts.lacking(record.report.version, has):
            raise SyncFailed(
                "verify_failed", f"{few(lost, between=', ')}: restarted since the version was installed", lost
            )
        stands = {each.engine: each for each in record.report.engines}
        quarantined = {
            engine: stands[engine].detail if engine in stands else "came while the version was on its way"
            for engine in acts.engines()
            if engine not in has
        }
        with record.phase(SyncPhase.COMMIT):
            acts.book.commit(
                CommittedVersion(
                    record.report.version,
                    record.id,
                    tuple(has),
                    quarantined,
                    prompt,
                    answers,
                    self.fingerprints,
                    acts.clock.now_s(),
                    record.report.backend,
                    acts.fence.state.newest,
                ),
                map,
            )
        self._committed = True
        record.state(SyncState.COMMITTED)

    def _give_back(self) -> None:
        """Whoever waits for the pause barrier's opening may go on."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is None:
            return
        self._go.clear()  # an operator's word stays
        if borrowed.outcome.done():
            return
        fleet, known = self._acts.book.fleet, self._acts.engines()
        if self._committed and fleet.committed is not None:
            has = fleet.committed.has
            borrowed.outcome.set_result((fleet.version, tuple(sorted(e for e in known if e not in has))))
        else:
            borrowed.outcome.set_result((None, tuple(sorted(e for e in fleet.quarantined if e in known))))
