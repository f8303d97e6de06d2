"""One version's way: planned, carried, fenced, installed, verified, committed. Before that last step everything can be
undone and begun again; after it nothing is.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrrl.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, few
from orchestrrl.execute.weights_carrying import Carrying, Failed, each_done
from orchestrrl.execute.weights_closing import go_back, is_closed, own_lease, resume_new
from orchestrrl.execute.weights_direct import Direct
from orchestrrl.execute.weights_overtaken import notice_others
from orchestrrl.execute.weights_preparing import Preparation
from orchestrrl.execute.weights_state import HOLDER, Committed, SyncRecord
from orchestrrl.execute.weights_steps import Hands, odd_ones
from orchestrrl.holds import Part
from orchestrrl.sync_reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.model import PeerId, VersionMap
from orchestrrl.weights.orders import PeerResult
from orchestrrl.weights.planes.base import DirectPlane
from orchestrrl.weights.publication import Publication
from planner.model import EngineId

logger = logging.getLogger(__name__)

SETTLED_WITHIN_S = 5.0  # for peers to be told which engines there are
LOOK_S = 0.25  # how often it is looked whether what is waited for has come
MAY_BE_REPLACED = frozenset({SyncState.PLANNING, SyncState.CARRYING, SyncState.PREPARED})


@dataclass(slots=True)
class Borrowed:
    """Somebody else's closed gate, to be used until then. `outcome`: what it is to be opened with."""

    until_s: float
    may_probe: bool
    outcome: asyncio.Future[tuple[int | None, tuple[EngineId, ...]]]


@dataclass(slots=True)
class _Attempt:
    """What an attempt has come to."""

    without: Mapping[EngineId, str] = field(default_factory=dict)  # engines that are left out, and why
    failed: Collection[EngineId] = ()  # of these, those that did not do in an attempt before
    changed: set[EngineId] = field(default_factory=set)
    untouched: set[EngineId] = field(default_factory=set)  # of those that were changed: they are as they were after all
    told: dict[EngineId, int] = field(default_factory=dict)  # what the gate had of these before it forgot it for this
    renewing: asyncio.Task[None] | None = None


