"""A daemon with a small site, its switches in a process of their own, an agent that reads this machine's rings, and the
jobs of fabric_job.py.

What became of each period is asked of the daemon afterwards, and of the switches what came to them and when.
"""

import json
import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import orchestrrl.integrations.instrument
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.fabric.site import site_text
from orchestrrl.integrations.instrument.rings import RingEvent, RingReader, list_rings
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess, until
from orchestrrl.lab.testbed.stack import JOURNAL_FILE, Stack
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.topology import Site, SwitchModel
from planner.fabric.windows import Interval

RANKS = 8
INSTRUMENT = Path(orchestrrl.integrations.instrument.__file__).parent
WORD_BYTES = 8
ANSWER_WITHIN_S = 300.0
STOP_WITHIN_S = 30.0
NANO = 1e-9
START, END = itemgetter(0), itemgetter(1)  # of an interval
SITE_FILE = "site.yaml"
PORTS = 12
ENTRIES = 1_000_000
PERIODS_ASKED = 1024
CLOCKS_AGREE_S = 0.05


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A change of circuits as the daemon reports it, and in seconds of this host's monotonic clock.

    `armed_s`: it was ready, and waited for a window. `received_s`: the first switch was asked, and `set_s`: the first
    mirror was told to move, by the switches' own word.
    """

    period: str
    report: fabric_pb2.CommitReport
    armed_s: float
    commanded_s: float
    usable_s: float
    received_s: float | None
    set_s: float | None


@dataclass(frozen=True, slots=True)
class PeriodOutcomes:
    """The fabric's status with the last periods, and their commits in order. `set_s`: when any switch's mirrors were
    told to move."""

    status: fabric_pb2.FabricStatus
    commits: Sequence[CommitRecord]
    set_s: Sequence[float]


class FabricDemoStack(Stack):
    """Made by `fabric_demo`; `folder` is its own."""

    @property
    def rings(self) -> Path:
        """Where jobs are recorded."""
        return self.folder / "rings"

    async def reads(self, job: str) -> None:
        """Return when the daemon knows that all ranks of the job are read: what they announce before may be lost."""

        async def are_read() -> bool:
            hosts = (await self.fabric()).hosts
            return any(each.job == job and len(each.ranks) == RANKS for host in hosts for each in host.jobs)

        await until(are_read, f"all ranks of {job} are read")

    async def outcome(self) -> PeriodOutcomes:
        """Return what the daemon and the switches report when no period is under way any more."""

        async def over() -> fabric_pb2.FabricStatus | None:
            status = await self.fabric(PERIODS_ASKED)
            return status if all(period.HasField("ended_unix_s") for period in status.periods) else None

        status = await until(over, "no period is under way")
        (host,) = status.hosts
        offset_s = time.monotonic() - time.time()  # daemon and switches have Unix time
        if abs(offset_s - host.offset_s) > CLOCKS_AGREE_S:
            raise Permanent(f"this host's clock was set meanwhile, by {offset_s - host.offset_s:g} s")
        noted = await self._noted(offset_s)
        reader = JournalReader(self.folder / JOURNAL_FILE)
        try:
            armed_s = [entry.at_s for entry in reader.since(0, (EntryKind.CIRCUITS_INTENT,), ENTRIES)]
        finally:
            reader.close()
        commits = [
            _commit(period.period, report, armed_s, offset_s, noted)
            for period in status.periods
            for report in period.commits
        ]
        return PeriodOutcomes(status, sorted(commits, key=lambda commit: commit.commanded_s), noted["set_s"])

    async def _noted(self, offset_s: float) -> dict[str, list[float]]:
        """What came to any of the switches, in order."""
        said = (await self.processes["switches"].request({})).values()
        return {
            what: sorted(at_s + offset_s for each in said for at_s in each[what]) for what in ("received_s", "set_s")
        }


@asynccontextmanager
async def fabric_demo(folder: Path, *, device_s: float, within_s: float = 10.0) -> AsyncIterator[FabricDemoStack]:
    async with FabricDemoStack(folder) as stack:
        options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": device_s}
        site = _site(device_s)
        (stack.folder / SITE_FILE).write_text(site_text(site))
        words = (sys.executable, "-m", "orchestrrl.lab.demo.fabric_switches", json.dumps(options))
        command = [*words, *(switch.id for switch in site.switches)]
        switches = stack.launch(LabProcess("switches", command, stack.folder, takes_input=True))
        ports = json.loads(await switches.next_line())
        targets = {id: {"target": f"127.0.0.1:{port}"} for id, port in ports.items()}
        await stack.start_daemon(
            {
                "fabric": {"site": SITE_FILE, "within_s": within_s, "min_fraction": 0.0},
                "ocs": [{"id": id, "driver": "grpc", "options": target} for id, target in targets.items()],
            }
        )
        stack.start_agent("--rings", str(stack.rings))
        yield stack


def _commit(
    period: str,
    report: fabric_pb2.CommitReport,
    armed_s: Sequence[float],
    offset_s: float,
    noted: dict[str, list[float]],
) -> CommitRecord:
    commanded_s, usable_s = report.commanded_unix_s + offset_s, report.usable_unix_s + offset_s

    def first(what: str) -> float | None:
        return next((at_s for at_s in noted[what] if commanded_s <= at_s <= usable_s), None)

    armed_unix_s = max(at_s for at_s in armed_s if at_s <= report.commanded_unix_s)
    received_s, set_s = first("received_s"), first("set_s")
    return CommitRecord(period, report, armed_unix_s + offset_s, commanded_s, usable_s, received_s, set_s)


def _site(device_s: float) -> Site:
    """Two PoDs that train, of four servers with a GPU each; every server is under a ToR of its own, which has two ports
    upwards, and an uplink has four lanes."""
    device = SwitchModel("shown", device_s, PORTS)
    return regular_site(
        SiteShape(
            train_pods=2,
            gen_pods=0,
            servers_per_pod=RANKS // 2,
            gpus_per_server=1,
            nics_per_server=1,
            servers_per_tor=1,
            tor_uplinks=2,
            core_lanes=4,
            agg_device=device,
            core_device=device,
        )
    )


# --- the jobs, which run in an environment that has torch


class Launcher:
    """Use as `async with`; `folder` is for its log and its jobs' rendezvous. Jobs that run are stopped at the end."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{INSTRUMENT}"}
        words = (python, "-m", "orchestrrl.lab.demo.fabric_job")
        self._process = LabProcess("torch", words, folder, environment=environment, cwd=folder, takes_input=True)

    async def __aenter__(self) -> Self:
        self._process.spawn()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._process.stop(STOP_WITHIN_S)

    async def start(self, name: str, window_s: float, rings: Path | None = None, stamps: Path | None = None) -> None:
        """Start a job. It is recorded in `rings`, and writes into `stamps` when its pauses begin."""
        if stamps is not None:
            stamps.write_bytes(bytes(2 * RANKS * WORD_BYTES))
        files = {"store": self.folder / f"{name}.store", "rings": rings, "stamps": stamps}
        paths = {what: None if path is None else str(path) for what, path in files.items()}
        await self._request(start=name, ranks=RANKS, window_s=window_s, **paths)

    async def turn(self, name: str, iterations: int) -> list[float]:
        """Seconds of each iteration: of its slowest rank."""
        taken_s: list[float] = await self._request(turn=name, iterations=iterations)
        return taken_s

    async def stop(self, name: str) -> list[int | None]:
        """The ranks' exit statuses."""
        statuses: list[int | None] = await self._request(stop=name)
        return statuses

    async def _request(self, **order: Any) -> Any:
        return await self._process.request(order, ANSWER_WITHIN_S)


