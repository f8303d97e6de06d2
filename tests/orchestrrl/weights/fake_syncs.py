"""A fake weight sync without peers: it publishes a scripted sequence of reports when the test requests it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.weights.controller.reports import (
    EdgeTime,
    EngineStatus,
    EngineSync,
    PeerStatus,
    PhaseTime,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import PeerNews, PeerOrder
from orchestrrl.weights.publication import Publication
from planner.model import EngineId

BEGAN_S = 1_000_000.0


def phases(*seconds: tuple[SyncPhase, float], began_s: float = BEGAN_S) -> tuple[PhaseTime, ...]:
    """Return consecutive phases without gaps."""
    took = []
    for phase, phase_s in seconds:
        took.append(PhaseTime(phase, began_s, began_s + phase_s))
        began_s += phase_s
    return tuple(took)


def done(version: int = 7, *seconds: tuple[SyncPhase, float]) -> SyncReport:
    """Return the report of a completed version of 2 GB on two engines."""
    took = phases(
        *(
            seconds
            or ((SyncPhase.GATHER, 0.5), (SyncPhase.PHASE_A, 2.0), (SyncPhase.INSTALL, 1.0), (SyncPhase.RESUME, 0.5))
        )
    )
    return SyncReport(
        f"sync-{version}",
        version,
        SyncState.DONE,
        BEGAN_S,
        code="done",
        detail="2 engines have it",
        ended_s=took[-1].ended_s,
        published=(0,),
        phases=took,
        engines=(
            EngineStatus(EngineId("e0"), EngineSync.SERVES, install_s=0.9),
            EngineStatus(EngineId("e1"), EngineSync.SERVES, install_s=1.0),
        ),
        bytes=2_000_000_000,
        carried_bytes=4_000_000_000,
        arrived_bytes=4_000_000_000,
        estimate_s=1.8,
        lower_bound_s=1.6,
        naive_s=3.2,
        waves=2,
        edges=4,
        slowest=(
            EdgeTime("train0", "gen0", "A", 2_000_000_000, 1.9, 1.6),
            EdgeTime("gen0", "gen1", "B", 10**9, 0.9, 0.8),
        ),
    )


def carrying(version: int = 8) -> SyncReport:
    """Return the report of a version being carried to two engines, one of whose peers has all bytes."""
    return replace(
        done(version),
        state=SyncState.CARRYING,
        code="",
        detail="",
        ended_s=None,
        phases=(*phases((SyncPhase.GATHER, 0.5)), PhaseTime(SyncPhase.PHASE_A, BEGAN_S + 0.5)),
        engines=(
            EngineStatus(EngineId("e0"), EngineSync.PREPARED),
            EngineStatus(EngineId("e1"), EngineSync.WAITING, "gen1 has 500 MB of 2 GB"),
        ),
        arrived_bytes=2_500_000_000,
    )


PEERS = (
    PeerStatus("train0", "trainer", "node0", True, (), (7, 8), "train0", "train0-tor0"),
    PeerStatus("gen0", "engine", "node1", True, (EngineId("e0"),), (7, 8), "gen0", "gen0-tor0"),
    PeerStatus("gen1", "engine", "node2", False, (EngineId("e1"),), (7,), "gen0", "gen0-tor0"),
)


class FakeSyncs:
    """A fake WeightSync. The newest report is that of the running sync."""

    def __init__(self, *reports: SyncReport, committed: int | None = None) -> None:
        self.reports = {report.id: report for report in reports}
        self.committed = committed
        self.quarantined: tuple[EngineStatus, ...] = ()
        self.peers: tuple[PeerStatus, ...] = ()
        self.published: list[Publication] = []
        self.asked: list[tuple[str, str, str]] = []
        self.followed = 0  # number of current followers
        self.defects = 0
        self._queues: list[tuple[str, asyncio.Queue[SyncReport]]] = []

    def change(self, report: SyncReport) -> None:
        self.reports[report.id] = report
        for id, queue in self._queues:
            if id == report.id:
                queue.put_nowait(report)

    def publish(self, publication: Publication) -> str:
        if publication.version <= (self.committed or 0):
            raise ProblemFaults([f"version: must be above {self.committed}, got {publication.version}"])
        self.published.append(publication)
        report = replace(carrying(publication.version), state=SyncState.PUBLISHING, phases=(), engines=())
        self.reports.setdefault(report.id, report)
        return report.id

    async def follow(self, sync_id: str) -> AsyncIterator[SyncReport]:
        queue: asyncio.Queue[SyncReport] = asyncio.Queue()
        self._queues.append((sync_id, queue))
        self.followed += 1
        try:
            report = self.report(sync_id)
            yield report
            while not report.over:
                report = await queue.get()
                yield report
        finally:
            self.followed -= 1

    def report(self, sync_id: str = "", version: int | None = None) -> SyncReport:
        for report in self.history(0):
            if sync_id in ("", report.id) and version in (None, report.version):
                return report
        raise Permanent(
            f"there is no weight sync {sync_id or version}" if sync_id or version else "there is no weight sync"
        )

    def history(self, limit: int) -> list[SyncReport]:
        newest = list(reversed(self.reports.values()))
        return newest[: limit or None]

    def status(self) -> WeightsStatus:
        newest = self.history(1)
        return WeightsStatus(self.committed, newest[0] if newest else None, self.quarantined, self.peers)

    def abort(self, sync_id: str, reason: str) -> SyncReport:
        self.asked.append(("abort", sync_id, reason))
        report = self.report(sync_id)
        if report.over:
            raise Permanent(f"sync {report.id} is over: {report.state}")
        ended = replace(report, state=SyncState.ABORTED, code="operator", detail=reason, ended_s=BEGAN_S + 1)
        self.change(ended)
        return ended

    def install_now(self, sync_id: str, reason: str) -> SyncReport:
        self.asked.append(("install", sync_id, reason))
        report = self.report(sync_id)
        if report.state is not SyncState.PREPARED:
            raise Permanent(f"sync {report.id} is {report.state}, not prepared")
        begun = replace(report, state=SyncState.FENCING)
        self.change(begun)
        return begun


@dataclass
class FakeLine:
    peer: Peer
    heard: list[PeerNews] = field(default_factory=list)
    stamps_s: list[float] = field(default_factory=list)
    outgoing: asyncio.Queue[PeerOrder | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def orders(self) -> AsyncIterator[PeerOrder]:
        while (order := await self.outgoing.get()) is not None:
            yield order

    def on_news(self, news: PeerNews) -> None:
        self.heard.append(news)

    def stamped(self, sent_s: float) -> None:
        self.stamps_s.append(sent_s)

    def end(self) -> None:
        self.ended.set()
        self.outgoing.put_nowait(None)


class FakePeers:
    def __init__(self) -> None:
        self.lines: list[FakeLine] = []

    def attach(self, peer: Peer) -> FakeLine:
        if any(line.peer.id == peer.id and line.peer.host != peer.host for line in self.lines):
            raise Permanent(f"peer {peer.id} is on another host already")
        self.lines.append(FakeLine(peer))
        return self.lines[-1]
