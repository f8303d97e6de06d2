"""Install one version into engines: choose the engines, install the version while the pause barrier is closed, verify
it, and resume requests.

Requests resume with the new version, or with the previous version after a failure. If a resume or a rollback is
interrupted at any point, a restarted daemon repeats it. A version is reported for an engine only if the engine has it.
An engine whose version is uncertain gets no requests until it is repaired.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed, each_done, results_by_engine
from orchestrrl.weights.controller.direct import DirectTransfer
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.controller.state import CommittedVersion, EngineNow, FleetWeights, SyncAttempt, SyncRecord
from orchestrrl.weights.orders import PeerResult
from orchestrrl.weights.publication import Publication
from planner.model import EngineId

logger = logging.getLogger(__name__)

SETTLED_WITHIN_S = 5.0  # wait for peers to receive their engine assignments


@dataclass(slots=True)
class BorrowedPause:
    """A pause barrier that another holder has closed and that the sync may use until `until_s`. `may_probe` is set if
    engines hold no requests, so that they can be probed. `outcome` resolves to the version with which the holder must
    open the barrier, and the engines without that version."""

    until_s: float
    may_probe: bool
    outcome: asyncio.Future[tuple[int | None, tuple[EngineId, ...]]]


class Installing:
    """The installation of one version into engines, from their hosts' folders or, if `direct` is given, from the
    trainer."""

    def __init__(
        self, acts: SyncActions, record: SyncRecord, publications: Sequence[Publication], direct: DirectTransfer | None
    ) -> None:
        self._acts = acts
        self._record = record
        self._publications = publications
        self._direct = direct
        self._given: set[EngineId] = set()  # engines that have loaded the version, in any attempt

    @property
    def prompt(self) -> tuple[tuple[int, ...], int]:
        """Return the probe's prompt as token ids, and the number of tokens to generate. An empty prompt disables the
        probe."""
        told, probe = self._publications[0], self._acts.settings.probe
        if told.probe:
            return told.probe, len(told.expected) or (probe.max_tokens if probe is not None else 8)
        return (probe.prompt_ids, probe.max_tokens) if probe is not None else ((), 0)

    # --- choose

    async def choose(self, attempt: SyncAttempt) -> None:
        """Set the attempt's targets (the engines that receive the version) and receivers (the peers that receive its
        bytes). Engines that are not targets are quarantined when the version is committed. Raises SyncFailed if no
        engine can receive the version."""
        acts, record = self._acts, self._record

        def away() -> str:
            engines = [engine for engine in acts.awaited() if engine not in attempt.failed]
            return f"{', '.join(engines)} may attach again" if engines else ""

        await record.wait_while(away)
        await acts.wait_until(acts.serving.is_settled, SETTLED_WITHIN_S)
        targets: list[EngineId] = []
        left = dict(attempt.failed)
        for engine, now in sorted(acts.engines().items()):
            if engine in left:
                continue
            if why := self._why_not(engine, now):
                left[engine] = why
            else:
                targets.append(engine)
                record.engine(engine, EngineSync.WAITING)
        for engine, why in left.items():
            record.engine(engine, EngineSync.QUARANTINED, why)
        if not targets:
            words = results_by_engine(left) or "the fleet has no engines"
            raise SyncFailed(
                "no_engines", f"no engine can receive version {record.report.version}: {words}", again=False
            )
        attempt.targets = targets
        if self._direct is None:  # a direct backend needs no receiving peers
            # Hosts on which engines may be started later also receive the version, so that it is there then. They take
            # part in the first attempt only, so that a failing one cannot block the sync.
            idle = [id for id, peer in acts.hub.attached().items() if peer.serves and not peer.engines]
            hosts = {id for engine in targets for id in acts.hub.hosts_of(engine)}
            attempt.receivers = {*hosts, *(idle if record.report.attempt == 1 else [])}

    def _why_not(self, engine: EngineId, now: EngineNow) -> str:
        """Return the reason why an engine cannot receive the version, or an empty string if it can."""
        acts = self._acts
        if acts.hub.peer_of(engine) is None:
            return acts.serving.why_not(engine)
        if not now.healthy:
            return "is not healthy"
        return "" if self._direct is not None else acts.hub.why_not_whole(engine)

    def update(self, attempt: SyncAttempt) -> None:
        """Remove targets that have left the fleet, and add engines that have joined the fleet and whose peers have the
        bytes. Raises SyncFailed if no target is left."""
        hub, there = self._acts.hub, self._acts.engines()
        come = [
            engine
            for engine, now in sorted(there.items())
            if engine not in attempt.targets
            and engine not in attempt.failed
            and not self._why_not(engine, now)
            and set(hub.hosts_of(engine)) <= set(attempt.receivers)
        ]
        for engine in come:
            self._record.engine(engine, EngineSync.PREPARED, "joined during the sync")
        if gone := [engine for engine in attempt.targets if engine not in there]:
            self._record.without_engines(gone)
            self._record.note(f"{', '.join(sorted(gone))} left the fleet during the sync")
        attempt.targets = [engine for engine in [*attempt.targets, *come] if engine in there]
        if not attempt.targets:
            raise SyncFailed(
                "no_engines", f"no remaining engine can receive version {self._record.report.version}", again=False
            )

    # --- install and verify

    async def install(self, attempt: SyncAttempt, borrowed: BorrowedPause | None) -> None:
        """Install the version into the attempt's targets and verify it. The targets are recorded as changed beforehand,
        because they may have the version as soon as the installation begins. `borrowed` is another holder's closed
        pause barrier, if the sync uses one."""
        record, acts = self._record, self._acts
        record.state(SyncState.INSTALLING)
        engines = sorted(attempt.targets)
        attempt.changed.update(engines)
        if not attempt.lease:  # if another holder opens the barrier early, these engines get no requests
            attempt.reported = {e: v for e, v in acts.fence.state.versions.items() if e in attempt.targets}
            acts.fence.forget(engines, "other weights are being installed")
        with record.phase(SyncPhase.INSTALL):
            if not attempt.lease and borrowed is None:
                await each_done(acts.rest(engine, at_rest=True) for engine in engines)
            until_s = borrowed.until_s if borrowed is not None else None
            if self._direct is not None:
                results = await self._direct.install(attempt, until_s)
                if not self.prompt[0]:
                    record.note("engines were not verified: this backend has no checksums; configure a probe")
            else:
                results = await self._loaded(attempt, until_s)
            if not results:
                raise SyncFailed(
                    "no_engines", f"no remaining engine can receive version {record.report.version}", again=False
                )
        record.state(SyncState.VERIFYING)
        with record.phase(SyncPhase.VERIFY):
            await self._verify(attempt, results, may_probe=borrowed is None or borrowed.may_probe)

    async def _loaded(self, attempt: SyncAttempt, until_s: float | None) -> dict[EngineId, PeerResult]:
        """Have engines load the version from their hosts' folders; return each engine's result. Raises SyncFailed after
        all engines have finished if some of them failed. The next attempt leaves out the engines that failed."""
        acts, record = self._acts, self._record
        results: dict[EngineId, PeerResult] = {}

        async def one(engine: EngineId) -> None:
            began_s = acts.clock.now_s()
            # Without a committed version, another program may have changed the engines' weights since.
            anew = acts.book.fleet.committed is None and engine not in self._given
            try:
                results[engine] = await acts.install(engine, record.report.version, until_s, anew=anew)
            except SyncFailed as failure:
                record.engine(engine, EngineSync.WAITING, failure.detail)
                if failure.unchanged and engine not in self._given:
                    attempt.untouched.add(engine)
                raise
            self._given.add(engine)
            record.engine(engine, EngineSync.INSTALLED, install_s=acts.clock.now_s() - began_s)

        if failed := self._of_the_fleet(await acts.try_each(attempt.targets, one)):
            raise SyncFailed("install_failed", results_by_engine(failed), failed)
        return results

    async def _verify(self, attempt: SyncAttempt, results: Mapping[EngineId, PeerResult], *, may_probe: bool) -> None:
        acts = self._acts
        configuration = {engine: now.configuration for engine, now in acts.engines().items()}
        sums = {engine: result.loaded_sum for engine, result in results.items() if result.loaded_sum}
        peers = {engine: acts.hub.peer_of(engine) for engine in results}
        # With ranks on several hosts, each host gets a part, so checksums are compared within equal shares only.
        share = {engine: None if peer is None else peer.share for engine, peer in peers.items()}
        odd = odd_ones(sums, lambda e: (configuration.get(e), share[e], results[e].is_read_back))
        if odd:
            raise SyncFailed("verify_failed", results_by_engine(odd), odd)
        prompt, max_tokens = self.prompt
        answers: dict[EngineId, tuple[int, ...]] = {}
        if prompt and may_probe:

            async def probe(engine: EngineId) -> None:
                answers[engine] = await acts.probe(engine, prompt, max_tokens)

            if failed := self._of_the_fleet(await acts.try_each(results, probe)):
                raise SyncFailed("verify_failed", results_by_engine(failed), failed)
            expected = self._publications[0].expected
            if expected:
                odd = {e: f"generated {t}, the trainer {expected}" for e, t in answers.items() if t != expected}
            else:
                odd = odd_ones(answers, configuration.get)
            if odd:
                raise SyncFailed("probe_differs", results_by_engine(odd), odd)
        for engine in results:
            self._record.engine(engine, EngineSync.VERIFIED)
        attempt.verified = sorted(results)
        attempt.prompt = prompt if answers else ()
        attempt.answers = {configuration[e]: tokens for e, tokens in answers.items() if e in configuration}

    def _of_the_fleet(self, failed: Mapping[EngineId, str]) -> dict[EngineId, str]:
        """Return `failed` without the engines that were stopped or removed on purpose. These engines are also removed
        from the report."""
        gone = [engine for engine in failed if self._acts.gone(engine)]
        self._record.without_engines(gone)
        return {engine: why for engine, why in failed.items() if engine not in gone}

    # --- resume with the new version

    async def resume(self) -> None:
        """Resume requests after the commit, on the engines that have the committed version."""
        acts, record, committed = self._acts, self._record, self._acts.book.fleet.committed
        assert committed is not None
        known = acts.engines()
        await acts.refresh(engine for engine in committed.has if engine in known)
        for engine in acts.lacking(committed.version, committed.has):
            committed = committed.lost(engine, "was restarted")
        acts.book.amend(committed)
        has = [engine for engine in committed.has if engine in known]
        without = sorted(set(known) - set(has))
        with record.phase(SyncPhase.RESUME):
            lease = acts.own_lease(record.id)
            if not lease or not await self._open(lease, committed.version, without, f"version {committed.version}"):
                # Another holder has closed the barrier and will open it, or it is open. Report versions before it
                # opens.
                if without:
                    acts.fence.forget(without, "do not have the fleet's version")
                if has:
                    acts.fence.set_version(has, committed.version, "installed by a weight sync")
                await self._let_run(has)
            elif left_resting := acts.rested.intersection(has):  # paused by an interrupted repair
                await acts.try_each(left_resting, lambda engine: acts.rest(engine, at_rest=False))
        for engine in sorted(known):
            if engine in has:
                record.engine(engine, EngineSync.SERVES)
            else:
                record.engine(engine, EngineSync.QUARANTINED, committed.quarantined.get(engine, "was not attached"))

    # --- roll back to the previous version

    async def go_back(self, attempt: SyncAttempt) -> None:
        """Roll back an uncommitted version: install the fleet's version into engines that may have all or part of the
        new version. If peers do not store the fleet's version, the engines without it wait for the next version."""
        acts, record = self._acts, self._record
        gone = [engine for engine in attempt.changed if acts.gone(engine)]
        changed = sorted(attempt.changed.difference(gone))
        acts.fence.forget(gone, "left the fleet")
        record.without_engines(gone)
        await acts.let_go(record.report.version)
        lease = acts.own_lease(record.id)
        if not changed:
            if lease:
                await acts.refresh(self._known_to_barrier())
                await self._open(lease, None, sorted(acts.book.fleet.quarantined), "no engine was changed")
            return
        if not acts.is_closed:
            lease = await self._close_again(changed)
        acts.notice_others()
        committed = acts.book.fleet.committed
        # An engine that an earlier attempt changed is quarantined: being unchanged by this one does not make it good.
        untouched = attempt.untouched.difference(acts.book.fleet.quarantined)
        touched = [engine for engine in changed if engine not in untouched]
        if committed is not None:
            bad = await self._bring_back(committed, touched)
        else:
            why = "the previous weights cannot be restored: it waits for the next version"
            bad = dict.fromkeys(touched, why)
        await acts.refresh({*self._known_to_barrier(), *(engine for engine in changed if engine not in bad)})
        if committed is not None:
            for engine in acts.lacking(committed.version, changed):
                bad.setdefault(engine, "was restarted after the previous weights were restored")
        self._write_down(changed, bad)
        for engine in changed:
            state = EngineSync.QUARANTINED if engine in bad else EngineSync.ROLLED_BACK
            record.engine(engine, state, bad.get(engine, ""))
        good = [engine for engine in changed if engine not in bad and engine in acts.engines()]
        if acts.book.fleet.committed is not None:
            self._report_committed(acts.book.fleet.committed, good, bad)
        else:
            self._report_as_before({e: v for e, v in attempt.reported.items() if e in good and e in untouched})
        without = sorted(engine for engine in acts.book.fleet.quarantined if engine in acts.engines())
        if not lease or not await self._open(lease, None, without, "engines have the previous weights"):
            await self._let_run(good)

    def _known_to_barrier(self) -> set[EngineId]:
        """Return the engines for which the pause barrier has a version. The barrier's version may be outdated, because
        a restart of the engine may have been missed."""
        return set(self._acts.engines()).intersection(self._acts.fence.state.versions)

    async def _close_again(self, changed: Collection[EngineId]) -> str:
        """Close the pause barrier again after its lease has ended; return the id of the new lease. If the barrier
        cannot be closed, have peers pause the engines in `changed` and return an empty string."""
        acts = self._acts
        acts.fence.forget(changed, "were being changed while the pause barrier opened")
        if acts.fence.is_manned():
            try:
                return await acts.close_barrier(self._record.id, empty=False)
            except OrchestrRLError as error:
                self._record.note(f"the pause barrier could not be closed again: {error}")
        await acts.try_each(changed, lambda engine: acts.rest(engine, at_rest=True))
        return ""

    async def _bring_back(self, committed: CommittedVersion, engines: Collection[EngineId]) -> dict[EngineId, str]:
        """Install the fleet's version into `engines` if peers store it. Return the engines that do not have the version
        afterwards, with the reason for each engine."""
        acts = self._acts
        if committed.is_kept:
            return await acts.try_each(engines, lambda engine: acts.install(engine, committed.version))
        lost = f"backend {committed.backend} keeps no copy of version {committed.version}: it waits for the next one"
        return {engine: lost for engine in engines if acts.installed(engine) != committed.version}

    def _write_down(self, changed: Collection[EngineId], bad: Mapping[EngineId, str]) -> None:
        """Record in the journal which of the changed engines have the fleet's version. `bad` has the engines without
        it, with reasons. The caller reports the versions to the pause barrier only afterwards."""
        book, committed = self._acts.book, self._acts.book.fleet.committed
        if committed is None:
            book.stands(FleetWeights(None, {**book.fleet.spoilt, **bad}))
            return
        for engine in changed:
            committed = committed.lost(engine, bad[engine]) if engine in bad else committed.repaired(engine)
        book.amend(committed)

    def _report_committed(
        self, committed: CommittedVersion, good: Collection[EngineId], bad: Collection[EngineId]
    ) -> None:
        """Report the fleet's version to the pause barrier for all engines that have it. This is necessary because the
        barrier discards all versions if the lease expires while weights are being changed. The versions of the engines
        in `bad` are reported as unknown."""
        acts, known, state = self._acts, self._acts.engines(), self._acts.fence.state
        if bad:
            acts.fence.forget(bad, "the previous weights could not be restored")
        still = [engine for engine in committed.has if acts.installed(engine) == committed.version]
        unknown = {e for e in (*good, *still) if e in known and state.versions.get(e) != committed.version}
        if unknown := unknown.difference(bad):
            acts.fence.set_version(sorted(unknown), committed.version, "have the previous weights")

    def _report_as_before(self, reported: Mapping[EngineId, int]) -> None:
        """Report to the pause barrier the versions that unchanged engines had before the sync, if the barrier has
        discarded them. No version is committed in this case, so these versions do not come from a weight sync."""
        acts = self._acts
        unknown = {e: v for e, v in reported.items() if e not in acts.fence.state.versions and e not in acts.stale}
        for version in sorted(set(unknown.values())):
            engines = sorted(engine for engine in unknown if unknown[engine] == version)
            acts.fence.set_version(engines, version, "were not changed")

    # --- the barrier

    async def _open(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> bool:
        """Open the pause barrier; return False if its lease had already ended."""
        acts = self._acts
        restarted = [] if version is None else [engine for engine in acts.engines() if engine in acts.stale]
        try:
            await acts.fence.resume(lease, version, sorted({*without, *restarted}), reason)
        except Permanent as error:
            logger.error("the pause barrier was not opened by its lease: %s", error)
            return False
        return True

    async def _let_run(self, engines: Collection[EngineId]) -> None:
        """Have peers resume the engines if the pause barrier is open. This is necessary because, if there is no
        gateway, peers have paused the engines."""
        acts = self._acts
        if not acts.is_closed:
            failed = await acts.try_each(engines, lambda engine: acts.rest(engine, at_rest=False))
            for engine, detail in failed.items():
                logger.warning("%s could not be resumed: %s", engine, detail)


def odd_ones(said: Mapping[EngineId, object], group: Callable[[EngineId], object]) -> dict[EngineId, str]:
    """Return the engines whose value in `said` differs from the majority value of their group, with a description of
    the difference for each engine. If a group has no majority, all of its engines are returned. Has no side effects."""
    groups: dict[object, list[EngineId]] = {}
    for engine in sorted(said):
        groups.setdefault(group(engine), []).append(engine)
    odd = {}
    for engines in groups.values():
        counts = Counter(said[engine] for engine in engines)
        most, count = counts.most_common(1)[0]
        if len(counts) > 1 and 2 * count <= len(engines):
            odd.update(dict.fromkeys(engines, "engines of one configuration do not agree"))
        else:
            odd.update(
                {e: f"has {said[e]}, others of its configuration have {most}" for e in engines if said[e] != most}
            )
    return odd
