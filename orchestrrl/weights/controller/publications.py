"""Collect what each trainer rank publishes of a version until it is complete, and report the outcome of versions."""

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.delivery import REATTACH_S
from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable, few
from orchestrrl.weights.backends.base import BACKENDS, DirectBackend
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.reports import SyncPhase, SyncReport, SyncState
from orchestrrl.weights.controller.state import REMEMBERED, SyncRecord, WeightBook
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.publication import NOT_ATTACHED, PUBLICATION, Publication


@dataclass(slots=True)
class PublicationSet:
    """One version's words so far."""

    version: int
    run: str
    world: int
    by_s: float  # when the last is to have come
    by_rank: dict[int, Publication] = field(default_factory=dict)  # by rank
    tensors: dict[str, tuple[TensorMeta, int]] = field(default_factory=dict)  # and the rank that told it first

    def take(self, publication: Publication) -> None:
        """It goes together with the others."""
        self.by_rank[publication.rank] = publication
        for tensor in publication.tensors:
            self.tensors.setdefault(tensor.name, (tensor, publication.rank))

    def faults(self, publication: Publication) -> list[str]:
        """What is wrong with it, or does not go together with what other ranks have said. These agree among themselves:
        each is not looked at again for each of a thousand."""
        faults = publication_faults(publication)
        other = next((each for each in self.by_rank.values() if each.rank != publication.rank), None)
        for name in ("world", "install", "backend", "probe", "expected", "options") if other is not None else ():
            one, two = getattr(other, name), getattr(publication, name)
            if one != two:
                faults.append(f"{name}: rank {other.rank if other else 0} has said {one!r}, got {two!r}")
        for place, tensor in enumerate(publication.tensors):
            before, rank = self.tensors.get(tensor.name, (tensor, publication.rank))
            if before != tensor and rank != publication.rank:
                faults.append(
                    f"tensors[{place}]: {tensor.name} is {before.dtype} {before.shape} of rank {rank},"
                    f" got {tensor.dtype} {tensor.shape}"
                )
        return faults

    @property
    def complete(self) -> bool:
        return len(self.by_rank) == self.world

    @property
    def publications(self) -> tuple[Publication, ...]:
        return tuple(self.by_rank[rank] for rank in sorted(self.by_rank))


