"""Two processes that write rings, an agent that reads them, and a daemon with a small optical fabric of its own."""

import contextlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from front import WITHIN_S

import orchestrrl.integrations.instrument
from ocs_drivers.model import CircuitState
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.integrations.instrument.rings import RingReader, list_rings
from orchestrrl.lab.testbed.processes import LabProcess
from orchestrrl.lab.testbed.stack import ANY_PORT, JOURNAL_FILE, Stack
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.ocs_client import GrpcSwitch
from orchestrrl.rpc.pb import fabric_pb2
from orchestrrl.rpc.plain_values import plain

RANK = Path(__file__).with_name("traced_rank.py")
VIRTUAL_PROCESS = Path(__file__).parents[1] / "ocs_drivers" / "virtual_process.py"
RANKS = 2
SERVERS = 4
PORTS = 2 * SERVERS
DEVICE_S = 0.005
SWITCH = "train0/agg"

SITE: dict[str, Any] = {
    "link_gbps": 200,
    "nic_gbps": 200,
    "devices": {"small": {"reconfiguration_s": DEVICE_S, "ports": PORTS}},
    "pods": [{"id": "train0", "role": "train"}],
    "tors": [{"id": f"train0/t{index}", "pod": "train0"} for index in range(SERVERS)],
    "servers": [
        {"id": f"train0/s{index}", "pod": "train0", "gpus": str(index), "tors": [f"train0/t{index}"]}
        for index in range(SERVERS)
    ],
    "switches": [
        {
            "id": SWITCH,
            "tier": "agg",
            "pod": "train0",
            "device": "small",
            "ports": {f"train0/t{index}": f"{2 * index + 1}-{2 * index + 2}" for index in range(SERVERS)},
        }
    ],
}


class TracedJobHarness(Stack):
    """A traced job in a `folder` of its own. No process runs before it is started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rings = folder / "rings"
        self.journal = folder / JOURNAL_FILE
        self.ranks: list[LabProcess] = []
        self.target = ""
        self.address = f"unix:{folder}/d.sock"

    async def start_switch(self, device_s: float) -> None:
        """Start a device that outlives the daemon; without it, the daemon has one of its own."""
        options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": device_s}
        command = [sys.executable, VIRTUAL_PROCESS, json.dumps(options)]
        switch = self.launch(LabProcess("switch", command, self.folder, takes_input=True))
        self.target = f"127.0.0.1:{await switch.next_line()}"

    async def start_fabric(self, **fabric: Any) -> None:
        (self.folder / "site.yaml").write_text(yaml.safe_dump(SITE, sort_keys=False))
        options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": DEVICE_S}
        ours = {"id": SWITCH, "driver": "virtual", "options": options}
        apart = {"id": SWITCH, "driver": "grpc", "options": {"target": self.target}}
        await self.start_daemon(
            {
                "listen": {"address": ANY_PORT, "socket": str(self.folder / "d.sock")},
                "fabric": {"site": "site.yaml", "min_fraction": 0.0, **fabric},
                "ocs": [apart if self.target else ours],
            }
        )

    def start_tracing(self) -> None:
        self.start_agent("--rings", str(self.rings), "--host-name", "host0")

    def start_rank(self, rank: int, *, announces: bool = False) -> None:
        words = [str(RANKS), str(self._progress(rank)), *["--announce"] * announces]
        environment = {"PYTHONPATH": str(Path(orchestrrl.integrations.instrument.__file__).parent)}
        command = [sys.executable, RANK, self.rings, str(rank), *words]
        self.ranks.append(LabProcess(f"rank-{len(self.processes)}", command, self.folder, environment=environment))
        self.launch(self.ranks[-1])

    def iterations(self, rank: int) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._progress(rank).read_text())
        return 0

    def kill_in_a_collective(self, rank: int) -> None:
        """Kill the process while its ring has a collective in flight."""
        process = self.ranks[rank]
        path = next(path for path in list_rings(self.rings) if f"-{process.pid}-" in path.name)
        with RingReader(path) as reader:
            deadline_s = time.monotonic() + WITHIN_S
            while True:
                while not reader.in_flight:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.002)
                process.signal(signal.SIGSTOP)
                time.sleep(0.01)
                if reader.in_flight:
                    break
                process.signal(signal.SIGCONT)
        process.kill()

    async def plain_fabric(self, limit: int = 1000) -> dict[str, Any]:
        return plain(await self.fabric(limit))

    async def counts(self) -> Counter[tuple[str, str]]:
        seen = await self.plain_fabric(0)
        return Counter({(each["state"], each["code"]): each["count"] for each in seen["counts"]})

    async def commits(self) -> list[dict[str, Any]]:
        """Return the number of commits made in windows."""
        seen = await self.plain_fabric()
        made = [commit for period in seen["periods"] for commit in period["commits"]]
        return [commit for commit in made if commit["done"] and commit["window_until_unix_s"]]

    async def announce(self, period: str) -> dict[str, Any]:
        """Announce a period whose intent was announced before; return its result."""
        async with ControlClient(self.address) as client:
            order = fabric_pb2.AnnouncePeriodRequest(period=period)
            return [plain(report) async for report in client.watch(client.fabric.AnnouncePeriod, order)][-1]

    async def while_it_switches(self) -> None:
        """Return in the middle of a change of circuits, as the switch reports it."""
        switch = GrpcSwitch("watched", target=self.target)
        deadline_s = time.monotonic() + WITHIN_S
        try:
            while not any(circuit.state is CircuitState.TUNING for circuit in (await switch.cross_connects()).circuits):
                assert time.monotonic() < deadline_s
        finally:
            await switch.close()

    def unsettled(self, generation: int) -> list[str]:
        """Return circuit changes of earlier daemons without a result in the journal."""
        reader = JournalReader(self.journal)
        try:
            entries = reader.since(0, (EntryKind.CIRCUITS_INTENT, EntryKind.CIRCUITS_RESULT), limit=100_000)
        finally:
            reader.close()
        ended = {entry.subject for entry in entries if entry.kind == EntryKind.CIRCUITS_RESULT}
        begun = [each for each in entries if each.kind == EntryKind.CIRCUITS_INTENT and each.generation < generation]
        return [entry.subject for entry in begun if entry.subject not in ended]

    def _progress(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"
