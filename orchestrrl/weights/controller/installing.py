"""Choose the engines that take part in a version, attempt by attempt; install it behind a closed barrier, and verify it
by the sums of what they were given and by their answers to a probe."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrrl.core.errors import OutcomeUnknown
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed, each_done, results_by_engine
from orchestrrl.weights.controller.direct import DirectTransfer
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.controller.state import SyncRecord
from orchestrrl.weights.model import VersionMap
from orchestrrl.weights.orders import PeerResult
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId

SETTLED_WITHIN_S = 5.0  # for peers to be told which engines there are


@dataclass(slots=True)
class BorrowedPause:
    """Another holder's closed barrier, to be used until `until_s`. `outcome`: the version to open it with, and engines
    without it."""

    until_s: float
    may_probe: bool
    outcome: asyncio.Future[tuple[int | None, tuple[EngineId, ...]]]


@dataclass(frozen=True, slots=True)
class VerifiedEngines:
    """Engines that have a version, verified. `answers`: to the prompt, by configuration."""

    engines: Sequence[EngineId]
    prompt: tuple[int, ...]  # empty: engines were not asked
    answers: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class SyncAttempt:
    """What one attempt to bring a version has come to. `without`: engines that are left out, and why."""

    without: Mapping[EngineId, str] = field(default_factory=dict)
    failed: Collection[EngineId] = ()  # of these, those that failed in an attempt before
    targets: Mapping[EngineId, PeerId] = field(default_factory=dict)  # engines that are to have it, and their peers
    receivers: Collection[PeerId] = ()
    map: VersionMap | None = None  # with all sums, once every receiver has all bytes
    lease: str = ""  # the pause barrier's; empty: another holder's, or peers keep engines still
    changed: set[EngineId] = field(default_factory=set)
    untouched: set[EngineId] = field(default_factory=set)  # of the changed ones: they are as they were after all
    reported: dict[EngineId, int] = field(default_factory=dict)  # what the pause barrier forgot of the changed ones
    verified: VerifiedEngines | None = None


class Installing:
    """Chooses the engines of one publication, installs it into them and verifies it. `direct`: the trainer sends by
    itself."""

    def __init__(
        self, acts: SyncActions, record: SyncRecord, publications: Sequence[Publication], direct: DirectTransfer | None
    ) -> None:
        self._acts = acts
        self._record = record
        self._publications = publications
        self._direct = direct
        self._given: set[EngineId] = set()  # engines that have taken it, in any attempt

    @property
    def prompt(self) -> tuple[tuple[int, ...], int]:
        """What engines are asked, and for how many tokens; nothing: they are not."""
        told, probe = self._publications[0], self._acts.settings.probe
        if told.probe:
            return told.probe, len(told.expected) or (probe.max_tokens if probe is not None else 8)
        return (probe.prompt_ids, probe.max_tokens) if probe is not None else ((), 0)

    async def choose(self, attempt: SyncAttempt) -> None:
        """Set the attempt's targets and receivers. Raises SyncFailed where no engine can have the version."""
        await self._engines_there(attempt)
        await self._acts.wait_until(self._acts.serving.is_settled, SETTLED_WITHIN_S)
        attempt.targets = self._targets(attempt)
        attempt.receivers = self._receivers(attempt)

    def update(self, attempt: SyncAttempt) -> None:
        """Drop engines that have left the fleet by order, and add those that have come and whose peers have the bytes.

        Raises SyncFailed where no engine is left."""
        acts = self._acts
        there: dict[EngineId, PeerId] = {}
        left_out = dict(attempt.without)
        for engine, now in sorted(acts.engines().items()):
            peer = acts.hub.peer_of(engine)
            if engine in attempt.targets:
                there[engine] = attempt.targets[engine]
            elif (
                engine not in attempt.failed
                and peer is not None
                and self._has_bytes(engine, attempt.receivers)
                and now.healthy
            ):
                there[engine] = peer.id
                left_out.pop(engine, None)
                self._record.engine(engine, EngineSync.PREPARED, "came while the version was on its way")
        gone = [engine for engine in attempt.targets if engine not in there]
        if gone:
            self._record.without_engines(gone)
            self._record.note(f"{', '.join(sorted(gone))} left the fleet while the version was on its way")
        attempt.without = left_out
        attempt.targets = there
        if not there:
            raise SyncFailed("no_engines", "no engine is left that could have it", again=False)

    async def install(self, attempt: SyncAttempt, borrowed: BorrowedPause | None) -> VerifiedEngines:
        """Install the version into the attempt's targets, and verify it. From the first moment on they may have it."""
        record, acts = self._record, self._acts
        record.state(SyncState.INSTALLING)
        engines = sorted(attempt.targets)
        attempt.changed.update(engines)
        if not attempt.lease:  # if it is opened before we are done, nothing goes there
            attempt.reported = {e: v for e, v in acts.fence.state.versions.items() if e in attempt.targets}
            acts.fence.forget(engines, "are being given other weights")
        with record.phase(SyncPhase.INSTALL):
            if not attempt.lease and borrowed is None:
                await each_done(acts.rest(engine, at_rest=True) for engine in engines)
            if self._direct is not None:
                results = await self._sent(self._direct, attempt, borrowed)
            else:
                results = await self._loaded(engines, attempt, borrowed)
            if not results:
                raise SyncFailed("no_engines", "no engine is left that could have it", again=False)
        record.state(SyncState.VERIFYING)
        with record.phase(SyncPhase.VERIFY):
            return await self._verified(results, borrowed)

    # --- choosing

    async def _engines_there(self, attempt: SyncAttempt) -> None:
        """Wait for engines that are away for a moment."""

        def away() -> str:
            engines = [engine for engine in self._acts.awaited() if engine not in attempt.without]
            return f"{', '.join(engines)} may come back" if engines else ""

        await self._record.wait_while(away)

    def _receivers(self, attempt: SyncAttempt) -> set[PeerId]:
        """Return the peers of engines, and those of hosts where engines may be started, which find the fleet's weights
        there then. One of these that fails is left out of the next attempt."""
        if self._direct is not None:  # peers carry nothing
            return set()
        idle = [id for id, peer in self._acts.hub.attached().items() if peer.serves and not peer.engines]
        hosts = {id for engine in attempt.targets for id in self._acts.hub.hosts_of(engine)}
        return {*hosts, *(idle if self._record.report.attempt == 1 else [])}

    def _has_bytes(self, engine: EngineId, prepared: Collection[PeerId]) -> bool:
        return not self._acts.hub.why_not_whole(engine) and set(self._acts.hub.hosts_of(engine)) <= set(prepared)

    def _targets(self, attempt: SyncAttempt) -> dict[EngineId, PeerId]:
        """Engines that are to have it before it counts; the others are quarantined then."""
        targets: dict[EngineId, PeerId] = {}
        left: dict[EngineId, str] = dict(attempt.without)
        for engine, now in sorted(self._acts.engines().items()):
            peer = self._acts.hub.peer_of(engine)
            if engine in left:
                continue
            if peer is None:
                left[engine] = self._acts.serving.why_not(engine)
            elif not now.healthy:
                left[engine] = "is not healthy"
            elif why := "" if self._direct is not None else self._acts.hub.why_not_whole(engine):
                left[engine] = why
            else:
                targets[engine] = peer.id
                self._record.engine(engine, EngineSync.WAITING)
        for engine, why in left.items():
            self._record.engine(engine, EngineSync.QUARANTINED, why)
        attempt.without = left
        if not targets:
            words = results_by_engine(left) or "there are none"
            raise SyncFailed("no_engines", f"no engine can have it: {words}", again=False)
        return targets

    # --- installing

    def _of_the_fleet(self, failed: Mapping[EngineId, str]) -> dict[EngineId, str]:
        """Without engines that have left it by order."""
        gone = [engine for engine in failed if self._acts.gone(engine)]
        self._record.without_engines(gone)
        return {engine: why for engine, why in failed.items() if engine not in gone}

    async def _loaded(
        self, engines: Sequence[EngineId], attempt: SyncAttempt, borrowed: BorrowedPause | None
    ) -> dict[EngineId, PeerResult]:
        """From their hosts' folders. All are waited for: each that fails is left out next time."""
        results: dict[EngineId, PeerResult] = {}

        async def one(engine: EngineId) -> None:
            try:
                results[engine] = await self._one(engine, borrowed)
            except SyncFailed as failure:
                if failure.unchanged and engine not in self._given:
                    attempt.untouched.add(engine)
                raise

        failed = await self._acts.try_each(engines, one)
        if failed := self._of_the_fleet(failed):
            raise SyncFailed("install_failed", results_by_engine(failed), failed)
        return results

    async def _sent(
        self, direct: DirectTransfer, attempt: SyncAttempt, borrowed: BorrowedPause | None
    ) -> dict[EngineId, PeerResult]:
        """By the trainer. Where it fails for all, nobody is left out next time: it may be the trainer's fault."""
        record, began_s = self._record, self._acts.clock.now_s()
        results, failed = await direct.install(borrowed.until_s if borrowed is not None else None)
        for engine in results:
            record.engine(engine, EngineSync.INSTALLED, install_s=self._acts.clock.now_s() - began_s)
        if failed:
            why = {engine: str(error) for engine, error in failed.items()}
            for engine, words in why.items():
                record.engine(engine, EngineSync.WAITING, words)
            attempt.untouched |= {e for e, error in failed.items() if not isinstance(error, OutcomeUnknown)}
            raise SyncFailed("install_failed", results_by_engine(why), why if results else ())
        if not self.prompt[0]:
            record.note("engines were asked nothing: name a probe, there are no sums on this backend")
        return results

    async def _one(self, engine: EngineId, borrowed: BorrowedPause | None) -> PeerResult:
        record, began_s = self._record, self._acts.clock.now_s()
        until_s = borrowed.until_s if borrowed is not None else None
        # Where no version is the fleet's nobody knows what engines were given by another way since they were named.
        anew = self._acts.book.fleet.committed is None and engine not in self._given
        try:
            result = await self._acts.install(engine, record.report.version, until_s, anew=anew)
        except SyncFailed as failure:
            record.engine(engine, EngineSync.WAITING, failure.detail)
            raise
        self._given.add(engine)
        record.engine(engine, EngineSync.INSTALLED, install_s=self._acts.clock.now_s() - began_s)
        return result

    async def _verified(
        self, results: Mapping[EngineId, PeerResult], borrowed: BorrowedPause | None
    ) -> VerifiedEngines:
        configuration = {engine: now.configuration for engine, now in self._acts.engines().items()}
        sums = {engine: result.loaded_sum for engine, result in results.items() if result.loaded_sum}
        peers = {engine: self._acts.hub.peer_of(engine) for engine in results}
        # Ranks of one layout on several hosts are given a part each.
        share = {engine: None if peer is None else peer.share for engine, peer in peers.items()}
        odd = odd_ones(sums, lambda e: (configuration.get(e), share[e], results[e].is_read_back))
        if odd:
            raise SyncFailed("verify_failed", results_by_engine(odd), odd)
        prompt, max_tokens = self.prompt
        may_probe = borrowed is None or borrowed.may_probe
        answers: dict[EngineId, tuple[int, ...]] = {}
        if prompt and may_probe:

            async def probe(engine: EngineId) -> None:
                answers[engine] = await self._acts.probe(engine, prompt, max_tokens)

            if failed := self._of_the_fleet(await self._acts.try_each(results, probe)):
                raise SyncFailed("verify_failed", results_by_engine(failed), failed)
            expected = self._publications[0].expected
            if expected:
                odd = {e: f"goes on with {t}, the trainer with {expected}" for e, t in answers.items() if t != expected}
            else:
                odd = odd_ones(answers, configuration.get)
            if odd:
                raise SyncFailed("probe_differs", results_by_engine(odd), odd)
        for engine in results:
            self._record.engine(engine, EngineSync.VERIFIED)
        by_configuration = {configuration[e]: tokens for e, tokens in answers.items() if e in configuration}
        return VerifiedEngines(sorted(results), prompt if answers else (), by_configuration)


def odd_ones(said: Mapping[EngineId, object], group: Callable[[EngineId], object]) -> dict[EngineId, str]:
    """In each group, those that say something else than most; where there is no majority: all of it. Pure."""
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
            odd.update({e: f"{said[e]} where others of its kind have {most}" for e in engines if said[e] != most})
    return odd
