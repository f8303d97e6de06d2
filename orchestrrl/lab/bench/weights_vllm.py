"""Versions of the weights brought to two real vLLM servers that answer requests: where the time goes, phase by phase.

Daemon, agent, gateway, peers and a trainer are processes of their own; the peers and the trainer run in vLLM's
environment, with gloo between them. In turn the same versions go the plain way: saved to a folder in memory, and loaded
by `reload_weights` behind the gateway's barrier (integrations/vllm_weights.py).
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.vllm_weights import reload_weights
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.demo.scenario import load_scenario
from orchestrrl.lab.demo.stack import MODEL_MAKER, Stack, orchestrrl
from orchestrrl.lab.deployers.attended import LocalEngine, start_vllm
from orchestrrl.rpc.codecs.weights import status_from_pb
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2, weights_pb2
from orchestrrl.weights.controller.profile import phase_text, profile
from orchestrrl.weights.controller.reports import SYNC, SyncReport, WeightsStatus
from planner.model import EngineId

REPOSITORY = Path(__file__).parents[3]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
PUBLISHER, PEER = "orchestrrl.lab.bench.weights_publisher", "orchestrrl.weights.peer.main"
TRAINER = "train0"
MEMORY = "/dev/shm"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
}
VERSIONS = 3
FLIGHTS, MAX_TOKENS = 4, 4000
PLAIN = 1000  # versions that went the plain way are called by more than that
HEALTHY = (telemetry_pb2.ENGINE_HEALTH_OK, telemetry_pb2.ENGINE_HEALTH_SLOW)  # on a busy machine they are slow
READY_WITHIN_S = 120.0
STOP_WITHIN_S = 15.0
LOOK_S = 0.05


class Program:
    """A module of ours in vLLM's environment, which reads lines and answers with lines."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log
        self._turn = asyncio.Lock()

    async def request(self, question: Mapping[str, Any]) -> Any:
        """Raises Permanent where it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            line = await self.process.stdout.readline()
        if not line:
            await self.process.wait()
            self.check()
        return json.loads(line)

    def check(self) -> None:
        """Raises Permanent, with the end of its log, where it has ended."""
        if self.process.returncode is not None:
            raise Permanent(f"it ended; the end of {self._log}:\n{self._log.read_text(errors='replace')[-3000:]}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@dataclass(slots=True)
class WeightsStack:
    """OrchestrRL beside running engines, whose weights a trainer publishes."""

    stack: Stack
    trainer: Program
    peers: Mapping[str, Program]  # by name

    async def publish(self, version: int, seed: int) -> SyncReport:
        return SYNC.validate_python(await self.trainer.request({"publish": version, "seed": seed}))


async def status_of(daemon: ControlClient) -> WeightsStatus:
    return status_from_pb(await daemon.call(daemon.weights.GetWeights, weights_pb2.GetWeightsRequest()))


@contextlib.asynccontextmanager
async def weights_stack(
    engines: Sequence[LocalEngine],
    model: Path,
    folder: Path,
    hosts: Sequence[Sequence[int]] = ((0, 1),),
    memory: Path | None = None,
) -> AsyncIterator[WeightsStack]:
    """Ready for a version of `model`'s form. Engines are e0, e1, ...; `hosts` as `peers_beside` has them. Peers hold
    versions in `memory`, or else in `folder`."""
    async with contextlib.AsyncExitStack() as undo:
        stack = await undo.enter_async_context(orchestrrl(load_scenario("vllm"), "vllm", engines, folder))
        arguments = (str(model), stack.daemon_address, TRAINER, str(peer_folder(memory or folder, TRAINER)))
        trainer = await undo.enter_async_context(_running("trainer", PUBLISHER, arguments, folder))
        peers = await undo.enter_async_context(peers_beside(stack, engines, folder, hosts, memory))
        yield WeightsStack(stack, trainer, peers)


@contextlib.asynccontextmanager
async def peers_beside(
    stack: Stack,
    engines: Sequence[LocalEngine],
    folder: Path,
    hosts: Sequence[Sequence[int]] = ((0, 1),),
    memory: Path | None = None,
) -> AsyncIterator[dict[str, Program]]:
    """One for the trainer, and gen0, gen1, ... for each of `hosts`, the engines that are there by number; by name. They
    are attached, and engines known."""
    peers: dict[str, Program] = {}
    async with contextlib.AsyncExitStack() as undo:
        for name, own in {TRAINER: (), **{f"gen{index}": own for index, own in enumerate(hosts)}}.items():
            arguments = [
                "--id",
                name,
                "--daemon",
                stack.daemon_address,
                "--folder",
                str(peer_folder(memory or folder, name)),
            ]
            arguments += [text for index in own for text in ("--engine", f"e{index}={engines[index].url}")]
            arguments += ["--transport", "gloo"]
            peers[name] = await undo.enter_async_context(_running(name, PEER, arguments, folder))
        await _ready(stack, peers, {EngineId(f"e{index}") for index in range(len(engines))})
        yield peers


def peer_folder(folder: Path, peer: str) -> Path:
    """Where a peer holds versions."""
    return folder / "held" / peer


@contextlib.asynccontextmanager
async def _running(name: str, module: str, arguments: Sequence[str], folder: Path) -> AsyncIterator[Program]:
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
            limit=1 << 26,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    try:
        yield Program(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(stack: Stack, peers: Mapping[str, Program], engines: set[EngineId]) -> None:
    """Every engine is known as healthy, and peers are attached."""
    async with asyncio.timeout(READY_WITHIN_S), ControlClient(stack.daemon_address) as daemon:
        while True:
            for peer in peers.values():
                peer.check()
            listed = await daemon.call(daemon.control.ListWorkers, control_pb2.ListWorkersRequest())
            healthy = {worker.engine_id for worker in listed.workers if worker.health in HEALTHY}
            attached = {peer.id for peer in (await status_of(daemon)).peers if peer.attached}
            if engines <= healthy and set(peers) <= attached:
                return
            await asyncio.sleep(LOOK_S)


@dataclass(slots=True)
class Flight:
    """A greedy answer, and which version it says that each of its tokens is of."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # of each token

    async def stream(self, http: aiohttp.ClientSession, gateway_url: str, max_tokens: int) -> None:
        """It grows as the answer does."""
        async with http.post(f"{gateway_url}/v1/completions", json=self._body(max_tokens, True)) as response:
            await _check(response)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[len(b"data: ") :])["choices"]:
                        self.tokens += choice["token_ids"]
                        self.versions += [choice["policy_version"]] * len(choice["token_ids"])

    async def whole(self, http: aiohttp.ClientSession, gateway_url: str, max_tokens: int) -> None:
        async with http.post(f"{gateway_url}/v1/completions", json=self._body(max_tokens, False)) as response:
            await _check(response)
            (choice,) = (await response.json())["choices"]
        self.tokens += choice["token_ids"]
        for span in choice["policy_versions"]:
            assert span["start"] == len(self.versions)
            self.versions += [span["version"]] * (span["end"] - span["start"])

    def _body(self, max_tokens: int, stream: bool) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
            "return_policy_versions": True,
        }


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise Permanent(f"{response.url}: {response.status}: {await response.text()}")


