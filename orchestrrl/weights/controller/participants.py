"""Choose the engines that take part in a version, attempt by attempt."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrrl.weights.controller.actions import SyncActions, SyncFailed, results_by_engine
from orchestrrl.weights.controller.reports import EngineSync
from orchestrrl.weights.controller.state import LOOK_S, SyncRecord
from orchestrrl.weights.model import VersionMap
from planner.model import EngineId, PeerId

SETTLED_WITHIN_S = 5.0  # for peers to be told which engines there are


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


class SyncParticipants:
    """Chooses the engines of one publication. `is_direct`: the trainer sends by itself, and peers carry nothing."""

    def __init__(self, acts: SyncActions, record: SyncRecord, *, is_direct: bool) -> None:
        self._acts = acts
        self._record = record
        self._is_direct = is_direct

    async def choose(self, attempt: SyncAttempt) -> None:
        """Set the attempt's targets and receivers. Raises SyncFailed where no engine can have the version."""
        await self._engines_there(attempt)
        await self._served()
        attempt.targets = self._targets(attempt)
        attempt.receivers = self._receivers(attempt)

    async def _engines_there(self, attempt: SyncAttempt) -> None:
        """Wait for engines that are away for a moment."""

        def away() -> str:
            engines = [engine for engine in self._acts.awaited() if engine not in attempt.without]
            return f"{', '.join(engines)} may come back" if engines else ""

        await self._record.wait_while(away)

    async def _served(self) -> None:
        """Peers are told of engines that have just come; that takes a moment."""
        until_s = self._acts.clock.now_s() + SETTLED_WITHIN_S
        while not self._acts.settled() and self._acts.clock.now_s() < until_s:
            await self._acts.clock.sleep(LOOK_S)

    def _receivers(self, attempt: SyncAttempt) -> set[PeerId]:
        """Return the peers of engines, and those of hosts where engines may be started, which find the fleet's weights
        there then. One of these that fails is left out of the next attempt."""
        if self._is_direct:
            return set()
        idle = [id for id, peer in self._acts.attached().items() if peer.serves and not peer.engines]
        hosts = {id for engine in attempt.targets for id in self._acts.hosts_of(engine)}
        return {*hosts, *(idle if self._record.report.attempt == 1 else [])}

    def update(self, attempt: SyncAttempt) -> None:
        """Drop engines that have left the fleet by order, and add those that have come and whose peers have the bytes.

        Raises SyncFailed where no engine is left."""
        acts = self._acts
        there: dict[EngineId, PeerId] = {}
        left_out = dict(attempt.without)
        for engine, now in sorted(acts.engines().items()):
            peer = acts.peer_of(engine)
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

    def _has_bytes(self, engine: EngineId, prepared: Collection[PeerId]) -> bool:
        return not self._acts.why_not_whole(engine) and set(self._acts.hosts_of(engine)) <= set(prepared)

    def _targets(self, attempt: SyncAttempt) -> dict[EngineId, PeerId]:
        """Engines that are to have it before it counts; the others are quarantined then."""
        targets: dict[EngineId, PeerId] = {}
        left: dict[EngineId, str] = dict(attempt.without)
        for engine, now in sorted(self._acts.engines().items()):
            peer = self._acts.peer_of(engine)
            if engine in left:
                continue
            if peer is None:
                left[engine] = self._acts.why_not_served(engine)
            elif not now.healthy:
                left[engine] = "is not healthy"
            elif why := "" if self._is_direct else self._acts.why_not_whole(engine):
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
