"""A fleet that is given versions of its weights while it answers, all of it processes that can be killed.

A trainer, its host's peer, three engines on two hosts with a peer each, daemon, agent and gateway. What the engines say
is a function of the weights, so each token of an answer says which version it is of.
"""

import asyncio
import contextlib
import itertools
import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from front import until
from publishing_trainer import content

from orchestrrl.engines.simulated_tokens import TokenModel
from orchestrrl.engines.simulated_weights import read_weights
from orchestrrl.errors import OrchestrRLError
from orchestrrl.instrument.checkpoint_files import MODEL_FILE
from orchestrrl.journal import Entry, JournalReader, Kind
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.convert_weights import report_from_pb, status_from_pb
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2, weights_pb2
from orchestrrl.sync_reports import SyncReport, WeightsStatus
from tests.orchestrrl.gateway.processes import free_port

HERE = Path(__file__).parent
ENGINES = {"gen0": ("e0", "e1"), "gen1": ("e2",)}
SPEED = 3.0  # of engines: 6 ms a token
CLIENTS = 6
TOKENS = 150
CHUNK_BYTES = 64 * 1024
PROMPT = [7, 8, 9]
ASKED_S = 10.0  # an engine, past the gateway


class Marked:
    """A process that can be told to die at a mark. `says`: the first line of its output tells that it serves."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, *, says: bool = True) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._command = [sys.executable, str(HERE / "dying_process.py"), name, *words]
        self._folder = folder
        self._says = says
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        self._spawn()
        if self.process.stdout is not None:
            said = await asyncio.to_thread(self.process.stdout.readline)
            assert said, f"{self.name}: {self.log_path.read_text()[-4000:]}"

    def _spawn(self) -> None:
        out = subprocess.PIPE if self._says else subprocess.DEVNULL
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=self._folder
            )

    def mark(self, point: str, *, stop: bool = False, **where: Any) -> None:
        """It dies there, or stands still."""
        draft = self._folder / f"draft-{self.name}.json"
        draft.write_text(json.dumps({"point": point, **where, "signal": signal.SIGSTOP if stop else signal.SIGKILL}))
        draft.replace(self._mark)

    def unmark(self) -> None:
        self._mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self._folder / f"mark-{self.name}.json"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def until_killed(self) -> None:
        """By a mark."""
        assert await asyncio.to_thread(self.process.wait, 120) == -signal.SIGKILL

    async def until_still(self) -> None:
        """By a mark."""

        async def still() -> bool:
            assert self.process.poll() is None, f"{self.name} has ended"
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

        await until(still, 0.005)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Whatever it is doing."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Trainer:
    """A process that publishes."""

    def __init__(self, address: str, folder: Path, weights: Path) -> None:
        self._command = [sys.executable, str(HERE / "publishing_trainer.py"), address, "train0", str(weights)]
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._said: list[list[Any]] = []

    async def start(self) -> None:
        self._spawn()
        await self._word("ready")

    def _spawn(self) -> None:
        pipe = subprocess.PIPE
        with (self._folder / "trainer.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=log, cwd=self._folder, text=True
            )
        self._said = []
        threading.Thread(target=self._read, args=(self._process, self._said), daemon=True).start()

    async def ensure(self) -> None:
        """That it runs."""
        if self._process is None or self._process.poll() is not None:
            await self.start()

    def publish(self, version: int, install: str = "at_once") -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"version": version, "seed": version, "install": install}) + "\n")
        self._process.stdin.flush()

    async def staged(self, version: int) -> None:
        await self._word("staged", version)

    async def over(self, version: int) -> tuple[str, str, str]:
        """Its last word of this version: how it ended, the code, and why. It may be published again afterwards."""
        word = await self._word("over", version)
        self._said.remove(word)
        return word[2], word[3], word[4]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _read(process: "subprocess.Popen[str]", said: list[list[Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(json.loads(line))

    async def _word(self, *begins: Any) -> list[Any]:
        async def said() -> list[Any] | None:
            return next((word for word in self._said if word[: len(begins)] == list(begins)), None)

        word = await until(said)
        assert word is not None
        return word


@dataclass
class Told:
    """An answer and which version generated which of its tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # of each token
    ends: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """A whole answer, or an event of a stream."""
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            self.tokens += ids
            for span in choice.get("policy_versions", ()):
                assert span["start"] == len(self.versions)
                self.versions += [span["version"]] * (span["end"] - span["start"])
            if "policy_version" in choice:
                self.versions += [choice["policy_version"]] * len(ids)
            self.ends += choice["finish_reason"] is not None


