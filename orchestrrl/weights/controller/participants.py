"""Which engines take part in a version, attempt by attempt: who is waited for, who is left out, who came and went."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orchestrrl.weights.controller.actions import SyncActions, results_by_engine
from orchestrrl.weights.controller.carrying import SyncFailed
from orchestrrl.weights.controller.reports import EngineSync
from orchestrrl.weights.controller.state import SyncRecord
from planner.model import EngineId, PeerId

SETTLED_WITHIN_S = 5.0  # for peers to be told which engines there are
LOOK_S = 0.25  # how often it is looked whether what is waited for has come


@dataclass(slots=True)
class SyncAttempt:
    """What an attempt has come to."""

    without: Mapping[EngineId, str] = field(default_factory=dict)  # engines that are left out, and why
    failed: Collection[EngineId] = ()  # of these, those that did not do in an attempt before
    changed: set[EngineId] = field(default_factory=set)
    untouched: set[EngineId] = field(default_factory=set)  # of those that were changed: they are as they were after all
    reported: dict[EngineId, int] = field(
        default_factory=dict
    )  # what the pause barrier had of these before it forgot it for this


class SyncParticipants:
    """Of one publication. `is_direct`: the trainer sends by itself, and hosts' peers carry nothing."""

    def __init__(self, acts: SyncActions, record: SyncRecord, *, is_direct: bool) -> None:
        self._acts = acts
        self._record = record
        self._is_direct = is_direct

    async def engines_there(self, attempt: SyncAttempt) -> None:
        """Nobody is left out for being away for a moment."""
        told: list[EngineId] = []
        while away := [engine for engine in self._acts.awaited() if engine not in attempt.without]:
            if away != told:
                told = away
                self._record.put(detail=f"waits: {', '.join(away)} may come back")
            await self._acts.clock.sleep(LOOK_S)
        if told:
            self._record.put(detail="")

    async def served(self) -> None:
        """Peers are told of engines that have just come; that takes a moment."""
        until_s = self._acts.clock.now_s() + SETTLED_WITHIN_S
        while not self._acts.settled() and self._acts.clock.now_s() < until_s:
            await self._acts.clock.sleep(LOOK_S)

    def receivers(self, targets: Mapping[EngineId, PeerId]) -> set[PeerId]:
        """Peers of engines, and those of hosts where engines may be started: they find the fleet's weights there. If
        one of these fails it is left out."""
        if self._is_direct:
            return set()
        idle = [id for id, peer in self._acts.attached().items() if peer.serves and not peer.engines]
        hosts = {id for engine in targets for id in self._acts.hosts_of(engine)}
        return {*hosts, *(idle if self._record.report.attempt == 1 else [])}

    def still_there(
        self, attempt: SyncAttempt, targets: Mapping[EngineId, PeerId], prepared: Collection[PeerId]
    ) -> dict[EngineId, PeerId]:
        """While it was on its way engines may have left, by order, and others come: those take it, too, whose peers
        have the bytes."""
        acts = self._acts
        there: dict[EngineId, PeerId] = {}
        left_out = dict(attempt.without)
        for engine, now in sorted(acts.engines().items()):
            peer = acts.peer_of(engine)
            if engine in targets:
                there[engine] = targets[engine]
            elif (
                engine not in attempt.failed and peer is not None and self._has_bytes(engine, prepared) and now.healthy
            ):
                there[engine] = peer.id
                left_out.pop(engine, None)
                self._record.engine(engine, EngineSync.PREPARED, "came while the version was on its way")
        gone = [engine for engine in targets if engine not in there]
        if gone:
            self._record.without_engines(gone)
            self._record.note(f"{', '.join(sorted(gone))} left the fleet while the version was on its way")
        attempt.without = left_out
        if not there:
            raise SyncFailed("no_engines", "no engine is left that could have it", again=False)
        return there

    def _has_bytes(self, engine: EngineId, prepared: Collection[PeerId]) -> bool:
        return not self._acts.why_not_whole(engine) and set(self._acts.hosts_of(engine)) <= set(prepared)

    def targets(self, attempt: SyncAttempt) -> dict[EngineId, PeerId]:
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
