"""A daemon with a small site, its switches in a process of their own, and an agent that reads this machine's rings.

What became of each period is asked of the daemon afterwards, and of the switches what came to them and when.
"""

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.lab.demo.fabric_jobs import RANKS
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import fabric_pb2

PORTS = 12
READY_WITHIN_S = 60.0
POLL_EVERY_S = 0.1
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


class FabricDemoStack:
    """Use as `async with`; `folder` is its own. Jobs are recorded in `rings`."""

    def __init__(self, folder: Path, *, device_s: float, within_s: float = 10.0) -> None:
        self.folder = folder
        self.rings = folder / "rings"
        self._device_s = device_s
        self._within_s = within_s
        self.address = f"127.0.0.1:{_free_port()}"
        self._ours: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> "FabricDemoStack":
        try:
            site = _site(self._device_s)
            options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": self._device_s}
            ids = [switch["id"] for switch in site["switches"]]
            module = ("-m", "orchestrrl.lab.demo.fabric_switches")
            self._switches = await self._run("switches", *module, json.dumps(options), *ids)
            self._write_configuration(site, json.loads(await _line(self._switches)))
            await _line(await self._run("daemon", "-m", "orchestrrl", "daemon", "-c", "orchestrrl.yaml"))
            await self._run("agent", "-m", "orchestrrl", "agent", "--rings", str(self.rings), "--daemon", self.address)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._ours):
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._ours))

    @property
    def running(self) -> bool:
        """Whether all processes of the running do."""
        return all(process.returncode is None for process in self._ours)

    async def reads(self, job: str) -> None:
        """Return when the daemon knows that all ranks of the job are read: what they announce before may be lost."""
        async with ControlClient(self.address) as client:
            while True:
                status = await client.call(client.fabric.GetFabric, fabric_pb2.GetFabricRequest())
                if any(each.job == job and len(each.ranks) == RANKS for host in status.hosts for each in host.jobs):
                    return
                await asyncio.sleep(POLL_EVERY_S)

    async def settled(self) -> fabric_pb2.FabricStatus:
        """What the daemon says when no period is under way any more."""
        async with ControlClient(self.address) as client:
            while True:
                status = await client.call(client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=PERIODS_ASKED))
                if all(period.HasField("ended_unix_s") for period in status.periods):
                    return status
                await asyncio.sleep(POLL_EVERY_S)

    async def outcome(self) -> PeriodOutcomes:
        """Once it is settled."""
        status = await self.settled()
        (host,) = status.hosts
        offset_s = time.monotonic() - time.time()  # nothing but the daemon's clock is ever in Unix time
        if abs(offset_s - host.offset_s) > CLOCKS_AGREE_S:
            raise Permanent(f"this host's clock was set meanwhile, by {offset_s - host.offset_s:g} s")
        noted = await self._noted()
        reader = JournalReader(self.folder / "journal.sqlite")
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
        assert self._switches.stdin is not None
        self._switches.stdin.write(b"\n")
        said = json.loads(await _line(self._switches))
        return {what: sorted(at_s for each in said.values() for at_s in each[what]) for what in ("received_s", "set_s")}

    async def _run(self, name: str, *words: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            started = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                limit=1 << 24,
            )
        self._ours.append(started)
        return started

    def _write_configuration(self, site: dict[str, Any], ports: dict[str, int]) -> None:
        (self.folder / "site.yaml").write_text(yaml.safe_dump(site, sort_keys=False))
        document: dict[str, Any] = {
            "mode": "act",
            "listen": {"address": self.address},
            "journal": {"path": "journal.sqlite"},
            "fabric": {"site": "site.yaml", "within_s": self._within_s, "min_fraction": 0.0},
            "ocs": [
                {"id": id, "driver": "grpc", "options": {"target": f"127.0.0.1:{port}"}} for id, port in ports.items()
            ],
        }
        (self.folder / "orchestrrl.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


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


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), READY_WITHIN_S)
    if not line:
        raise Permanent("a process has ended at once: see its log")
    return line.decode()


def _site(device_s: float) -> dict[str, Any]:
    """Two PoDs that train, of four servers with a GPU each; every server is under a ToR of its own, which has two ports
    upwards, and an uplink has four lanes."""
    pods, each = ("train0", "train1"), range(RANKS // 2)
    return {
        "link_gbps": 200,
        "nic_gbps": 200,
        "devices": {"shown": {"reconfiguration_s": device_s, "ports": PORTS}},
        "pods": [{"id": pod, "role": "train"} for pod in pods],
        "tors": [{"id": f"{pod}/t{index}", "pod": pod} for pod in pods for index in each],
        "uplinks": [{"id": f"{pod}/up", "pod": pod} for pod in pods],
        "servers": [
            {
                "id": f"{pod}/s{index}",
                "pod": pod,
                "gpus": str(number * len(each) + index),
                "tors": [f"{pod}/t{index}"],
            }
            for number, pod in enumerate(pods)
            for index in each
        ],
        "switches": [
            *(
                {
                    "id": f"{pod}/agg",
                    "tier": "agg",
                    "pod": pod,
                    "device": "shown",
                    "ports": {
                        **{f"{pod}/t{index}": f"{2 * index + 1}-{2 * index + 2}" for index in each},
                        f"{pod}/up": "9-12",
                    },
                }
                for pod in pods
            ),
            {
                "id": "core",
                "tier": "core",
                "device": "shown",
                "ports": {f"{pod}/up": f"{4 * number + 1}-{4 * number + 4}" for number, pod in enumerate(pods)},
            },
        ],
    }


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port