class PublicationCollector:
    """`complete` is called with a version of which all ranks have spoken; `running` is the one that is carried out."""

    def __init__(
        self,
        book: WeightBook,
        hub: PeerHub,
        clock: Clock,
        settings: WeightSettings,
        complete: Callable[[PublicationSet, SyncRecord], None],
        running: Callable[[], SyncRecord | None],
    ) -> None:
        self.records: dict[str, SyncRecord] = {}  # that are not over, and those that were since the start
        self._book = book
        self._hub = hub
        self._clock = clock
        self._settings = settings
        self._complete = complete
        self._running = running
        self._numbers = itertools.count(1)
        self._collecting: tuple[PublicationSet, SyncRecord] | None = None

    # --- trainers

    def take(self, publication: Publication, backend: DirectBackend | None) -> str:
        """The sync's id. Raises ProblemFaults; Retryable while the rank's peer has not attached yet."""
        collection, record = self._collection(publication)
        faults = collection.faults(publication)
        if backend is not None:
            faults += backend.faults(publication)
        before = collection.by_rank.get(publication.rank)
        if before is not None and not same_publication(before, publication):
            faults.append(f"rank: {publication.rank} has said otherwise of version {publication.version} before")
        if faults:
            raise ProblemFaults(faults)
        if backend is None and publication.peer not in self._hub.peers:  # of a daemon that has just come back
            raise Retryable(f"{NOT_ATTACHED}, got {publication.peer!r}", REATTACH_S)
        if record is None:
            record = self._begin(collection, publication)
        collection.take(publication)
        record.put(published=tuple(sorted(collection.by_rank)))
        if collection.complete:
            self._collecting = None
            self._complete(collection, record)
        return record.id

    @property
    def collecting(self) -> SyncRecord | None:
        """Of the version of which some ranks have spoken."""
        return None if self._collecting is None else self._collecting[1]

    def expire_ranks(self) -> None:
        if self._collecting is None or self._clock.now_s() < self._collecting[0].by_s:
            return
        collection, _ = self._collecting
        missing = [str(rank) for rank in range(collection.world) if rank not in collection.by_rank]
        words = f"ranks {few(missing, 32, ', ')} said nothing within {self._settings.publish_within_s:g} s"
        self.abandon(SyncState.ABORTED, "trainer_lost", words)

    def abandon(self, state: SyncState, code: str, why: str) -> None:
        """End the version of which some ranks have published; harmless where there is none."""
        if self._collecting is not None:
            record, self._collecting = self._collecting[1], None
            self.drop(record, state, code, why)

    def drop(self, record: SyncRecord, state: SyncState, code: str, why: str) -> None:
        """End a version that has touched nothing yet."""
        record.over(state, code, why)
        self._book.ended(record.report)

    # --- what became of versions

    def report(self, sync_id: str = "", version: int | None = None) -> SyncReport:
        """Neither: the one under way, else the last. Raises Permanent where there is none."""
        for report in self.history(0):
            if (not sync_id or report.id == sync_id) and (version is None or report.version == version):
                return report
        what = f" {sync_id}" if sync_id else f" of version {version}" if version is not None else ""
        raise Permanent(f"there is no weight sync{what}")

    def history(self, limit: int) -> list[SyncReport]:
        """Newest first; 0: all that are remembered."""
        running = self._running()
        first = [] if running is None else [running.report]
        rest = [record.report for record in reversed(self.records.values()) if not record.report.over]
        reports = {report.id: report for report in (*first, *rest, *reversed(self._book.over))}
        return list(reports.values())[: limit or None]

    async def follow(self, sync_id: str) -> AsyncIterator[SyncReport]:
        """Raises Permanent."""
        record = self.records.get(sync_id)
        if record is None:
            yield self.report(sync_id)
            return
        async for report in record.follow():
            yield report

    # --- inside

    def _collection(self, publication: Publication) -> tuple[PublicationSet, SyncRecord | None]:
        """Those words that it belongs to; a record where there are some."""
        if self._collecting is not None:
            collection, record = self._collecting
            if (collection.version, collection.run) == (publication.version, publication.run):
                return collection, record
        by_s = self._clock.now_s() + self._settings.publish_within_s
        return PublicationSet(publication.version, publication.run, publication.world, by_s), None

    def _begin(self, collection: PublicationSet, publication: Publication) -> SyncRecord:
        now_s = self._clock.now_s()
        id = f"s{self._book.generation}-{next(self._numbers)}"
        report = SyncReport(
            id, publication.version, SyncState.PUBLISHING, now_s, backend=publication.backend, world=publication.world
        )
        self._book.began(report)
        if self._collecting is not None:
            why = f"{self._collecting[1].report.version} was not complete when {publication.version} came"
            self.abandon(SyncState.SUPERSEDED, "superseded", why)
        for old in [each.id for each in self.records.values() if each.report.over][:-REMEMBERED]:
            del self.records[old]
        record = self.records[id] = SyncRecord(report, self._clock)
        record.begins(SyncPhase.PUBLISH)
        self._collecting = (collection, record)
        return record


def same_publication(one: Publication, other: Publication) -> bool:
    """Whether they say the same, whenever they were sent."""
    return _timeless(one) == _timeless(other)


def publication_faults(publication: Publication) -> list[str]:
    """By itself."""
    faults = []
    if publication.backend not in BACKENDS:
        faults.append(f"backend: must be one of {', '.join(BACKENDS.names())}, got {publication.backend!r}")
    if not publication.tensors:
        faults.append("tensors: must not be empty, got []")
    seen: set[str] = set()
    for place, tensor in enumerate(publication.tensors):
        if tensor.name in seen:
            faults.append(f"tensors[{place}].name: is there twice, got {tensor.name!r}")
        seen.add(tensor.name)
    if bool(publication.expected) and not publication.probe:
        faults.append("probe: must be told where expected is, got []")
    return faults


def fingerprints(publications: Iterable[Publication]) -> tuple[str, ...]:
    """Return one fingerprint for each rank, of what it published and by which start of the trainer, sorted."""
    return tuple(sorted(map(fingerprint, publications)))


def fingerprint(publication: Publication) -> str:
    return f"{publication.rank}:{hashlib.sha256(PUBLICATION.dump_json(_timeless(publication))).hexdigest()[:32]}"


def _timeless(publication: Publication) -> Publication:
    return replace(publication, began_s=0.0, offload_s=0.0, gather_s=0.0)
