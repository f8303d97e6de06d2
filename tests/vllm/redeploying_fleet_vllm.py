"""OrchestrRL as separate processes (daemon, gateway, command line) with vLLM servers that it starts, and clients that
read streams while the servers are replaced."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.fleet.deployers.base import DEPLOYERS, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch
from orchestrrl.fleet.deployers.conformance import RANGE, free_range
from orchestrrl.lab.testbed.engines import VLLM_ARGUMENTS, VLLM_ENVIRONMENT
from orchestrrl.lab.testbed.stack import Stack
from tests.orchestrrl.gateway.processes import operator_url
from tests.system.streams import Answer, read_stream, read_whole
from tests.vllm.conftest import VLLM_PLUGIN, VLLM_PYTHON

SEATS = 8
KV_BLOCKS, BLOCK_TOKENS = 130, 128
# Limits requests, but not the probes of a redeployment, to 10 tokens/s while a test holds them.
SLOW_STEPS = "64:0.1"
READY_WITHIN_S = 240.0
SWITCHED_WITHIN_S = 900.0
SETTLED_WITHIN_S = 120.0


def configuration(id: str, gpus: int = 1) -> dict[str, Any]:
    """Return a configuration with arbitrary times, which are not used because nothing is planned."""
    return {
        "id": id,
        "gpus": gpus,
        "alpha_s": 0.05,
        "beta_s": 1e-3,
        "gamma_s": 1e-7,
        "kv_capacity_tokens": KV_BLOCKS * BLOCK_TOKENS,
        "max_sequences": SEATS,
        "prefill_tokens_per_s": 4000,
        "switch_s": 60,
    }


@dataclass
class Harness:
    """One daemon, one gateway, and the engines of their fleet. `own` is the value of launch.configurations."""

    folder: Path
    model: Path
    configurations: Sequence[Mapping[str, Any]]
    gpus: int
    own: Mapping[str, Any] = field(default_factory=dict)
    deployer: Mapping[str, Any] = field(default_factory=lambda: {"product": "local", "options": {"grace_s": 5.0}})
    stack: Stack = field(init=False)

    def __post_init__(self) -> None:
        self.stack = Stack(self.folder)

    @property
    def address(self) -> str:
        return self.stack.daemon_address

    @property
    def url(self) -> str:
        return self.stack.gateway_url

    async def start(self) -> None:
        await self.stack.start_daemon(self._document())
        await self.stack.start_gateway()

    async def restart_daemon(self, **deployer: Any) -> None:
        """Restart the daemon with other settings of its deployer."""
        self.deployer = {**self.deployer, **deployer}
        await self.stack.daemon.stop()
        self.stack.configure({**self._document(), "listen": {"address": self.address}})
        await self.stack.daemon.start()

    async def close(self) -> None:
        """Stop everything, so that no engine is left even after a failure."""
        await self.stack.undo.aclose()
        identity = FleetIdentity("orchestrrl", str(self.folder / "engines"))
        launch = EngineLaunch(python=str(VLLM_PYTHON), model=str(self.model), device=EngineDevice.CPU)
        deployer = DEPLOYERS.load(self.deployer["product"])(launch, identity, self.deployer["options"], WallClock())
        for found in await deployer.list_engines():
            await deployer.stop(found.engine)
        await deployer.close()

    def _document(self) -> dict[str, Any]:
        first_port = free_range()
        return {
            "mode": "advise",
            "slow": {"interval_s": 3600},
            "fleet": {
                "gpus": {"count": self.gpus, "per_node": self.gpus},
                "configurations": list(self.configurations),
                "launch": {
                    "python": str(VLLM_PYTHON),
                    "model": str(self.model),
                    "served_model_name": "tiny",
                    "device": "cpu",
                    "ports": [first_port, first_port + RANGE - 1],
                    "arguments": [
                        *VLLM_ARGUMENTS,
                        *("--max-model-len", "4096", "--num-gpu-blocks-override", str(KV_BLOCKS)),
                        *("--no-enable-prefix-caching", "--logits-processors", "slow_steps:SlowSteps"),
                    ],
                    "environment": {
                        **VLLM_ENVIRONMENT,
                        "PYTHONPATH": str(VLLM_PLUGIN),
                        "ORCHESTRRL_TEST_SLOW_STEPS": SLOW_STEPS,
                        "ORCHESTRRL_TEST_SLOW_WHILE": str(self._slow),
                    },
                    "configurations": dict(self.own),
                },
                "deployer": {
                    "folder": str(self.folder / "engines"),
                    "ready_within_s": READY_WITHIN_S,
                    **self.deployer,
                },
            },
        }

    @property
    def _slow(self) -> Path:
        return self.folder / "slow"

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Slow requests down so that none finishes: a redeployment finds them running even if it starts late."""
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink()

    # --- commands

    async def orchestrrl(self, *arguments: str, status: int = 0, within_s: float = SETTLED_WITHIN_S) -> str:
        """Run a command, check its exit status, and return its output."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrrl", *arguments, "--daemon", self.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "COLUMNS": "160"},
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), within_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == status, f"{arguments}: {process.returncode}\n{out.decode()}\n{err.decode()}"
        return out.decode()

    async def redeployment(self, *targets: str, state: str = "done") -> dict[str, Any]:
        """Redeploy to these configurations; return the report once it has ended in this state."""
        wishes = [word for target in targets for word in ("--to", target)]
        status = 0 if state == "done" else 1
        shown = await self.orchestrrl("redeploy", *wishes, "--json", status=status, within_s=SWITCHED_WITHIN_S)
        report: dict[str, Any] = json.loads(shown)
        assert report["state"] == state, report["detail"]
        return report

    async def at(self, *targets: str) -> None:
        """Bring the fleet into this shape, if necessary by a redeployment."""
        wishes = [word for target in targets for word in ("--to", target)]
        draft = json.loads(await self.orchestrrl("redeploy", *wishes, "--dry-run", "--json"))
        if draft["old_engines"] != draft["new_engines"]:
            await self.redeployment(*targets)

    async def shown(self, report: Mapping[str, Any]) -> str:
        """Return a redeployment as printed for operators."""
        steps = await self.orchestrrl("redeploy", "--redeployment", report["redeployment_id"])
        return steps + await self.orchestrrl("plan", "history", "--redeployment", report["redeployment_id"])

    async def engines(self) -> dict[str, str]:
        """Return the URLs of engines that receive requests, by id."""
        told = json.loads(await self.orchestrrl("workers", "--json"))
        return {each["engine_id"]: each["url"] for each in told["workers"]}

    async def ledger(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http:
            operator = await operator_url(http, self.url)
            async with http.get(f"{operator}/orchestrrl/requests") as response:
                told: dict[str, Any] = await response.json()
                return told


@dataclass(frozen=True)
class Step:
    """The requests of one generation step, greedy, so that each has exactly one correct answer."""

    requests: int = 8
    tokens: int = 1000  # tokens of the first request; each further one has 5 more

    def bodies(self) -> list[dict[str, Any]]:
        return [
            {
                "model": "tiny",
                "prompt": [40 + index, 7 * index % 200 + 3, 61, 62],
                "temperature": 0,
                "max_tokens": self.tokens + 5 * index,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for index in range(self.requests)
        ]

    async def undisturbed(self, engine_url: str) -> list[list[int]]:
        """Return the tokens that one undisturbed engine generates, without the gateway."""
        async with _session() as http:

            async def ask(body: Mapping[str, Any]) -> list[int]:
                async with http.post(f"{engine_url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    return (await read_whole(response)).token_ids

            return await asyncio.gather(*(ask(body) for body in self.bodies()))

    def begin(self, gateway_url: str) -> "Asking":
        return Asking(gateway_url, self.bodies())


class Asking:
    """The clients of a step, which read their streams."""

    def __init__(self, gateway_url: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        self.answers = [Answer() for _ in bodies]
        self._tasks = [
            asyncio.create_task(self._ask(gateway_url, body, answer))
            for body, answer in zip(bodies, self.answers, strict=True)
        ]

    @staticmethod
    async def _ask(gateway_url: str, body: Mapping[str, Any], answer: Answer) -> None:
        async with _session() as http:
            async with http.post(f"{gateway_url}/v1/completions", json={**body, "stream": True}) as response:
                assert response.status == 200, await response.text()
                await read_stream(response, answer)

    @property
    def counts(self) -> list[int]:
        """Return the number of tokens that each client has received."""
        return [len(answer.token_ids) for answer in self.answers]

    async def each_has(self, more: int, than: Sequence[int] = ()) -> None:
        """Wait until every client has received this many more tokens."""
        before = list(than) or [0] * len(self.answers)
        await self._until(lambda: all(has >= was + more for has, was in zip(self.counts, before, strict=True)))

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while not condition():
                self._check()
                await asyncio.sleep(0.02)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> list[list[int]]:
        """Wait for the end of all answers; return their tokens."""
        await asyncio.wait_for(asyncio.gather(*self._tasks), SWITCHED_WITHIN_S)
        assert {answer.finish_reason for answer in self.answers} == {"length"}
        return [answer.token_ids for answer in self.answers]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))


def step_seconds(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the duration of the longest forward step of each kind."""
    took: dict[str, float] = {}
    for step in report["steps"]:
        if step["direction"] == "forward" and step["elapsed_s"] is not None:
            took[step["kind"]] = max(took.get(step["kind"], 0.0), step["elapsed_s"])
    return took
