"""The processes of the fabric demo: a daemon with a small site, its switches in a separate process, an agent that reads
the rings on this machine, and the jobs of fabric_job.py.

Afterwards, the daemon reports the outcome of each period, the switches report when they received commands, and the
recorders of the job's ranks report when collectives were in flight.
"""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import orchestrrl.integrations.instrument
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.fabric.site import site_text
from orchestrrl.integrations.instrument.rings import RingEvent, RingReader, list_rings
from orchestrrl.lab.testbed.processes import REPOSITORY, VLLM_PYTHON, LabProcess, until
from orchestrrl.lab.testbed.stack import JOURNAL_FILE, Stack
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.topology import Site, SwitchModel
from planner.fabric.windows import Interval, common_quiet

RANKS = 8
INSTRUMENT = Path(orchestrrl.integrations.instrument.__file__).parent
WORD_BYTES = 8
SITE_FILE = "site.yaml"
PORTS = 12
ENTRIES = 1_000_000
PERIODS_ASKED = 1024
CLOCKS_AGREE_S = 0.05


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A change of circuits as reported by the daemon, with times of this host's monotonic clock.

    At `armed_s`, the change was ready and began to wait for a window. The switches report `received_s`, the time at
    which the first switch received its command, and `set_s`, the time at which the first mirror was commanded to move.
    """

    period: str
    report: fabric_pb2.CommitReport
    armed_s: float
    commanded_s: float
    usable_s: float
    received_s: float | None
    set_s: float | None


class RecordedTraffic:
    """The recorded events of every rank, and the quiet intervals during which no rank has a collective in flight. The
    intervals are disjoint and ascending. Their ends are times of the host's monotonic clock in seconds; the first and
    the last interval are unbounded."""

    def __init__(self, traces: Mapping[int, Sequence[RingEvent]]) -> None:
        """Compute the quiet intervals. A collective that has not ended is treated as in flight forever."""
        self.traces = traces
        collectives = [event for events in traces.values() for event in events if event.is_collective]
        busy = [(event.start_ns / 1e9, (event.end_ns or 2**62) / 1e9) for event in collectives]
        self._quiet = common_quiet([[(-inf, -inf), *busy, (inf, inf)]])

    def during(self, start_s: float, end_s: float) -> float:
        """Return for how many seconds between `start_s` and `end_s` a collective was in flight."""
        quiet_s = (min(until_s, end_s) - max(since_s, start_s) for since_s, until_s in self._quiet)
        return end_s - start_s - sum(each_s for each_s in quiet_s if each_s > 0)

    def quiet_around(self, at_s: float) -> Interval | None:
        """Return the pause between two collectives that contains `at_s`. Return None if a collective is in flight at
        that time, or if the time is before the first or after the last collective."""
        return next((pause for pause in self._quiet[1:-1] if pause[0] <= at_s < pause[1]), None)


@dataclass(frozen=True, slots=True)
class PeriodOutcomes:
    """The fabric's status with its last periods, the commits of these periods in chronological order, and the recorded
    traffic of the jobs. `set_s` contains the times at which the mirrors of any switch were commanded to move."""

    status: fabric_pb2.FabricStatus
    commits: Sequence[CommitRecord]
    set_s: Sequence[float]
    traffic: RecordedTraffic

    @property
    def outside(self) -> list[CommitRecord]:
        """The commits during which a rank had a collective in flight."""
        return [each for each in self.commits if self.traffic.during(each.commanded_s, each.usable_s) > 0]


class FabricDemoStack(Stack):
    """The processes of the fabric demo in their own folder, created by `fabric_demo`. Jobs run in vLLM's environment,
    which has torch."""

    @property
    def rings(self) -> Path:
        """The folder in which the recorders of jobs write their rings."""
        return self.folder / "rings"

    async def start_job(self, name: str, window_s: float, *, recorded: bool = True) -> Path:
        """Start a job and return the path of the file to which it writes the start times of its pauses. For a recorded
        job, wait until the daemon reports all ranks of the job, because earlier announcements may be lost."""
        stamps = self.folder / f"{name}.stamps"
        stamps.write_bytes(bytes(2 * RANKS * WORD_BYTES))
        files = {"store": str(self.folder / f"{name}.store"), "stamps": str(stamps)}
        rings = str(self.rings) if recorded else None
        await self.job_request(start=name, ranks=RANKS, window_s=window_s, rings=rings, **files)

        async def are_read() -> bool:
            hosts = (await self.fabric()).hosts
            return any(each.job == name and len(each.ranks) == RANKS for host in hosts for each in host.jobs)

        if recorded:
            await until(are_read, f"all ranks of {name} are read")
        return stamps

    async def turn(self, job: str, iterations: int) -> list[float]:
        """Run iterations of a job. Return the duration of each iteration on its slowest rank, in seconds."""
        taken_s: list[float] = await self.job_request(turn=job, iterations=iterations)
        return taken_s

    async def job_request(self, **order: Any) -> Any:
        """Send an order to the process that runs fabric_job.py and return the response."""
        return await self.processes["torch"].request(order)

    async def outcome(self) -> PeriodOutcomes:
        """Wait until all periods have ended, and return the reports of the daemon, the switches and the recorders.
        Raises Permanent if an event was overwritten before it was read, or the host's clock was changed during the
        run."""

        async def over() -> fabric_pb2.FabricStatus | None:
            status = await self.fabric(PERIODS_ASKED)
            return status if all(period.HasField("ended_unix_s") for period in status.periods) else None

        status = await until(over, "all periods have ended")
        (host,) = status.hosts
        offset_s = time.monotonic() - time.time()  # daemon and switches report Unix time
        if abs(offset_s - host.offset_s) > CLOCKS_AGREE_S:
            raise Permanent(f"this host's clock was changed during the run by {offset_s - host.offset_s:g} s")
        switches = (await self.processes["switches"].request({})).values()
        noted = {what: sorted(at_s for each in switches for at_s in each[what]) for what in ("received_s", "set_s")}
        reader = JournalReader(self.folder / JOURNAL_FILE)
        try:
            armed_s = [entry.at_s for entry in reader.since(0, (EntryKind.CIRCUITS_INTENT,), ENTRIES)]
        finally:
            reader.close()

        def commit(period: str, report: fabric_pb2.CommitReport) -> CommitRecord:
            from_s, to_s = report.commanded_unix_s, report.usable_unix_s
            first = {
                what: next((s + offset_s for s in times if from_s <= s <= to_s), None) for what, times in noted.items()
            }
            armed_unix_s = max(at_s for at_s in armed_s if at_s <= from_s)
            return CommitRecord(period, report, armed_unix_s + offset_s, from_s + offset_s, to_s + offset_s, **first)

        commits = [commit(period.period, report) for period in status.periods for report in period.commits]
        return PeriodOutcomes(
            status,
            sorted(commits, key=lambda commit: commit.commanded_s),
            noted["set_s"],
            RecordedTraffic(_traces(self.rings)),
        )


def _traces(rings: Path) -> dict[int, list[RingEvent]]:
    found: dict[int, list[RingEvent]] = {}
    for path in list_rings(rings):
        with RingReader(path) as reader:
            events, lost = reader.events()
            found[reader.header().rank] = events
        if lost:
            raise Permanent(f"{path} has lost {lost} events: run fewer iterations, or use larger rings")
    return found


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
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{INSTRUMENT}"}
        job_words = (VLLM_PYTHON, "-m", "orchestrrl.lab.demo.fabric_job")
        job_folder = stack.folder
        stack.launch(
            LabProcess("torch", job_words, job_folder, environment=environment, cwd=job_folder, takes_input=True)
        )
        yield stack


def _site(device_s: float) -> Site:
    """Return a site of two training PoDs with four servers of one GPU each. Every server has its own ToR with two
    fibres, and every PoD has four lanes to the core."""
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