def weights_vllm(log_dir: Path) -> list[Figure]:
    """Nothing, and a word on stderr, where there is no real vLLM. About three minutes."""
    if not PYTHON.exists():
        print(f"weights_vllm: left out, {PYTHON} is missing: `make venv-vllm`", file=sys.stderr)  # noqa: T201
        return []
    return asyncio.run(_measured((log_dir / "weights-vllm").resolve()))


async def _measured(folder: Path) -> list[Figure]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with TemporaryDirectory(dir=MEMORY, prefix="orchestrrl-bench-") as memory:
        model = folder / "model"
        await _made(model, folder)
        async with contextlib.AsyncExitStack() as undo:
            engines = await asyncio.gather(*(_server(name, model, folder) for name in ("vllm-0", "vllm-1")))
            for engine in engines:
                undo.push_async_callback(engine.stop)
            running = await undo.enter_async_context(weights_stack(engines, model, folder, memory=Path(memory)))
            http = await undo.enter_async_context(aiohttp.ClientSession())
            flights = [Flight([40 + index, 41, 42]) for index in range(FLIGHTS)]
            flying = [
                asyncio.create_task(flight.stream(http, running.stack.gateway_url, MAX_TOKENS)) for flight in flights
            ]
            try:
                return [await _version(running, engines, version, Path(memory)) for version in range(1, VERSIONS + 1)]
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)


async def _version(running: WeightsStack, engines: Sequence[LocalEngine], version: int, memory: Path) -> Figure:
    """By the plain way first; of it the daemon knows the version's number alone."""
    await running.trainer.request(
        {"gaps": [[1, 2]], "seed": version}
    )  # it makes the model, which is no part of either way
    saved = memory / f"saved-{version}"
    began_s = time.monotonic()
    await running.trainer.request({"save": str(saved), "seed": version})
    await asyncio.to_thread(
        reload_weights,
        [engine.url for engine in engines],
        saved,
        gateway_url=running.stack.gateway_url,
        policy_version=PLAIN + version,
    )
    plain_s = time.monotonic() - began_s
    report = await running.publish(version, seed=version)
    shutil.rmtree(saved)
    if report.code != "done":
        raise Permanent(f"version {version} did not come to all engines: {report}")
    took = profile(report)
    phases = ", ".join(f"{phase_text(row.phase)} {row.seconds:.3g}" for row in took.rows)
    note = (
        f"{report.bytes / 1e6:.0f} MB to two real vLLM servers on CPUs, {FLIGHTS} requests running; seconds: {phases},"
        f" between phases {took.unnamed_s:.2g}; requests stood still for {took.still_s:.3g} s"
    )
    return Figure(f"weights_vllm_{version}", took.whole_s, "s", "saved to a folder, reload_weights", plain_s, note)


async def _made(model: Path, folder: Path) -> None:
    """The tiny model's form, with more in it."""
    made = await asyncio.create_subprocess_exec(
        str(PYTHON), str(MODEL_MAKER), str(model), stderr=asyncio.subprocess.DEVNULL
    )
    if await made.wait() != 0:
        raise Permanent(f"{MODEL_MAKER.name} failed")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SIZES}))
    async with _running("maker", PUBLISHER, (str(model), "127.0.0.1:1", TRAINER, str(folder)), folder) as maker:
        await maker.request({"save": str(model), "seed": 0})


async def _server(name: str, model: Path, folder: Path) -> LocalEngine:
    arguments = ("--max-model-len", "4096", "--num-gpu-blocks-override", "130")
    return await start_vllm(name, python=PYTHON, model=model, log_dir=folder, max_num_seqs=4, arguments=arguments)
