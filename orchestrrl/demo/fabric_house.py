"""A daemon with virtual switches, an agent, and two small training jobs on this machine: one recorded, one left alone.

The two take turns, so that their iterations can be compared in pairs. Afterwards every commit is held against what the
recorders of all ranks have: whether any collective was in flight between its order and its end.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import orchestrrl.instrument
from orchestrrl.errors import Permanent
from orchestrrl.instrument.rings import Reader, list_rings
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.windows import Interval

RANKS = 8
PORTS = 12
JOB = Path(__file__).parent / "fabric_job.py"
INSTRUMENT = Path(orchestrrl.instrument.__file__).parent
READY_WITHIN_S = 180.0
TURN_WITHIN_S = 600.0
PERIODS_ASKED = 1024


@dataclass(frozen=True, slots=True)
class Commit:
    """A change of circuits as the daemon tells of it, by the monotonic clock of this host."""

    opened_s: float
    until_s: float
    commanded_s: float
    usable_s: float
    done: bool

    def overlaps(self, busy: Sequence[Interval]) -> float:
        """For how many seconds of it traffic was in flight."""
        return sum(max(0.0, min(end_s, self.usable_s) - max(start_s, self.commanded_s)) for start_s, end_s in busy)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Periods by state and code, and every commit of theirs."""

    counts: dict[tuple[str, str], int]
    commits: list[Commit]
    clock_bound_s: float


class TrainingJob:
    """Eight ranks that wait for their turn."""

    def __init__(self, python: Path, folder: Path, name: str, window_s: float, rings: Path | None) -> None:
        self._python = python
        self._folder = folder
        self._name = name
        self._window_s = window_s
        self._rings = rings
        self._ranks: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        port = _free_port()
        for rank in range(RANKS):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(INSTRUMENT),
            }
            environment.pop("ORCHESTRRL_RECORDER", None)
            if self._rings is not None:
                environment["ORCHESTRRL_RECORDER"] = str(self._rings)
            with (self._folder / f"{self._name}-{rank}.log").open("ab") as log:
                self._ranks.append(
                    await asyncio.create_subprocess_exec(
                        str(self._python),
                        str(JOB),
                        "--window-s",
                        str(self._window_s),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        cwd=self._folder,
                    )
                )
        await asyncio.wait_for(asyncio.gather(*(self._line(rank) for rank in range(RANKS))), READY_WITHIN_S)

    async def turn(self, iterations: int) -> list[float]:
        """Seconds of each iteration: of its slowest rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"go {iterations}\n".encode())
        lines = await asyncio.wait_for(asyncio.gather(*(self._line(rank) for rank in range(RANKS))), TURN_WITHIN_S)
        return [max(times) for times in zip(*(json.loads(line) for line in lines), strict=True)]

    async def stop(self) -> None:
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        done, _ = await asyncio.wait([asyncio.ensure_future(rank.wait()) for rank in self._ranks], timeout=20)
        if len(done) < len(self._ranks):
            await _kill(self._ranks)

    async def _line(self, rank: int) -> str:
        process = self._ranks[rank]
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            said = (self._folder / f"{self._name}-{rank}.log").read_text()[-2000:]
            raise Permanent(f"rank {rank} of {self._name} has ended: {said}")
        return line.decode().strip()


class FabricHouse:
    """Use as `async with`. `folder` is its own."""

    def __init__(self, folder: Path, python: Path, *, window_s: float, device_s: float, within_s: float = 10.0) -> None:
        self.folder = folder
        self.rings = folder / "rings"
        self._window_s = window_s
        self._device_s = device_s
        self._within_s = within_s
        self.address = f"127.0.0.1:{_free_port()}"
        self.watched = TrainingJob(python, folder, "watched", window_s, self.rings)
        self.alone = TrainingJob(python, folder, "alone", window_s, None)
        self._ours: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> "FabricHouse":
        try:
            self._write_configuration()
            self._ours.append(await self._command("daemon", "-c", "orchestrrl.yaml"))
            assert self._ours[0].stdout is not None
            if not await asyncio.wait_for(self._ours[0].stdout.readline(), READY_WITHIN_S):
                raise Permanent((self.folder / "daemon.log").read_text()[-2000:])
            self._ours.append(await self._command("agent", "--rings", str(self.rings), "--daemon", self.address))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watched.stop()
        await self.alone.stop()
        for process in reversed(self._ours):
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._ours))

    async def outcome(self) -> Outcome:
        """What the daemon made of all periods so far."""
        async with ControlClient(self.address) as client:
            seen = await client.ask(client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=PERIODS_ASKED))
        (host,) = seen.hosts
        commits = [
            Commit(
                commit.window_opened_unix_s + host.offset_s,
                commit.window_until_unix_s + host.offset_s,
                commit.commanded_unix_s + host.offset_s,
                commit.usable_unix_s + host.offset_s,
                commit.done,
            )
            for period in seen.periods
            for commit in period.commits
        ]
        counts = {(each.state, each.code): each.count for each in seen.counts}
        return Outcome(counts, commits, host.bound_s)

    def busy(self) -> list[Interval]:
        """Every collective that any rank has recorded: seconds of the monotonic clock."""
        found: list[Interval] = []
        for path in list_rings(self.rings):
            with Reader(path) as reader:
                events, lost = reader.events()
                if lost:
                    raise Permanent(f"{path} has lost {lost} events: fewer iterations, or larger rings")
            found += [
                (event.start_ns * 1e-9, (event.end_ns or 2**62) * 1e-9) for event in events if event.is_collective
            ]
        return sorted(found)

    async def _command(self, *words: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "orchestrrl",
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
            )

    def _write_configuration(self) -> None:
        site = _site(self._device_s)
        (self.folder / "site.yaml").write_text(yaml.safe_dump(site, sort_keys=False))
        options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": self._device_s}
        document: dict[str, Any] = {
            "mode": "act",
            "listen": {"address": self.address},
            "journal": {"path": "journal.sqlite"},
            "fabric": {"site": "site.yaml", "within_s": self._within_s, "min_fraction": 0.0},
            "ocs": [{"id": switch["id"], "driver": "virtual", "options": options} for switch in site["switches"]],
        }
        (self.folder / "orchestrrl.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


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


async def _kill(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.kill()
    await asyncio.gather(*(process.wait() for process in processes))


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port
