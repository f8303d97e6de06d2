"""OrchestrRL with real vLLM servers whose weights a trainer publishes.

Peers and the trainer run in vLLM's environment, with gloo between them.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.demo.scenario import load_scenario
from orchestrrl.lab.demo.stack import orchestrrl
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.processes import REPOSITORY, VLLM_PYTHON, LabProcess, until
from orchestrrl.lab.testbed.stack import Stack, named
from orchestrrl.rpc.pb import telemetry_pb2
from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.controller.state import SYNC

PUBLISHER, PEER = "tests.vllm.weights_publisher", "orchestrrl.weights.peer.main"
TRAINER = "train0"
HEALTHY = (telemetry_pb2.ENGINE_HEALTH_OK, telemetry_pb2.ENGINE_HEALTH_SLOW)  # slow on a busy machine


@dataclass(slots=True)
class WeightsStack:
    """OrchestrRL with running engines whose weights a trainer publishes."""

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
) -> AsyncIterator[WeightsStack]:
    """Yield a stack that is ready for versions of `model`. Engines are e0, e1, ...; `hosts` is as in `peers_beside`."""
    async with orchestrrl(load_scenario("vllm"), "vllm", engines, folder) as stack:
        held = peer_folder(folder, TRAINER)
        trainer = stack.launch(
            in_vllm("trainer", folder, PUBLISHER, model, stack.daemon_address, TRAINER, held, takes_input=True)
        )
        yield WeightsStack(stack, trainer, await peers_beside(stack, engines, folder, hosts))


async def peers_beside(
    stack: Stack,
    engines: Sequence[LocalEngine],
    folder: Path,
    hosts: Sequence[Sequence[int]] = ((0, 1),),
) -> dict[str, LabProcess]:
    """Start a peer for the trainer, and gen0, gen1, ... for `hosts`, each a list of engine numbers; return them by
    name. All are attached and have their engines when this returns, and end with the stack."""
    urls = named([engine.url for engine in engines])
    peers: dict[str, LabProcess] = {}
    for name, own in {TRAINER: (), **{f"gen{index}": own for index, own in enumerate(hosts)}}.items():
        of_host = {f"e{index}": urls[f"e{index}"] for index in own}
        words = stack.peer_words(name, peer_folder(folder, name), of_host, "--transport", "gloo")
        peers[name] = stack.launch(in_vllm(name, folder, PEER, *words))

    async def healthy() -> bool:
        workers = (await stack.status()).workers
        return urls.keys() <= {worker.engine_id for worker in workers if worker.health in HEALTHY}

    await until(healthy, "engines are healthy", processes=list(peers.values()))
    await stack.until_attached(peers)
    return peers


def peer_folder(folder: Path, peer: str) -> Path:
    """Return the folder in which a peer stores versions."""
    return folder / "held" / peer


def in_vllm(name: str, folder: Path, module: str, *words: str | Path, takes_input: bool = False) -> LabProcess:
    """Start a module of OrchestrRL in vLLM's environment."""
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = (VLLM_PYTHON, "-m", module, *words)
    return LabProcess(name, command, folder, environment=environment, takes_input=takes_input)


@dataclass(slots=True)
class Flight:
    """A greedy answer with the reported version of each token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # per token

    async def stream(self, http: aiohttp.ClientSession, gateway_url: str, max_tokens: int) -> None:
        """Stream an answer into a Flight that grows with it."""
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
