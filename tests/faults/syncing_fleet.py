"""A fleet that receives weight versions while it answers, all of it processes that can be killed.

A trainer, its host's peer, three engines on two hosts with a peer each, daemon, agent and gateway. The engines' answers
are a function of the weights, so that each token of an answer identifies its version.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from front import WITHIN_S, until
from marked import MarkedProcess
from versioned_requests import Clients, ask

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import EntryKind, JournalEntry, JournalReader
from orchestrrl.lab.testbed.stack import engine_flags
from orchestrrl.rpc.codecs.weights import STATUS, SYNC
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2, weights_pb2
from orchestrrl.weights.controller.reports import SyncReport, WeightsStatus
from tests.orchestrrl.gateway.processes import free_port

HERE = Path(__file__).parent
ENGINES = {"gen0": ("e0", "e1"), "gen1": ("e2",)}
SPEED = 3.0  # of engines: 6 ms a token
CHUNK_BYTES = 64 * 1024
PROMPT = [7, 8, 9]
ASKED_S = 10.0  # an engine, bypassing the gateway


class Marked(MarkedProcess):
    """A process that can be made to die at a mark. `serves` is the first line of its output once it serves."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, *, serves: bool = True) -> None:
        super().__init__(name, [sys.executable, HERE / "dying_process.py", name, *words], folder, cwd=folder)
        self._folder = folder
        self._serves = serves

    async def start(self, within_s: float = WITHIN_S) -> str:
        if self._serves:
            return await super().start(within_s)
        self.spawn()
        return ""

    def mark(self, point: str, *, stop: bool = False, **where: Any) -> None:
        """Make the process die, or stop, at a point."""
        draft = self._folder / f"draft-{self.name}.json"
        draft.write_text(json.dumps({"point": point, **where, "signal": signal.SIGSTOP if stop else signal.SIGKILL}))
        draft.replace(self._mark)

    def unmark(self) -> None:
        self._mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self._folder / f"mark-{self.name}.json"

    async def until_killed(self) -> None:
        """Wait until the process was killed by a mark."""
        assert await self.until_ended() == -signal.SIGKILL


class Trainer(MarkedProcess):
    """A process that publishes versions."""

    def __init__(self, address: str, folder: Path, weights: Path) -> None:
        command = [sys.executable, HERE / "publishing_trainer.py", address, "train0", weights]
        super().__init__("trainer", command, folder, cwd=folder, takes_input=True)
        self._said: list[list[Any]] = []

    async def ensure(self) -> None:
        """Start the trainer unless it runs."""
        if not self.running:
            await self.start()

    async def start(self, within_s: float = WITHIN_S) -> str:
        self.spawn()
        self._said = []
        return str(await self._word("ready"))

    def publish(self, version: int, install: str = "at_once") -> None:
        self.send({"version": version, "seed": version, "install": install})

    async def staged(self, version: int) -> None:
        await self._word("staged", version)

    async def over(self, version: int) -> tuple[str, str, str]:
        """Return the trainer's last report of this version: how it ended, the code, and the reason. It may be published
        again later."""
        word = await self._word("over", version)
        self._said.remove(word)
        return word[2], word[3], word[4]

    async def _word(self, *begins: Any) -> list[Any]:
        async def message() -> list[Any] | None:
            while line := self.read_line():
                self._said.append(json.loads(line))
            return next((word for word in self._said if word[: len(begins)] == list(begins)), None)

        return await until(message)