# --- what the recorders of a job's ranks noted, as intervals: whether a change of circuits met traffic


def read_traces(rings: Path) -> dict[int, list[RingEvent]]:
    """Every rank's events. Raises Permanent where one has forgotten some."""
    found: dict[int, list[RingEvent]] = {}
    for path in list_rings(rings):
        with RingReader(path) as reader:
            events, lost = reader.events()
            rank = reader.header().rank
        if lost:
            raise Permanent(f"{path} has lost {lost} events: fewer iterations, or larger rings")
        found[rank] = events
    return found


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """`busy`: some collective of some rank was in flight; disjoint and ascending, by the host's monotonic clock."""

    busy: Sequence[Interval]

    @classmethod
    def of(cls, traces: Mapping[int, Iterable[RingEvent]]) -> "RecordedTraffic":
        """One that has not ended lasts for ever."""
        intervals = sorted(
            (event.start_ns * NANO, (event.end_ns or 2**62) * NANO)
            for events in traces.values()
            for event in events
            if event.is_collective
        )
        busy: list[Interval] = []
        for start_s, end_s in intervals:
            if busy and start_s <= busy[-1][1]:
                busy[-1] = busy[-1][0], max(busy[-1][1], end_s)
            else:
                busy.append((start_s, end_s))
        return cls(busy)

    def during(self, start_s: float, end_s: float) -> float:
        """For how many of these seconds there was some."""
        met = self.busy[bisect_right(self.busy, start_s, key=END) : bisect_left(self.busy, end_s, key=START)]
        return sum(min(until_s, end_s) - max(since_s, start_s) for since_s, until_s in met)

    def quiet_around(self, at_s: float) -> Interval | None:
        """The pause that this moment is in; None: it is in none, or outside of what was recorded."""
        index = bisect_right(self.busy, at_s, key=END)
        if index == 0 or index == len(self.busy) or self.busy[index][0] <= at_s:
            return None
        return self.busy[index - 1][1], self.busy[index][0]
