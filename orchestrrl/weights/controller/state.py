"""The state of the fleet's weights and of each running sync, and their journal entries.

The journal entry `weights` is the point of no return. Before this entry the fleet has the previous version; after it,
the fleet has the new version, regardless of later failures.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, cut, shorten
from orchestrrl.core.journal.kinds import WEIGHT_SYNCS
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry
from orchestrrl.core.operation import check_record
from orchestrrl.core.operation_journal import OpenIntent, OperationJournal
from orchestrrl.weights.backends.base import TREE
from orchestrrl.weights.controller.reports import EngineStatus, EngineSync, PhaseTime, SyncPhase, SyncReport, SyncState
from orchestrrl.weights.model import VersionMap
from planner.model import EngineId, PeerId

logger = logging.getLogger(__name__)

REMEMBERED = 256  # reports kept of syncs that are over
NOTES, NOTE, WORDS = 64, 500, 3000  # limits of a report: notes, characters of one note, characters of its detail
# Prefix of the holder of the pause barrier's lease, by which a restarted daemon recognizes its own lease.
HOLDER = "weight sync "
LOOK_S = 0.25  # polling interval of waits
REPAIR = "repair"  # step name of a repair, journalled under the sync that committed the version


@dataclass(frozen=True, slots=True)
class EngineNow:
    """An engine of the fleet. Engines with equal configuration generate the same tokens from the same weights."""

    configuration: str
    healthy: bool = True
    url: str = ""  # empty: unknown


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """The fleet's version and the engines that have it. `quarantined` has the other engines, with reasons. `answers`
    maps each configuration to the tokens that its engines generated for the probe."""

    version: int
    sync: str
    has: tuple[EngineId, ...]
    quarantined: Mapping[EngineId, str] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()  # of the probe; empty if engines were not probed
    answers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()  # one per rank's publication
    at_s: float = 0.0
    backend: str = TREE
    before: int | None = None  # the fleet's newest version at the pause barrier at the time of the commit

    def __post_init__(self) -> None:
        if not 0 <= self.version < 2**64:
            raise ValueError(f"version must be from 0 to 2**64 - 1, got {self.version}")

    @property
    def is_kept(self) -> bool:
        """Return whether peers store the version, so that it can be installed again."""
        return self.backend == TREE

    def repaired(self, engine: EngineId) -> "CommittedVersion":
        others = self.left((engine,))
        return replace(others, has=tuple(sorted((*others.has, engine))))

    def lost(self, engine: EngineId, why: str) -> "CommittedVersion":
        others = self.left((engine,))
        return replace(others, quarantined={**others.quarantined, engine: why})

    def left(self, engines: Collection[EngineId]) -> "CommittedVersion":
        """Return a copy without `engines`, which have left the fleet."""
        has = tuple(engine for engine in self.has if engine not in engines)
        quarantined = {engine: why for engine, why in self.quarantined.items() if engine not in engines}
        return replace(self, has=has, quarantined=quarantined)


@dataclass(frozen=True, slots=True)
class FleetWeights:
    """The state of the fleet's weights. `committed` is the fleet's version, or None if no version is committed. In the
    latter case, `spoilt` has the engines that may no longer have their initial weights, with reasons."""

    committed: CommittedVersion | None = None
    spoilt: Mapping[EngineId, str] = field(default_factory=dict)

    @property
    def version(self) -> int | None:
        return None if self.committed is None else self.committed.version

    @property
    def quarantined(self) -> Mapping[EngineId, str]:
        return self.spoilt if self.committed is None else self.committed.quarantined

    def left(self, engines: Collection[EngineId]) -> "FleetWeights":
        spoilt = {engine: why for engine, why in self.spoilt.items() if engine not in engines}
        return FleetWeights(None if self.committed is None else self.committed.left(engines), spoilt)


SYNC = TypeAdapter(SyncReport)
_FLEET = TypeAdapter(FleetWeights)
_MAP = TypeAdapter(VersionMap)


class SyncRecord:
    """The report of one sync, which changes while the sync runs. Followers are notified of changes."""

    def __init__(self, report: SyncReport, clock: Clock) -> None:
        self.report = report
        self._clock = clock
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.report.id

    def put(self, **changes: Any) -> None:
        if "detail" in changes:
            changes["detail"] = cut(changes["detail"], WORDS)
        self.report = replace(self.report, **changes)
        self._changed.set()

    def state(self, state: SyncState) -> None:
        logger.info("weight sync %s of version %d: %s", self.id, self.report.version, state)
        self.put(state=state, detail="")

    def note(self, *words: str) -> None:
        """Add notes to the report, without duplicates and up to NOTES in total."""
        notes = tuple(dict.fromkeys([*self.report.notes, *(cut(word, NOTE) for word in words if word)]))
        self.put(notes=notes[:NOTES])

    def begins(self, phase: SyncPhase) -> None:
        self.put(phases=(*self.report.phases, PhaseTime(phase, self._clock.now_s())))

    def ends(self, phase: SyncPhase) -> None:
        """Record the end of the most recent open phase of this kind, if there is one."""
        phases = list(self.report.phases)
        for place in reversed(range(len(phases))):
            if phases[place].phase is phase and phases[place].ended_s is None:
                phases[place] = replace(phases[place], ended_s=max(self._clock.now_s(), phases[place].began_s))
                return self.put(phases=tuple(phases))
        return None

    @contextlib.contextmanager
    def phase(self, phase: SyncPhase) -> Iterator[None]:
        self.begins(phase)
        try:
            yield
        finally:
            self.ends(phase)

    async def wait_while(self, why: Callable[[], str]) -> None:
        """Wait while `why` returns a reason. The report's detail shows the reason during the wait."""
        told = ""
        while reason := why():
            if reason != told:
                told = reason
                self.put(detail=f"waiting: {reason}")
            await self._clock.sleep(LOOK_S)
        if told:
            self.put(detail="")

    def engine(self, engine: EngineId, state: EngineSync, detail: str = "", install_s: float | None = None) -> None:
        stands = {each.engine: each for each in self.report.engines}
        before = stands.get(engine)
        elapsed_s = install_s if install_s is not None else before.install_s if before else 0.0
        stands[engine] = EngineStatus(engine, state, cut(detail), elapsed_s)
        self.put(engines=tuple(stands[each] for each in sorted(stands)))

    def without_engines(self, gone: Collection[EngineId]) -> None:
        """Remove from the report the engines that have left the fleet."""
        if any(each.engine in gone for each in self.report.engines):
            self.put(engines=tuple(each for each in self.report.engines if each.engine not in gone))

    def over(self, state: SyncState, code: str, detail: str) -> None:
        now_s = self._clock.now_s()
        phases = tuple(
            each if each.ended_s is not None else replace(each, ended_s=now_s) for each in self.report.phases
        )
        self.put(state=state, code=code, detail=detail, phases=phases, ended_s=now_s)
        level = logging.INFO if state is SyncState.DONE else logging.WARNING
        logger.log(level, "weight sync %s of version %d: %s (%s) %s", self.id, self.report.version, state, code, detail)

    async def follow(self) -> AsyncIterator[SyncReport]:
        """Yield the report now and after each change, until the sync is over."""
        seen: SyncReport | None = None
        while seen is None or not seen.over:
            if self.report is seen:
                self._changed.clear()
                await self._changed.wait()
                continue
            seen = self.report
            yield seen