class House:
    """`folder` is its own, and empty."""

    def __init__(self, folder: Path, *load: str) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)
        self._models: dict[int, TokenModel] = {}
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
        of = [f"{engine}={url}" for engine, url in self.urls.items()]
        self.daemon = Marked("daemon", ["daemon", "-c", str(config)], folder)
        speed = ["--speed", str(SPEED), "--tick-s", "0.01", *load]
        self.engines = {
            name: Marked(name, ["engine", "simulated", "--port", str(port), *speed], folder)
            for name, port in ports.items()
        }
        named = [word for name, url in self.urls.items() for word in ("--url", url, "--id", name)]
        self.agent = Marked(
            "agent", ["agent", "--daemon", address, "--engine", "simulated", *named], folder, says=False
        )
        self.gateway_url = f"http://127.0.0.1:{free_port()}"
        listens = ["--listen", self.gateway_url.removeprefix("http://"), "--daemon", address, "--id", "gateway"]
        kept = ["--ledger", str(folder / "ledger"), "--drain-s", "0", "--engine-kind", "simulated"]
        routed = [word for each in of for word in ("--engine", each)]
        self.gateway = Marked("gateway", ["gateway", *listens, *kept, *routed], folder)
        self.peers = {"train0": self._peer("train0", ())}
        self.peers |= {name: self._peer(name, engines) for name, engines in ENGINES.items()}
        self.trainer = Trainer(address, folder, self.weights("train0"))

    def _peer(self, name: str, engines: Sequence[str]) -> Marked:
        words = ["sync", "peer", "--id", name, "--daemon", self.address, "--folder", str(self.weights(name))]
        words += ["--product", "simulated", "--transport", "tcp", "--host", "127.0.0.1", "--ask-engines-s", "0.5"]
        owns = [word for engine in engines for word in ("--engine", f"{engine}={self.urls[engine]}")]
        return Marked(name, [*words, *owns, "--pod", name, "--tor", f"{name}-tor"], self.folder, says=False)

    def weights(self, peer: str) -> Path:
        """A peer's folder."""
        return self.folder / f"weights-{peer}"

    @property
    def processes(self) -> list[Marked]:
        return [self.daemon, self.agent, self.gateway, *self.engines.values(), *self.peers.values()]

    async def open(self) -> None:
        """All run, and have version 1."""
        await asyncio.gather(*(process.start() for process in self.processes), self.trainer.start())

        async def all_there() -> bool:
            status = await self.status()
            attached = {peer.id for peer in status.peers if peer.attached}
            return attached == self.peers.keys() and await self._healthy() == self.engines.keys()

        await until(all_there, 0.1)
        await self.brought(self.publish())

    async def at_rest(self) -> None:
        """All run, and the fleet has one version, whichever."""
        for process in self.processes:
            process.unmark()
            if process.process.poll() is not None:
                await process.start()
            process.go_on()
        await self.trainer.ensure()
        await self.brought(*range(1, self.version + 1))

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.trainer.kill()

    # --- versions

    def publish(self, version: int | None = None, install: str = "at_once") -> int:
        """The next one; the trainer is told to."""
        version = version if version is not None else self.version + 1
        self.version = max(self.version, version)
        self.trainer.publish(version, install)
        return version

    async def brought(self, *versions: int) -> int:
        """Wait until the fleet has one of these, all of it, and all is at rest. Which."""
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
        """The fleet's, where it is one and all is at rest; else why not."""
        status, gate = await self.status(), await self.gate()
        if status.sync is None or not status.sync.over:
            return None, f"a sync is under way: {status.sync}"
        if status.quarantined or not all(peer.attached for peer in status.peers):
            return None, f"{status.quarantined} {status.peers}"
        version = status.committed
        if (healthy := await self._healthy()) != self.engines.keys():
            return None, f"only {healthy} are healthy"
        if version is None or version not in wanted:
            return None, f"the fleet has version {version}"
        known = {each.engine_id: each.policy_version for each in gate.engines}
        if gate.phase != "open" or known != dict.fromkeys(self.engines, version):
            return None, f"the gate is {gate.phase}, engines are known to have {known}"
        # One that is at rest to be repaired would hold our request, and wait for it: it is taken back.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASKED_S)) as http:
            for engine, url in self.urls.items():
                async with http.get(f"{url}/weight_info") as response:
                    name = (await response.json())["weight_version"]
                told = await ask(http, url, PROMPT, 16, stream=False)
                if name != str(version) or told.tokens != self.tokens(version, PROMPT, 16):
                    return None, f"{engine} says that it has {name}, and goes on with {told.tokens}"
        return version, ""

    def tokens(self, version: int, context: Sequence[int], count: int) -> list[int]:
        """What engines say that have this version."""
        if version not in self._models:
            folder = self.folder / f"reference-{version}"
            write_reference(folder, version)
            self._models[version] = TokenModel(weights_seed=read_weights(folder).seed)
        generation = self._models[version].begin(context)
        return [generation.next_token()[0] for _ in range(count)]

    # --- the daemon's word

    async def status(self) -> WeightsStatus:
        async with ControlClient(self.address) as client:
            return status_from_pb(await client.ask(client.weights.GetWeights, weights_pb2.GetWeightsRequest()))

    async def gate(self) -> control_pb2.Gate:
        async with ControlClient(self.address) as client:
            return await client.ask(client.control.GetGate, control_pb2.GetGateRequest())

    async def report(self, version: int) -> SyncReport:
        async with ControlClient(self.address) as client:
            request = weights_pb2.GetSyncRequest(version=version)
            return report_from_pb(await client.ask(client.weights.GetSync, request))

    async def until_sync(self, version: int, so: Callable[[SyncReport], bool]) -> SyncReport:
        async def is_so() -> SyncReport | None:
            with contextlib.suppress(OrchestrRLError):
                report = await self.report(version)
                return report if so(report) else None
            return None

        report = await until(is_so)
        assert report is not None
        return report

    def journal(self, *kinds: Kind) -> list[Entry]:
        reader = JournalReader(self._journal)
        try:
            return reader.tail(1000, kinds)
        finally:
            reader.close()

    async def _healthy(self) -> set[str]:
        async with ControlClient(self.address) as client:
            status = await client.ask(client.control.GetStatus, control_pb2.GetStatusRequest())
        well = (telemetry_pb2.ENGINE_HEALTH_OK, telemetry_pb2.ENGINE_HEALTH_SLOW)
        return {worker.engine_id for worker in status.workers if worker.health in well}

    # --- requests

    @contextlib.asynccontextmanager
    async def requests(self, unknown: int | None = None) -> AsyncIterator[None]:
        """Some are in flight as long as this is not left. Then all have ended, none is lost, and each token is of the
        version that its answer says. Of `unknown` are tokens where nobody could tell the gateway which it is."""
        leaving = asyncio.Event()
        begun = [asyncio.Event() for _ in range(CLIENTS)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            asking = [
                asyncio.create_task(self._client(http, leaving, each, n, unknown)) for n, each in enumerate(begun)
            ]
            try:
                await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 60)
                yield
                leaving.set()
                await asyncio.wait_for(asyncio.gather(*asking), 120)
            finally:
                for each in asking:
                    each.cancel()

    async def _client(
        self,
        http: aiohttp.ClientSession,
        leaving: asyncio.Event,
        begun: asyncio.Event,
        place: int,
        unknown: int | None,
    ) -> None:
        while not leaving.is_set():
            number = next(self._numbers)
            prompt = [1000 + number % 20_000, 2000 + place, 2001]
            begun.set()
            while True:
                try:
                    told = await ask(http, self.gateway_url, prompt, TOKENS, stream=place % 2 == 0, id=f"q{number}")
                    break
                except aiohttp.ClientError:  # the gateway was killed: who asks comes back, as trainers do
                    await asyncio.sleep(0.1)
            self.check(told, f"q{number}", unknown)

    def check(self, told: Told, name: str, unknown: int | None = None) -> None:
        """Every token once, and each of the version that it is said to be of."""
        assert (len(told.tokens), told.ends) == (TOKENS, 1), name
        assert len(told.versions) == TOKENS, name
        start = 0
        for said, span in itertools.groupby(told.versions):
            version = unknown if said is None else said
            assert version is not None, f"{name}: nobody knows of which version token {start} is"
            end = start + len(list(span))
            wanted = self.tokens(version, told.prompt + told.tokens[:start], end - start)
            assert told.tokens[start:end] == wanted, f"{name}: tokens {start} to {end} are not of version {version}"
            start = end


async def ask(
    http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, *, stream: bool, id: str = ""
) -> Told:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}
    more = {"return_policy_versions": True} if id else {}
    headers = {"X-Request-Id": id} if id else {}
    told = Told(prompt)
    url += "/v1/completions"
    async with http.post(url, json={**body, **more, "return_token_ids": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        if not stream:
            told.add(await response.json())
            return told
        done = False
        async for line in response.content:
            done = done or line == b"data: [DONE]\n"
            if line.startswith(b"data: {"):
                told.add(json.loads(line[len(b"data: ") :]))
        if not done:
            raise aiohttp.ClientPayloadError("the stream broke off")
    return told


def write_reference(folder: Path, seed: int) -> None:
    """The same version as a checkpoint, made without any of what brings it."""
    header, data = {}, b""
    for name, array in sorted(content(seed).items()):
        raw = array.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / MODEL_FILE).write_bytes(struct.pack("<Q", len(text)) + text + data)
