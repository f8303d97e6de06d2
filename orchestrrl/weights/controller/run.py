"""Describe the sync of one weight version as an operation: its steps, and how they are undone.

Before the commit, all steps can be undone and started again; after the commit, no step is undone. core/operation.py
runs the steps, journals them and resumes them after a restart.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any

from orchestrrl.core.config.weights import InstallWhen
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, few
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.operation import (
    Description,
    OperationFailure,
    OperationRun,
    OperationState,
    Stage,
    StepDirection,
    StepEntry,
    StepState,
)
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.weights.backends.base import DirectBackend
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed, results_by_engine
from orchestrrl.weights.controller.carrying import TreeTransfer
from orchestrrl.weights.controller.direct import DirectTransfer
from orchestrrl.weights.controller.installing import BorrowedPause, Installing
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.controller.state import CommittedVersion, SyncAttempt, SyncRecord, sync_body
from orchestrrl.weights.publication import Publication, fingerprint
from planner.model import EngineId

logger = logging.getLogger(__name__)

MAY_BE_REPLACED = frozenset({SyncState.PLANNING, SyncState.CARRYING, SyncState.PREPARED})


class SyncStep(Enum):
    """A step of a sync. Forward and backward steps are numbered separately. Steps have no time limit, because each
    order to a peer has a separate limit and the wait for the next pause is unlimited."""

    CHOOSE = 1, "choose"  # select the engines that receive the version
    PREPARE = 2, "prepare"  # carry all bytes to their peers, or the work of a direct backend before the fence
    FENCE = 3, "fence"  # close the pause barrier, or wait until another holder has closed it
    INSTALL = 4, "install"  # and verify
    COMMIT = 5, "commit"  # the point of no return
    RESUME = 6, "resume"
    TEAR_DOWN = 7, "tear down"  # release circuits
    KEEP = 8, "keep"  # peers discard older versions
    RESTORE = 1, "restore"  # backwards: engines get the previous version

    def __init__(self, number: int, word: str) -> None:
        self.number = number
        self.word = word

    @property
    def within_s(self) -> None:
        return None

    def __str__(self) -> str:
        return self.word


_STAGES: tuple[Stage[SyncStep], ...] = (
    ((SyncStep.CHOOSE, SyncStep.PREPARE),),
    ((SyncStep.FENCE, SyncStep.INSTALL, SyncStep.COMMIT, SyncStep.RESUME), (SyncStep.TEAR_DOWN,)),
    ((SyncStep.KEEP,),),
)
_TO_COMMIT = frozenset(range(1, 6))


class SyncRun(Description[SyncStep]):
    """The sync of one version that all ranks have published. `backend` is the direct backend, or None for the tree
    backend. For a sync that an earlier daemon left open, `publications` is empty, and `left` has the state, code and
    detail with which the sync ends if it is not committed. Expected errors are recorded in the report."""

    def __init__(
        self,
        acts: SyncActions,
        record: SyncRecord,
        publications: Sequence[Publication] = (),
        backend: DirectBackend | None = None,
        left: tuple[SyncState, str, str] | None = None,
    ) -> None:
        self.sync_record = record
        self.fingerprints = tuple(sorted(map(fingerprint, publications)))  # one per rank
        self._at_once = any((each.install or acts.settings.install) == InstallWhen.AT_ONCE for each in publications)
        self.tree = TreeTransfer(acts, record, publications, still=self._at_once, is_up=left is not None)
        self.direct = None if backend is None else DirectTransfer(acts, record, publications, backend)  # None: the tree
        self._acts = acts
        self._is_left = left is not None
        self._stop = left  # state, code and detail in which it ends if it is not committed
        self._may_install = asyncio.Event()  # the sync need not wait for the next pause
        self._borrowed: BorrowedPause | None = None
        self._waits_for_barrier = False
        self._committed = False
        self._is_restored = False
        self._defect: Exception | None = None  # an internal error that leaves the fleet to be recovered
        self._attempt = SyncAttempt()
        self._installing = Installing(acts, record, publications, self.direct)
        self._operation = OperationRun(self, acts.book.log, acts.clock, lambda: None)

    @property
    def id(self) -> str:
        return self.sync_record.id

    def __str__(self) -> str:
        return f"weight sync {self.id}"

    # --- called from outside

    def call_off(self, state: SyncState, code: str, why: str) -> None:
        """Abort the sync with this state, code and reason. Raises Permanent if the sync is committed or over."""
        if self._committed or self.sync_record.report.over:
            raise Permanent(f"cannot abort weight sync {self.id}, because its state is {self.sync_record.report.state}")
        if self._stop is None:
            self._stop = (state, code, why)
            with contextlib.suppress(Permanent):  # it is being undone already, and will not start another attempt
                self._operation.call_off(why)

    def install_now(self) -> None:
        """Install the version without waiting for the next pause. Raises Permanent if the version is not prepared."""
        if self.sync_record.report.state is not SyncState.PREPARED:
            raise Permanent(
                f"cannot install weight sync {self.id}: its state must be {SyncState.PREPARED},"
                f" got {self.sync_record.report.state}"
            )
        self._may_install.set()

    @property
    def takes_closed_barrier(self) -> bool:
        """Return whether the sync uses a pause barrier that another holder has closed, or could use such a barrier
        now."""
        return self._borrowed is not None or (self._waits_for_barrier and self._stop is None)

    async def borrow(self, until_s: float, may_probe: bool) -> tuple[int | None, tuple[EngineId, ...]]:
        """Install the version while another holder keeps the pause barrier closed, at the latest until `until_s`.
        `may_probe` is set if engines may be probed. Return the version with which the holder must open the barrier, and
        the engines without that version. Repeated calls return the same result."""
        if self._borrowed is None:
            self._borrowed = BorrowedPause(until_s, may_probe, asyncio.get_running_loop().create_future())
            self._may_install.set()
        return await asyncio.shield(self._borrowed.outcome)

    async def run(self) -> None:
        """Run the sync to its end. The caller has already recorded the sync's intent in the journal. Raises only
        internal errors."""
        await self._operation.carry_out()
        await self._over()

    async def resume(self, entries: Sequence[JournalEntry]) -> None:
        """Finish the sync after a restart of the daemon. `entries` are the journal entries of the sync's steps."""
        committed = self._acts.book.fleet.committed
        self._committed = committed is not None and committed.sync == self.id
        for entry in entries:
            self._attempt.changed.update(map(EngineId, entry.body["engines"]))
        await self._operation.resume(entries)
        await self._over()

    # --- Description, called by core/operation.py

    def forward(self) -> tuple[Stage[SyncStep], ...]:
        return _STAGES

    def intent(self) -> Mapping[str, Any]:
        return sync_body(self.sync_record.report)

    def record(self, step: SyncStep) -> Mapping[str, Any]:
        engines = sorted(self._attempt.targets) if step is SyncStep.INSTALL else []
        return {"step": step.word, "engines": engines}

    async def do(self, step: SyncStep) -> str:
        act: Mapping[SyncStep, Callable[[], Awaitable[None]]] = {
            SyncStep.CHOOSE: self._choose,
            SyncStep.PREPARE: self._prepare,
            SyncStep.FENCE: self._close_barrier,
            SyncStep.INSTALL: lambda: self._installing.install(self._attempt, self._borrowed),
            SyncStep.COMMIT: self._commit,
            SyncStep.RESUME: self._resume,
            SyncStep.TEAR_DOWN: self.tree.tear_down,
            SyncStep.KEEP: self._acts.keep,
            SyncStep.RESTORE: self._restore,
        }
        await act[step]()
        return ""

    async def undo(self, step: SyncStep) -> str:
        return await self.do(step)

    async def observe(self) -> None:
        """Wait for the peers of changed engines after a restart of the daemon. The step that restores these engines
        queries their versions."""
        changed = self._attempt.changed
        if self._committed or self._is_restored or not self._is_left:
            return
        if changed or self._acts.own_lease(self.id):
            await self._attached_again(changed)

    def back(self, records: Sequence[StepEntry]) -> tuple[Stage[SyncStep], ...]:
        if self._is_left:
            if self._is_over(records):
                self.sync_record.note("its end was not in the journal")
                self._is_restored = True
                return (((SyncStep.TEAR_DOWN,),),)
        else:
            self.sync_record.note(f"attempt {self.sync_record.report.attempt}: {self._failed}")
        if self.direct is not None:
            self.direct.broken()
        return (((SyncStep.RESTORE,), (SyncStep.TEAR_DOWN,)),)

    def restored(self) -> bool:
        return self._is_restored

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        return _TO_COMMIT if self._committed else None

    def is_final(self, step: SyncStep) -> bool:
        return step is SyncStep.COMMIT

    def is_committed(self) -> bool:
        return self._committed

    def retry(self, failure: OperationFailure[SyncStep]) -> bool:
        """Return whether to start another attempt. If so, set up the attempt without the engines that failed. If no
        engine would remain, the attempt leaves out only the engines that failed in earlier attempts."""
        acts, record, failed, before = self._acts, self.sync_record, self._failed, self._attempt
        without = dict(before.failed)
        if not {*acts.engines()} <= {*without, *failed.without}:
            without |= failed.without
        by_order = bool(failed.without) and all(
            map(acts.gone, failed.without)
        )  # engines that left the fleet do not count as a failure
        is_last = record.report.attempt >= acts.settings.attempts and not by_order
        if self._stop is not None or not failed.again or is_last:
            return False
        if not by_order:
            record.put(attempt=record.report.attempt + 1)
        self._attempt = SyncAttempt(without)
        self._is_restored = False
        return True

    def hold(self, step: SyncStep) -> Coroutine[Any, Any, None] | None:
        lease = self._attempt.lease
        return self._renew(lease) if step is SyncStep.FENCE and lease else None

    # --- steps

    async def _choose(self) -> None:
        await self._not_held()
        await self._installing.choose(self._attempt)

    async def _prepare(self) -> None:
        """Perform the work before the pause barrier is closed: carry the bytes, or prepare the direct backend."""
        record, attempt = self.sync_record, self._attempt
        if self.direct is not None:
            attempt.map = await self.direct.prepare(list(attempt.targets))
        else:
            attempt.map = await self.tree.prepare(attempt.receivers)
        for engine in attempt.targets:
            record.engine(engine, EngineSync.PREPARED)

    async def _not_held(self) -> None:
        """Wait while syncs are paused by an operator."""

        def held() -> str:
            hold = self._acts.pause_registry.hold(PauseScope.SYNC)
            return "" if hold is None else hold.detail

        await self.sync_record.wait_while(held)

    async def _close_barrier(self) -> None:
        record = self.sync_record
        record.state(SyncState.PREPARED)
        self._waits_for_barrier = True
        try:
            if not self._at_once:
                with record.phase(SyncPhase.NEXT_PAUSE):
                    await self._may_install.wait()
            await self._not_held()
            with record.phase(SyncPhase.FENCE):
                await self._until_free()
                self._waits_for_barrier = False
                record.state(SyncState.FENCING)
                self._attempt.lease = await self._lease()
        finally:
            self._waits_for_barrier = False
        self._acts.notice_others()
        self._installing.update(self._attempt)

    async def _until_free(self) -> None:
        """Wait until the sync may close the pause barrier or use the closed barrier of another holder. Raises
        SyncFailed if another holder keeps the barrier closed beyond the time limit."""
        acts, within_s = self._acts, self._acts.settings.fence_within_s
        until_s = acts.clock.now_s() + within_s

        def why_not() -> str:
            nonlocal until_s
            is_late = acts.clock.now_s() >= until_s
            if self._borrowed is not None:
                return ""
            if acts.is_closed:  # before the holder opens it, `borrow` is called
                if is_late:
                    raise SyncFailed(
                        "not_quiet",
                        f"the pause barrier is still closed by lease {acts.fence.state.lease} after {within_s:g} s",
                    )
                return f"lease {acts.fence.state.lease} has the pause barrier closed"
            if acts.deploying():  # a deployment does not start while the barrier is closed, and has its own time limits
                until_s = acts.clock.now_s() + within_s
                return "engines are being started or stopped"
            return "" if is_late or acts.serving.is_settled() else "peers are being assigned new engines"

        await self.sync_record.wait_while(why_not)

    async def _lease(self) -> str:
        """Close the pause barrier; return the id of its lease. Return an empty string if the sync uses another holder's
        barrier, or if there is no gateway and peers pause the engines instead. Raises SyncFailed if the barrier cannot
        be closed."""
        if self._borrowed is not None or not self._acts.fence.is_manned():
            return ""
        try:
            return await self._acts.close_barrier(self.id, empty=bool(self._installing.prompt[0]))
        except OrchestrRLError as error:
            raise SyncFailed("not_quiet", str(error)) from error

    async def _renew(self, lease: str) -> None:
        lease_s = self._acts.settings.lease_s
        while True:
            await self._acts.clock.sleep(lease_s / 3)
            if self._committed:  # the barrier opens next
                return
            try:
                await self._acts.fence.renew(lease, lease_s)
            except Permanent as error:
                logger.error("weight sync %s: %s", self.id, error)
                return  # the commit checks the lease
            except OrchestrRLError as error:
                logger.warning("weight sync %s: %s", self.id, error)

    async def _commit(self) -> None:
        record, acts, attempt = self.sync_record, self._acts, self._attempt
        assert attempt.map is not None
        if self._stop is not None:
            raise SyncFailed(self._stop[1], self._stop[2], again=False)
        self._check_closed()
        has = [engine for engine in attempt.verified if not acts.gone(engine)]
        if not has:
            raise SyncFailed(
                "no_engines", f"no remaining engine can receive version {record.report.version}", again=False
            )
        if lost := acts.lacking(record.report.version, has):
            raise SyncFailed(
                "verify_failed",
                f"engines restarted after version {record.report.version} was installed: {few(lost, between=', ')}",
                lost,
            )
        stands = {each.engine: each for each in record.report.engines}
        quarantined = {
            engine: stands[engine].detail if engine in stands else "joined during the sync"
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
                    attempt.prompt,
                    attempt.answers,
                    self.fingerprints,
                    acts.clock.now_s(),
                    record.report.backend,
                    acts.fence.state.newest,
                ),
                attempt.map,
            )
        self._committed = True
        record.state(SyncState.COMMITTED)

    def _check_closed(self) -> None:
        """Raise SyncFailed if requests may have run while the engines' weights were being changed."""
        acts, lease = self._acts, self._attempt.lease
        why = ""
        if lease and acts.own_lease(self.id) != lease:
            why = "the lease of the pause barrier expired while engines were being changed"
        elif not lease and self._borrowed is not None and not acts.is_closed:
            why = "the pause barrier was opened while engines were being changed"
        elif not lease and self._borrowed is None and acts.fence.is_manned():
            why = "a gateway attached while peers kept engines paused"
        if why:
            raise SyncFailed("not_quiet", why)

    async def _resume(self) -> None:
        """Resume requests with the new version. A borrowed barrier is opened by its holder."""
        if self._is_left:
            committed = self._acts.book.fleet.committed
            assert committed is not None
            await self._attached_again(committed.has)
            await self._until_done(lambda: self._acts.reinstall_restarted(committed.has))
        await self._until_done(self._installing.resume)
        self._give_back()

    async def _restore(self) -> None:
        await self._until_done(lambda: self._installing.go_back(self._attempt))
        self._is_restored = True
        self._give_back()

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` after expected errors until it succeeds, because the next step requires its result. Until then,
        the pause barrier's lease keeps requests away from engines. An internal error is stored and raised at once."""
        self._defect = None
        while True:
            try:
                return await work()
            except OrchestrRLError as error:
                logger.error("weight sync %s is incomplete and is retried: %s", self.id, error)
                await self._acts.clock.sleep(self._acts.settings.patience_s / 10)
            except Exception as error:
                self._defect = error
                raise

    async def _attached_again(self, engines: Collection[EngineId]) -> None:
        """Wait up to `patience_s` for the peers of engines to attach. If the pause barrier is closed, also wait for a
        gateway."""
        hub, fence = self._acts.hub, self._acts.fence

        def attached() -> bool:
            is_manned = fence.is_manned() or fence.state.lease is None
            return is_manned and all(hub.peer_of(engine) is not None for engine in engines)

        await self._acts.wait_until(attached, self._acts.settings.patience_s)

    # --- end of the sync

    @property
    def _failed(self) -> SyncFailed:
        """Return the failure of the most recent attempt, or the reason for which the sync was called off."""
        failure = self._operation.failure
        assert failure is not None
        if self._stop is not None:
            return SyncFailed(self._stop[1], self._stop[2], again=False)
        match failure.error:
            case SyncFailed() as failed:
                return failed
            case ProblemFaults() as error:
                return SyncFailed("unreachable", few(error.faults), again=False)
            case _:
                is_defect = failure.error is None and failure.step is not None
                return SyncFailed("internal", failure.why, again=not is_defect)

    def _is_over(self, records: Sequence[StepEntry]) -> bool:
        """Return whether the sync had ended although the journal does not contain its end. This is the case if a
        version was committed after the sync began and the sync holds no lease, or if the engines were restored."""
        committed = self._acts.book.fleet.committed
        if committed is not None and committed.at_s > self.sync_record.report.began_s:
            return not self._acts.own_lease(self.id)
        restored = StepDirection.BACK, SyncStep.RESTORE.number, StepState.DONE, self._operation.attempt
        return any((each.direction, each.number, each.state, each.attempt) == restored for each in records)

    async def _over(self) -> None:
        self._give_back()
        if self._defect is not None:
            raise self._defect
        record, book = self.sync_record, self._acts.book
        if self._operation.state is OperationState.DONE:
            quarantined = book.fleet.quarantined
            record.note(self._operation.detail)  # a later failure does not change the commit
            record.over(SyncState.DONE, "some_quarantined" if quarantined else "done", results_by_engine(quarantined))
        else:
            if not self._is_left:  # before the trainer receives the outcome and stages again
                await self._acts.keep(but=record.report.version)
            state, code, detail = self._stop or (SyncState.ABORTED, self._failed.code, self._failed.detail)
            record.over(state, code, detail)
        book.ended(record)

    def _give_back(self) -> None:
        """Return a borrowed pause barrier to its holder, together with the version with which the holder must open the
        barrier."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is None:
            return
        self._may_install.clear()  # set by `borrow`; an order of an operator is not cleared without a borrowed barrier
        if borrowed.outcome.done():
            return
        fleet, known = self._acts.book.fleet, self._acts.engines()
        if self._committed and fleet.committed is not None:
            has = fleet.committed.has
            borrowed.outcome.set_result((fleet.version, tuple(sorted(e for e in known if e not in has))))
        else:
            borrowed.outcome.set_result((None, tuple(sorted(e for e in fleet.quarantined if e in known))))