@dataclass(slots=True)
class SyncAttempt:
    """The state of one attempt to bring a version to engines."""

    failed: Mapping[EngineId, str] = field(default_factory=dict)  # engines left out because an earlier attempt failed
    targets: Collection[EngineId] = ()  # engines that receive the version
    receivers: Collection[PeerId] = ()
    map: VersionMap | None = None  # with all checksums, once every receiver has all bytes
    lease: str = ""  # id of the barrier's lease; empty if another holder has closed it or peers pause the engines
    changed: set[EngineId] = field(default_factory=set)
    untouched: set[EngineId] = field(default_factory=set)  # subset of `changed` whose weights proved unchanged
    reported: dict[EngineId, int] = field(default_factory=dict)  # versions at the barrier before `changed` was set
    verified: Sequence[EngineId] = ()
    prompt: tuple[int, ...] = ()  # with which the verified engines were probed; empty if they were not
    answers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tokens of the probe, by configuration


class WeightBook:
    """The fleet's weights and all syncs, persisted in the journal. The map of the committed version is in a separate
    file in the journal's folder."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self.log = OperationJournal(journal, clock, WEIGHT_SYNCS)
        self.fleet = FleetWeights()
        self.open: dict[str, SyncRecord] = {}  # syncs that are not over, by id, oldest first
        self.over: deque[SyncReport] = deque(maxlen=REMEMBERED)
        self.map: VersionMap | None = None  # of the committed version, with checksums
        self.recovered_s: float | None = None  # when state of an earlier daemon was recovered; None if there was none
        self.was_reported = False  # the pause barrier has received the committed version as the fleet's newest

    def recover(self) -> list[OpenIntent[SyncReport]]:
        """Recover the state from the journal; return the syncs that the previous daemon left open."""
        fleet = self._journal.newest(EntryKind.WEIGHTS, lambda body: _FLEET.validate_python(body["fleet"]))
        self.fleet = fleet or FleetWeights()
        for entry in self._journal.tail(REMEMBERED, (EntryKind.SYNC_ENDED,)):
            report = self._journal.interpret(entry, _report_from)
            if report is not None:
                self.over.append(report)
        self.map = self._read_map()
        left = self.left_open()
        self.open = {each.id: SyncRecord(each.intent, self._clock) for each in left}
        if left or self.fleet.committed is not None:
            self.recovered_s = self._clock.now_s()
        return left

    def left_open(self) -> list[OpenIntent[SyncReport]]:
        left = self.log.left_open(lambda entry: _report_from(entry.body))
        return [replace(each, steps=tuple(filter(self._is_step, each.steps))) for each in left]

    def _is_step(self, entry: JournalEntry) -> bool:
        """Return whether the entry is a readable step of a sync. Return False for repairs of engines."""
        return entry.body.get("step") != REPAIR and self._journal.interpret(entry, _checked_step) is not None

    def began(self, report: SyncReport) -> SyncRecord:
        self.log.begin(report.id, sync_body(report))
        record = self.open[report.id] = SyncRecord(report, self._clock)
        return record

    def repairs(self, sync_id: str, engine: EngineId) -> None:
        """Record in the journal that the committed version is about to be installed into an engine."""
        self.log.step(sync_id, {"step": REPAIR, "engines": [engine]})

    def ended(self, record: SyncRecord) -> None:
        report = record.report
        self.over.append(report)  # it is over even if the journal cannot record it
        self.open.pop(record.id, None)
        try:
            self.log.end(report.id, sync_body(report))
        except OrchestrRLError as error:
            logger.error("the end of weight sync %s could not be written to the journal: %s", report.id, error)

    def commit(self, committed: CommittedVersion, map: VersionMap) -> None:
        """Commit a version as the fleet's version. Once it is committed, the sync is no longer rolled back."""
        self._write_map(committed.sync, map)
        self.stands(FleetWeights(committed))
        self.map = map
        self.was_reported = False

    def amend(self, committed: CommittedVersion) -> None:
        """Record `committed` in the journal if it differs from the recorded state, for example because an engine was
        repaired."""
        if committed != self.fleet.committed:
            self.stands(replace(self.fleet, committed=committed))

    def stands(self, fleet: FleetWeights) -> None:
        """Record `fleet` in the journal as the current state of the fleet's weights."""
        body = {"fleet": _FLEET.dump_python(fleet, mode="json")}
        self._journal.append(self._clock.now_s(), EntryKind.WEIGHTS, "", body)
        self.fleet = fleet

    # --- the map, which may be large: it has a checksum per block

    def _map_path(self, sync_id: str) -> Path:
        return self._journal.path.with_name(f"{self._journal.path.name}.weights-{sync_id}.json")

    def _write_map(self, sync_id: str, map: VersionMap) -> None:
        path = self._map_path(sync_id)
        half = path.with_suffix(".half")
        try:
            half.write_bytes(_MAP.dump_json(map))
            os.replace(half, path)
        except OSError as error:
            logger.error("%s: %s; after a restart engines that lack bytes wait for the next version", path, error)
        for other in path.parent.glob(f"{self._journal.path.name}.weights-*"):
            if other not in (path, self._map_path(self.fleet.committed.sync if self.fleet.committed else "")):
                other.unlink(missing_ok=True)

    def _read_map(self) -> VersionMap | None:
        if self.fleet.committed is None:
            return None
        path = self._map_path(self.fleet.committed.sync)
        try:
            return _MAP.validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            logger.error("%s: %s; engines that lack bytes wait for the next version", path, error)
            return None


def sync_body(report: SyncReport) -> Mapping[str, Any]:
    """Return the body of the journal entries that begin and end a sync."""
    return {"report": SYNC.dump_python(report, mode="json")}


def _checked_step(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a step's journal entry after checking the fields that a resumed sync reads. Raises ValueError
    if a field is invalid."""
    if not all(isinstance(engine, str) for engine in body["engines"]):
        raise ValueError(f"engines: must be strings, got {shorten(body['engines'])}")
    return check_record(body)


def _report_from(body: Mapping[str, Any]) -> SyncReport:
    return SYNC.validate_python(body["report"])
