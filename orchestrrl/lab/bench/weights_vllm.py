"""Versions of the weights brought to two real vLLM servers that answer requests: where the time goes, phase by phase.

Daemon, agent, gateway, peers and a trainer are processes of their own; the peers and the trainer run in vLLM's
environment, with gloo between them. In turn the same versions go the plain way: saved to a folder in memory, and loaded
by `reload_weights` behind the gateway's barrier (integrations/vllm_weights.py).
"""

import asyncio
import contextlib
import json
import shutil
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
from orchestrrl.lab.demo.stack import orchestrrl
from orchestrrl.lab.testbed.engines import LocalEngine, all_started, make_model, start_vllm
from orchestrrl.lab.testbed.processes import REPOSITORY, VLLM_PYTHON, LabProcess, until
from orchestrrl.lab.testbed.stack import Stack, named
from orchestrrl.rpc.pb import telemetry_pb2
from orchestrrl.weights.controller.profile import phase_text, profile
from orchestrrl.weights.controller.reports import SYNC, SyncReport

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


@dataclass(slots=True)
class WeightsStack:
    """OrchestrRL beside running engines, whose weights a trainer publishes."""

    stack: Stack
    trainer: LabProcess
    peers: Mapping[str, LabProcess]  # by name

    async def publish(self, version: int, seed: int) -> SyncReport:
        return SYNC.validate_python(await self.trainer.request({"publish": version, "seed": seed}))


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
    async with orchestrrl(load_scenario("vllm"), "vllm", engines, folder) as stack:
        held = peer_folder(memory or folder, TRAINER)
        trainer = stack.launch(publisher("trainer", folder, model, stack.daemon_address, held))
        yield WeightsStack(stack, trainer, await peers_beside(stack, engines, folder, hosts, memory))


async def peers_beside(
    stack: Stack,
    engines: Sequence[LocalEngine],
    folder: Path,
    hosts: Sequence[Sequence[int]] = ((0, 1),),
    memory: Path | None = None,
) -> dict[str, LabProcess]:
    """Start one for the trainer, and gen0, gen1, ... for each of `hosts`, the engines that are there by number; by
    name. They are attached, and engines known, when it returns; they end with the stack."""
    urls = named([engine.url for engine in engines])
    peers: dict[str, LabProcess] = {}
    for name, own in {TRAINER: (), **{f"gen{index}": own for index, own in enumerate(hosts)}}.items():
        of_host = {f"e{index}": urls[f"e{index}"] for index in own}
        words = stack.peer_words(name, peer_folder(memory or folder, name), of_host, "--transport", "gloo")
        peers[name] = stack.launch(in_vllm(name, folder, PEER, *words))

    async def healthy() -> bool:
        workers = (await stack.status()).workers
        return urls.keys() <= {worker.engine_id for worker in workers if worker.health in HEALTHY}

    await until(healthy, "engines are healthy", processes=peers.values())
    await stack.until_attached(peers)
    return peers


def peer_folder(folder: Path, peer: str) -> Path:
    """Where a peer holds versions."""
    return folder / "held" / peer


def publisher(name: str, folder: Path, model: Path, daemon_address: str, held: Path) -> LabProcess:
    return in_vllm(name, folder, PUBLISHER, model, daemon_address, TRAINER, held, takes_input=True)


def in_vllm(name: str, folder: Path, module: str, *words: str | Path, takes_input: bool = False) -> LabProcess:
    """A module of ours in vLLM's environment."""
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = (VLLM_PYTHON, "-m", module, *words)
    return LabProcess(name, command, folder, environment=environment, takes_input=takes_input)


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
    if not VLLM_PYTHON.exists():
        print(f"weights_vllm: left out, {VLLM_PYTHON} is missing: `make venv-vllm`", file=sys.stderr)  # noqa: T201
        return []
    return asyncio.run(_measured((log_dir / "weights-vllm").resolve()))


async def _measured(folder: Path) -> list[Figure]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with TemporaryDirectory(dir=MEMORY, prefix="orchestrrl-bench-") as memory:
        model = folder / "model"
        await _made(model, folder)
        async with (
            all_started(_server(name, model, folder) for name in ("vllm-0", "vllm-1")) as engines,
            weights_stack(engines, model, folder, memory=Path(memory)) as running,
            aiohttp.ClientSession() as http,
        ):
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
    await make_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SIZES}))
    async with publisher("maker", folder, model, "127.0.0.1:1", folder) as maker:
        await maker.request({"save": str(model), "seed": 0})


async def _server(name: str, model: Path, folder: Path) -> LocalEngine:
    arguments = ("--max-model-len", "4096", "--num-gpu-blocks-override", "130")
    return await start_vllm(name, model=model, log_dir=folder, max_num_seqs=4, arguments=arguments)