class SyncRun:
    """A publication that is complete. `run` ends when it is over; errors of the world end in its report."""

    def __init__(
        self,
        hands: Hands,
        record: SyncRecord,
        publications: Sequence[Publication],
        fingerprint: str,
        plane: DirectPlane | None = None,
    ) -> None:
        self.record = record
        self.publications = publications
        self.fingerprint = fingerprint
        self.carrying: Carrying | None = None
        self.preparation = Preparation(hands, record, publications)
        self.direct = None if plane is None else Direct(hands, record, publications, plane)  # None: the tree
        self._hands = hands
        self._going: asyncio.Task[None] | None = None
        self._stop: tuple[SyncState, str, str] | None = None
        self._go = asyncio.Event()  # install it, whoever waits for what
        self._at_once = publications[0].install == "at_once"
        self._borrowed: Borrowed | None = None
        self._waits_for_gate = False
        self._committed = False
        self._given: set[EngineId] = set()  # engines that have taken it, in any attempt

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
    def waits_for_gate(self) -> bool:
        """All bytes are there, and a closed gate would do."""
        return self._waits_for_gate and self._borrowed is None and self._stop is None

    async def borrow(self, until_s: float, may_probe: bool) -> tuple[int | None, tuple[EngineId, ...]]:
        """Install while somebody else has the gate closed: the version to open it with, and engines without it. Whoever
        asks again, as the answer was lost, waits for the same."""
        if self._borrowed is None:
            self._borrowed = Borrowed(until_s, may_probe, asyncio.get_running_loop().create_future())
            self._go.set()
        return await asyncio.shield(self._borrowed.outcome)

    @property
    def borrows(self) -> bool:
        """Somebody else's closed gate is used to install it."""
        return self._borrowed is not None

    def let_go(self) -> None:
        """It is over, whatever came of it: nobody waits for it any longer."""
        self._give_back()

    # --- run

    async def run(self) -> None:
        hands, record = self._hands, self.record
        without: dict[EngineId, str] = {}
        while True:
            attempt = _Attempt(dict(without), frozenset(without))
            failure = await self._forward(attempt)
            if failure is None:
                break
            record.note(f"attempt {record.report.attempt}: {failure.code}: {failure.detail}")
            if self.direct is not None:
                self.direct.broken()
            await self._back(attempt)
            self._give_back()
            await self.preparation.torn_down()
            if not {*hands.engines()} <= {*without, *failure.without}:  # where none is left, all are tried again
                without |= failure.without
            if self._stop is not None:
                await self._over(*self._stop)
                return
            by_order = hands.all_gone(failure.without)  # that engines leave the fleet is no failure of it
            if not failure.again or (record.report.attempt >= hands.settings.attempts and not by_order):
                await self._over(SyncState.ABORTED, failure.code, failure.detail)
                return
            logger.warning("weight sync %s begins again: %s", record.id, failure)
            if not by_order:
                record.put(attempt=record.report.attempt + 1)
        await self._finish()

    async def _finish(self) -> None:
        try:
            await self._after_commit()
        except (Failed, OrchestrRLError) as error:  # it is the fleet's version all the same
            self.record.note(str(error))
            logger.error("weight sync %s: %s", self.record.id, error)
        quarantined = self._hands.book.fleet.quarantined
        code, detail = "done", ""
        if quarantined:
            code = "some_quarantined"
            detail = _told(quarantined)
        await self._over(SyncState.DONE, code, detail)

    async def _after_commit(self) -> None:
        if self._borrowed is not None:
            await resume_new(self._hands, self.record)  # tells who has what; the gate is opened by its holder
            self._give_back()
            await self._hands.keep()
            return
        await each_done([self._hands.keep(), resume_new(self._hands, self.record)])

    async def _over(self, state: SyncState, code: str, detail: str) -> None:
        await self.preparation.torn_down()
        if state is not SyncState.DONE:  # before a trainer hears of it, and stages anew
            await self._hands.discard(self.record.report.version)
        self.record.over(state, code, detail)
        try:
            self._hands.book.ended(self.record.report)
        except OrchestrRLError as error:
            logger.error("the end of weight sync %s cannot be written down: %s", self.record.id, error)

    async def _forward(self, attempt: _Attempt) -> Failed | None:
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
            return Failed(self._stop[1], self._stop[2], again=False)
        except Failed as failure:
            return failure
        except ProblemFaults as error:
            return Failed("unreachable", few(error.faults), again=False)
        except OrchestrRLError as error:
            return Failed("internal", str(error))
        except Exception as error:  # a defect must not leave the fleet between two versions
            logger.exception("weight sync %s", self.record.id)
            return Failed("internal", f"a defect: {error!r}", again=False)
        finally:
            self._waits_for_gate = False
            if attempt.renewing is not None:
                attempt.renewing.cancel()
        return None

    async def _back(self, attempt: _Attempt) -> None:
        while True:
            try:
                return await go_back(self._hands, self.record, attempt.changed, attempt.untouched, attempt.told)
            except (OrchestrRLError, Failed) as error:
                # Nothing else may be done to engines before this is; the gate's lease keeps requests from them.
                logger.error("weight sync %s cannot be undone: %s", self.record.id, error)
                await self._hands.clock.sleep(self._hands.settings.patience_s / 10)

    async def _to_commit(self, attempt: _Attempt) -> None:
        record, hands = self.record, self._hands
        await self._not_held()
        await self._engines_there(attempt)
        await self._served()
        targets = self._targets(attempt)
        receivers = self._receivers(targets)
        map = await self._prepared(targets, receivers)
        hands.book.step(record.id, "prepared")
        for engine in targets:
            record.engine(engine, EngineSync.PREPARED)
        lease = await self._close_gate(attempt)
        notice_others(hands)
        targets = self._still_there(attempt, targets, receivers)
        has, prompt, answers = await self._install(attempt, targets, lease)
        self._commit(lease, has, map, prompt, answers)

    # --- its steps

    async def _prepared(self, targets: Mapping[EngineId, PeerId], receivers: Collection[PeerId]) -> VersionMap:
        """All that can be done before the fence."""
        record, hands = self.record, self._hands
        if self.direct is not None:
            return await self.direct.prepare(list(targets))
        planned, map = await self.preparation.plan(receivers)
        record.state(SyncState.CARRYING)
        assert self.preparation.network is not None
        self.carrying = Carrying(hands.seams, record, planned, map, self.preparation.network)
        try:
            await self.carrying.run()
        finally:
            self.carrying = None
            self.preparation.tear_down()
        return map

    async def _not_held(self) -> None:
        """An operator may have paused syncs."""
        told = ""
        while (hold := self._hands.holds.hold(Part.SYNC)) is not None:
            if hold.detail != told:
                told = hold.detail
                self.record.put(detail=f"waits: {told}")
            await self._hands.clock.sleep(LOOK_S)
        if told:
            self.record.put(detail="")

    async def _engines_there(self, attempt: _Attempt) -> None:
        """Nobody is left out for being away for a moment."""
        told: list[EngineId] = []
        while away := [engine for engine in self._hands.awaited() if engine not in attempt.without]:
            if away != told:
                told = away
                self.record.put(detail=f"waits: {', '.join(away)} may come back")
            await self._hands.clock.sleep(LOOK_S)
        if told:
            self.record.put(detail="")

    async def _served(self) -> None:
        """Peers are told of engines that have just come; that takes a moment."""
        until_s = self._hands.clock.now_s() + SETTLED_WITHIN_S
        while not self._hands.settled() and self._hands.clock.now_s() < until_s:
            await self._hands.clock.sleep(LOOK_S)

    def _receivers(self, targets: Mapping[EngineId, PeerId]) -> set[PeerId]:
        """Peers of engines, and those of hosts where engines may be started: they find the fleet's weights there. If
        one of these fails it is left out."""
        if self.direct is not None:
            return set()
        idle = [id for id, peer in self._hands.attached().items() if peer.serves and not peer.engines]
        return {*targets.values(), *(idle if self.record.report.attempt == 1 else [])}

    def _still_there(
        self, attempt: _Attempt, targets: Mapping[EngineId, PeerId], prepared: Collection[PeerId]
    ) -> dict[EngineId, PeerId]:
        """While it was on its way engines may have left, by order, and others come: those take it, too, whose peers
        have the bytes."""
        hands = self._hands
        there: dict[EngineId, PeerId] = {}
        left_out = dict(attempt.without)
        for engine, now in sorted(hands.engines().items()):
            peer = hands.peer_of(engine)
            if engine in targets:
                there[engine] = targets[engine]
            elif engine not in attempt.failed and peer is not None and peer.id in prepared and now.healthy:
                there[engine] = peer.id
                left_out.pop(engine, None)
                self.record.engine(engine, EngineSync.PREPARED, "came while the version was on its way")
        gone = [engine for engine in targets if engine not in there]
        if gone:
            self.record.without_engines(gone)
            self.record.note(f"{', '.join(sorted(gone))} left the fleet while the version was on its way")
        attempt.without = left_out
        if not there:
            raise Failed("no_engines", "no engine is left that could have it", again=False)
        return there

    def _targets(self, attempt: _Attempt) -> dict[EngineId, PeerId]:
        """Engines that are to have it before it counts; the others are quarantined then."""
        targets: dict[EngineId, PeerId] = {}
        left: dict[EngineId, str] = dict(attempt.without)
        for engine, now in sorted(self._hands.engines().items()):
            peer = self._hands.peer_of(engine)
            if engine in left:
                continue
            if peer is None:
                left[engine] = self._hands.why_not_served(engine)
            elif not now.healthy:
                left[engine] = "is not healthy"
            else:
                targets[engine] = peer.id
                self.record.engine(engine, EngineSync.WAITING)
        for engine, why in left.items():
            self.record.engine(engine, EngineSync.QUARANTINED, why)
        attempt.without = left
        if not targets:
            words = _told(left) or "there are none"
            raise Failed("no_engines", f"no engine can have it: {words}", again=False)
        return targets

    async def _close_gate(self, attempt: _Attempt) -> str:
        """The lease; empty: somebody else's, or there is no gateway and peers keep engines still."""
        record = self.record
        record.state(SyncState.PREPARED)
        self._waits_for_gate = True
        if not self._at_once:
            with record.phase(SyncPhase.NEXT_GATE):
                await self._go.wait()
        await self._not_held()
        record.begins(SyncPhase.FENCE)
        try:
            return await self._fenced(attempt)
        finally:
            record.ends(SyncPhase.FENCE)

    async def _fenced(self, attempt: _Attempt) -> str:
        record, hands, settings = self.record, self._hands, self._hands.settings
        until_s = hands.clock.now_s() + settings.fence_within_s
        while self._borrowed is None:
            if is_closed(hands):  # before it opens we are asked
                record.put(detail=f"waits: {hands.fence.state.lease} has the gate closed")
                if hands.clock.now_s() >= until_s:
                    raise Failed("not_quiet", f"the gate is held by another: {hands.fence.state.lease}")
            elif hands.deploying():  # which does not begin while the gate is closed, and has limits of its own
                record.put(detail="waits: engines are being started or stopped")
                until_s = hands.clock.now_s() + settings.fence_within_s
            elif not hands.settled() and hands.clock.now_s() < until_s:
                record.put(detail="waits: peers are being told of engines that have come")
            else:
                break
            await hands.clock.sleep(LOOK_S)
        self._waits_for_gate = False
        record.state(SyncState.FENCING)
        hands.book.step(record.id, "fence")
        if self._borrowed is not None or not hands.fence.is_manned():
            return ""
        try:
            lease = await hands.fence.pause(
                HOLDER + record.id,
                empty=bool(self._prompt()[0]),
                lease_s=settings.lease_s,
                deadline_s=settings.fence_within_s,
            )
        except OrchestrRLError as error:
            raise Failed("not_quiet", str(error)) from error
        attempt.renewing = asyncio.ensure_future(self._renew(lease))
        return lease

    async def _renew(self, lease: str) -> None:
        lease_s = self._hands.settings.lease_s
        while True:
            await self._hands.clock.sleep(lease_s / 3)
            try:
                await self._hands.fence.renew(lease, lease_s)
            except Permanent as error:
                logger.error("weight sync %s: %s", self.record.id, error)
                return  # it is seen before the commit
            except OrchestrRLError as error:
                logger.warning("weight sync %s: %s", self.record.id, error)

    async def _install(
        self, attempt: _Attempt, targets: Mapping[EngineId, PeerId], lease: str
    ) -> tuple[list[EngineId], tuple[int, ...], dict[str, tuple[int, ...]]]:
        """Who has it, verified; the prompt, and what it was answered with, by configuration."""
        record, hands = self.record, self._hands
        record.state(SyncState.INSTALLING)
        engines = sorted(targets)
        hands.book.step(record.id, "install", engines)  # from here on they may have it
        attempt.changed.update(engines)
        if not lease:  # if it is opened before we are done, nothing goes there
            attempt.told = {e: v for e, v in hands.fence.state.versions.items() if e in targets}
            hands.fence.forget(engines, "are being given other weights")
        with record.phase(SyncPhase.INSTALL):
            if not lease and self._borrowed is None:
                await each_done(hands.rest(engine, True) for engine in engines)
            if self.direct is not None:
                results = await self._sent(self.direct, attempt)
            else:
                results = await self._loaded(engines, attempt)
            if not results:
                raise Failed("no_engines", "no engine is left that could have it", again=False)
        record.state(SyncState.VERIFYING)
        with record.phase(SyncPhase.VERIFY):
            prompt, answers = await self._verified(results)
            return sorted(results), prompt, answers

    def _of_the_fleet(self, failed: Mapping[EngineId, str]) -> dict[EngineId, str]:
        """Without engines that have left it by order."""
        gone = [engine for engine in failed if self._hands.gone(engine)]
        self.record.without_engines(gone)
        return {engine: why for engine, why in failed.items() if engine not in gone}

    async def _loaded(self, engines: Sequence[EngineId], attempt: _Attempt) -> dict[EngineId, PeerResult]:
        """From their hosts' folders. All are waited for: each that fails is left out next time."""
        results: dict[EngineId, PeerResult] = {}

        async def one(engine: EngineId) -> None:
            try:
                results[engine] = await self._one(engine)
            except Failed as failure:
                if failure.unchanged and engine not in self._given:
                    attempt.untouched.add(engine)
                raise

        failed = await self._hands.try_each(engines, one)
        if failed := self._of_the_fleet(failed):
            raise Failed("install_failed", _told(failed), failed)
        return results

    async def _sent(self, direct: Direct, attempt: _Attempt) -> dict[EngineId, PeerResult]:
        """By the trainer. Where it fails for all, nobody is left out next time: it may be the trainer's fault."""
        record, began_s = self.record, self._hands.clock.now_s()
        results, failed = await direct.install(self._borrowed.until_s if self._borrowed is not None else None)
        for engine in results:
            record.engine(engine, EngineSync.INSTALLED, install_s=self._hands.clock.now_s() - began_s)
        if failed:
            why = {engine: str(error) for engine, error in failed.items()}
            for engine, words in why.items():
                record.engine(engine, EngineSync.WAITING, words)
            attempt.untouched |= {e for e, error in failed.items() if not isinstance(error, OutcomeUnknown)}
            raise Failed("install_failed", _told(why), why if results else ())
        if not self._prompt()[0]:
            record.note("engines were asked nothing: name a probe, there are no sums on this plane")
        return results

    async def _one(self, engine: EngineId) -> PeerResult:
        record, began_s = self.record, self._hands.clock.now_s()
        until_s = self._borrowed.until_s if self._borrowed is not None else None
        # Where no version is the fleet's nobody knows what engines were given by another way since they were named.
        anew = self._hands.book.fleet.committed is None and engine not in self._given
        try:
            result = await self._hands.install(engine, record.report.version, until_s, anew=anew)
        except Failed as failure:
            record.engine(engine, EngineSync.WAITING, failure.detail)
            raise
        self._given.add(engine)
        record.engine(engine, EngineSync.INSTALLED, install_s=self._hands.clock.now_s() - began_s)
        return result

    def _prompt(self) -> tuple[tuple[int, ...], int]:
        """What engines are asked, and for how many tokens; nothing: they are not."""
        told, probe = self.publications[0], self._hands.settings.probe
        if told.probe:
            return told.probe, len(told.expected) or (probe.max_tokens if probe is not None else 8)
        return (probe.prompt_ids, probe.max_tokens) if probe is not None else ((), 0)

    async def _verified(
        self, results: Mapping[EngineId, PeerResult]
    ) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        configuration = {engine: now.configuration for engine, now in self._hands.engines().items()}
        sums = {engine: result.loaded_sum for engine, result in results.items() if result.loaded_sum}
        peers = {engine: self._hands.peer_of(engine) for engine in results}
        # Ranks of one layout on several hosts are given a part each.
        share = {engine: None if peer is None else peer.share for engine, peer in peers.items()}
        odd = odd_ones(sums, lambda e: (configuration.get(e), share[e], results[e].is_read_back))
        if odd:
            raise Failed("verify_failed", _told(odd), odd)
        prompt, max_tokens = self._prompt()
        may_probe = self._borrowed is None or self._borrowed.may_probe
        answers: dict[EngineId, tuple[int, ...]] = {}
        if prompt and may_probe:

            async def ask(engine: EngineId) -> None:
                answers[engine] = await self._hands.probe(engine, prompt, max_tokens)

            if failed := self._of_the_fleet(await self._hands.try_each(results, ask)):
                raise Failed("verify_failed", _told(failed), failed)
            expected = self.publications[0].expected
            if expected:
                odd = {e: f"goes on with {t}, the trainer with {expected}" for e, t in answers.items() if t != expected}
            else:
                odd = odd_ones(answers, configuration.get)
            if odd:
                raise Failed("probe_differs", _told(odd), odd)
        for engine in results:
            self.record.engine(engine, EngineSync.VERIFIED)
        return prompt if answers else (), {configuration[e]: t for e, t in answers.items() if e in configuration}

    def _commit(
        self,
        lease: str,
        has: Sequence[EngineId],
        map: VersionMap,
        prompt: tuple[int, ...],
        answers: Mapping[str, tuple[int, ...]],
    ) -> None:
        record, hands = self.record, self._hands
        if lease and own_lease(hands, record.id) != lease:
            raise Failed("not_quiet", "the gate has opened by itself while engines were being changed")
        if not lease and self._borrowed is not None and not is_closed(hands):
            raise Failed("not_quiet", "the gate was opened while engines were being changed")
        if not lease and self._borrowed is None and hands.fence.is_manned():
            raise Failed("not_quiet", "a gateway has come while peers kept engines still")
        has = [engine for engine in has if not hands.gone(engine)]
        if not has:
            raise Failed("no_engines", "no engine is left that could have it", again=False)
        if lost := hands.lacking(record.report.version, has):
            raise Failed("verify_failed", f"{few(lost, between=', ')}: restarted since the version was installed", lost)
        stands = {each.engine: each for each in record.report.engines}
        quarantined = {
            engine: stands[engine].detail if engine in stands else "came while the version was on its way"
            for engine in hands.engines()
            if engine not in has
        }
        with record.phase(SyncPhase.COMMIT):
            hands.book.commit(
                Committed(
                    record.report.version,
                    record.id,
                    tuple(has),
                    quarantined,
                    prompt,
                    answers,
                    self.fingerprint,
                    hands.clock.now_s(),
                    record.report.plane,
                    hands.fence.state.newest,
                ),
                map,
            )
        self._committed = True
        record.state(SyncState.COMMITTED)

    def _give_back(self) -> None:
        """Whoever waits for the gate's opening may go on."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is None:
            return
        self._go.clear()  # an operator's word stays
        if borrowed.outcome.done():
            return
        fleet, known = self._hands.book.fleet, self._hands.engines()
        if self._committed and fleet.committed is not None:
            has = fleet.committed.has
            borrowed.outcome.set_result((fleet.version, tuple(sorted(e for e in known if e not in has))))
        else:
            borrowed.outcome.set_result((None, tuple(sorted(e for e in fleet.quarantined if e in known))))


def _told(odd: Mapping[EngineId, str]) -> str:
    return few([f"{engine}: {why}" for engine, why in sorted(odd.items())])