class Harness:
    """A fleet in an empty `folder` of its own."""

    def __init__(self, folder: Path, *load: str) -> None:
        self.folder = folder
        self.version = 0  # published last
        config, address = folder / "orchestrrl.yaml", f"127.0.0.1:{free_port()}"
        self._journal = folder / "journal.sqlite"
        self.address = address
        document = {
            "mode": "act",
            "listen": {"address": address},
            "journal": {"path": str(self._journal)},
            "weights": {"transports": ["tcp"], "chunk_bytes": CHUNK_BYTES, "patience_s": 40.0, "attempts": 4},
        }
        config.write_text(yaml.safe_dump(document, sort_keys=False))
        ports = {engine: free_port() for engines in ENGINES.values() for engine in engines}
        self.urls = {engine: f"http://127.0.0.1:{port}" for engine, port in ports.items()}
        self.daemon = Marked("daemon", ["daemon", "-c", str(config)], folder)
        speed = ["--speed", str(SPEED), "--tick-s", "0.01", *load]
        self.engines = {
            name: Marked(name, ["engine", "simulated", "--port", str(port), *speed], folder)
            for name, port in ports.items()
        }
        named = engine_flags("--engine", self.urls)
        self.agent = Marked(
            "agent", ["agent", "--daemon", address, "--engine-kind", "simulated", *named], folder, serves=False
        )
        self.gateway_url = f"http://127.0.0.1:{free_port()}"
        self.clients = Clients(self.gateway_url, folder)
        listens = ["--listen", self.gateway_url.removeprefix("http://"), "--daemon", address, "--id", "gateway"]
        kept = ["--ledger", str(folder / "ledger"), "--drain-s", "0", "--engine-kind", "simulated"]
        self.gateway = Marked("gateway", ["gateway", *listens, *kept, *named], folder)
        self.peers = {"train0": self._peer("train0", ())}
        self.peers |= {name: self._peer(name, engines) for name, engines in ENGINES.items()}
        self.trainer = Trainer(address, folder, self.weights("train0"))

    def _peer(self, name: str, engines: Sequence[str]) -> Marked:
        words = ["sync", "peer", "--id", name, "--daemon", self.address, "--folder", str(self.weights(name))]
        words += ["--engine-kind", "simulated", "--transport", "tcp", "--host", "127.0.0.1", "--poll-engines-s", "0.5"]
        owns = [word for engine in engines for word in ("--engine", f"{engine}={self.urls[engine]}")]
        return Marked(name, [*words, *owns, "--pod", name, "--tor", f"{name}-tor"], self.folder, serves=False)

    def weights(self, peer: str) -> Path:
        """Return a peer's folder."""
        return self.folder / f"weights-{peer}"

    @property
    def processes(self) -> list[Marked]:
        return [self.daemon, self.agent, self.gateway, *self.engines.values(), *self.peers.values()]

    async def open(self) -> None:
        """Start all processes with version 1."""
        await asyncio.gather(*(process.start() for process in self.processes), self.trainer.start())

        async def all_there() -> bool:
            status = await self.status()
            attached = {peer.id for peer in status.peers if peer.attached}
            return attached == self.peers.keys() and await self._healthy() == self.engines.keys()

        await until(all_there, 0.1)
        await self.brought(self.publish())

    async def at_rest(self) -> None:
        """Wait until all processes run, and the fleet has one version."""
        for process in self.processes:
            process.unmark()
            if not process.running:
                await process.start()
            process.go_on()
        await self.trainer.ensure()
        await self.brought(*range(1, self.version + 1))

    def close(self) -> None:
        for process in [*self.processes, self.trainer]:
            process.end()

    # --- versions

    def publish(self, version: int | None = None, install: str = "at_once") -> int:
        """Order the trainer to publish the next version."""
        version = version if version is not None else self.version + 1
        self.version = max(self.version, version)
        self.trainer.publish(version, install)
        return version

    async def brought(self, *versions: int) -> int:
        """Wait until the whole fleet has one of these versions and is at rest; return it."""
        why = [""]

        async def has() -> int | None:
            try:
                found, why[0] = await self._one_version(versions)
            except (OrchestrRLError, aiohttp.ClientError, TimeoutError) as error:
                found, why[0] = None, repr(error)
            return found

        try:
            version = await until(has, 0.1)
        except AssertionError:
            raise AssertionError(f"the fleet does not come to have one of {versions}: {why[0]}") from None
        assert version is not None
        return version

    async def _one_version(self, wanted: Sequence[int]) -> tuple[int | None, str]:
        """Return the fleet's version if there is one and all is at rest, otherwise why not."""
        status, barrier = await self.status(), await self.barrier()
        if status.sync is None or not status.sync.over:
            return None, f"a sync is under way: {status.sync}"
        if status.quarantined or not all(peer.attached for peer in status.peers):
            return None, f"{status.quarantined} {status.peers}"
        version = status.committed
        if (healthy := await self._healthy()) != self.engines.keys():
            return None, f"only {healthy} are healthy"
        if version is None or version not in wanted:
            return None, f"the fleet has version {version}"
        known = {each.engine_id: each.policy_version for each in barrier.engines}
        if barrier.phase != "open" or known != dict.fromkeys(self.engines, version):
            return None, f"the pause barrier is {barrier.phase}, engines are known to have {known}"
        # An engine at rest for its repair would hold our request, and the repair would wait for it: cancel it.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASKED_S)) as http:
            for engine, url in self.urls.items():
                async with http.get(f"{url}/weight_info") as response:
                    name = (await response.json())["weight_version"]
                reported = await ask(http, url, PROMPT, 16, stream=False)
                if name != str(version) or reported.tokens != self.tokens(version, PROMPT, 16):
                    return None, f"{engine} reports {name}, but generates {reported.tokens}"
        return version, ""

    def tokens(self, version: int, context: Sequence[int], count: int) -> list[int]:
        return self.clients.tokens(version, context, count)

    def requests(self, unknown: Sequence[int] = ()) -> contextlib.AbstractAsyncContextManager[None]:
        return self.clients.requests(unknown)

    # --- the daemon's reports

    async def status(self) -> WeightsStatus:
        async with ControlClient(self.address) as client:
            return STATUS.from_pb(await client.call(client.weights.GetWeights, weights_pb2.GetWeightsRequest()))

    async def barrier(self) -> control_pb2.PauseBarrier:
        async with ControlClient(self.address) as client:
            return await client.call(client.control.GetPauseBarrier, control_pb2.GetPauseBarrierRequest())

    async def report(self, version: int) -> SyncReport:
        async with ControlClient(self.address) as client:
            request = weights_pb2.GetSyncRequest(version=version)
            return SYNC.from_pb(await client.call(client.weights.GetSync, request))

    async def until_sync(self, version: int, so: Callable[[SyncReport], bool]) -> SyncReport:
        async def is_so() -> SyncReport | None:
            with contextlib.suppress(OrchestrRLError):
                report = await self.report(version)
                return report if so(report) else None
            return None

        report = await until(is_so)
        assert report is not None
        return report

    def journal(self, *kinds: EntryKind) -> list[JournalEntry]:
        reader = JournalReader(self._journal)
        try:
            return reader.tail(1000, kinds)
        finally:
            reader.close()

    async def _healthy(self) -> set[str]:
        async with ControlClient(self.address) as client:
            status = await client.call(client.control.GetStatus, control_pb2.GetStatusRequest())
        well = (telemetry_pb2.ENGINE_HEALTH_OK, telemetry_pb2.ENGINE_HEALTH_SLOW)
        return {worker.engine_id for worker in status.workers if worker.health in well}
