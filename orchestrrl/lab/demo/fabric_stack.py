"""A daemon with a small site, its switches in a process of their own, and an agent that reads this machine's rings.

What became of each period is asked of the daemon afterwards, and of the switches what came to them and when.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.fabric.site import site_text
from orchestrrl.lab.demo.fabric_jobs import RANKS
from orchestrrl.lab.testbed.processes import LabProcess, until
from orchestrrl.lab.testbed.stack import JOURNAL_FILE, Stack
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.generate import regular_site
from planner.fabric.shape import SiteShape
from planner.fabric.topology import Site, SwitchModel

SITE_FILE = "site.yaml"
PORTS = 12
ENTRIES = 1_000_000
PERIODS_ASKED = 1024
CLOCKS_AGREE_S = 0.05


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A change of circuits, all in seconds of this host's monotonic clock.

    `armed_s`: it was ready, and waited for a window. `received_s`: the first switch was asked, and `set_s`: the first
    mirror was told to move, by the switches' own word.
    """

    period: str
    armed_s: float
    commanded_s: float
    usable_s: float
    has_window: bool
    done: bool
    received_s: float | None
    set_s: float | None


@dataclass(frozen=True, slots=True)
class PeriodOutcomes:
    """Of the last periods, in the order of their ends; `counts` is by state and code as the daemon counts them."""

    periods: Sequence[fabric_pb2.PeriodReport]
    counts: Counter[tuple[str, str]]
    commits: Sequence[CommitRecord]
    ranks: Sequence[int]  # whose recorders the daemon knows to be read
    set_s: Sequence[float]  # when any switch's mirrors were told to move


class FabricDemoStack(Stack):
    """Made by `fabric_demo`; `folder` is its own."""

    @property
    def rings(self) -> Path:
        """Where jobs are recorded."""
        return self.folder / "rings"

    @property
    def running(self) -> bool:
        return all(process.running for process in self.processes.values())

    async def reads(self, job: str) -> None:
        """Return when the daemon knows that all ranks of the job are read: what they announce before may be lost."""

        async def are_read() -> bool:
            hosts = (await self.fabric()).hosts
            return any(each.job == job and len(each.ranks) == RANKS for host in hosts for each in host.jobs)

        await until(are_read, f"all ranks of {job} are read")

    async def settled(self) -> fabric_pb2.FabricStatus:
        """What the daemon says when no period is under way any more."""

        async def over() -> fabric_pb2.FabricStatus | None:
            status = await self.fabric(PERIODS_ASKED)
            return status if all(period.HasField("ended_unix_s") for period in status.periods) else None

        return await until(over, "no period is under way")

    async def outcome(self) -> PeriodOutcomes:
        """Once it is settled."""
        status = await self.settled()
        (host,) = status.hosts
        offset_s = time.monotonic() - time.time()  # nothing but the daemon's clock is ever in Unix time
        if abs(offset_s - host.offset_s) > CLOCKS_AGREE_S:
            raise Permanent(f"this host's clock was set meanwhile, by {offset_s - host.offset_s:g} s")
        noted = await self._noted()
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
        counts = Counter({(each.state, each.code): each.count for each in status.counts})
        ranks = [rank for job in host.jobs for rank in job.ranks]
        return PeriodOutcomes(
            status.periods[::-1], counts, sorted(commits, key=lambda commit: commit.commanded_s), ranks, noted["set_s"]
        )

    async def _noted(self) -> dict[str, list[float]]:
        """What came to any of the switches, in order."""
        said = await self.processes["switches"].request({})
        return {what: sorted(at_s for each in said.values() for at_s in each[what]) for what in ("received_s", "set_s")}


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

    return CommitRecord(
        period,
        max(at_s for at_s in armed_s if at_s <= report.commanded_unix_s) + offset_s,
        commanded_s,
        usable_s,
        report.window_opened_unix_s > 0,
        report.done,
        first("received_s"),
        first("set_s"),
    )


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
