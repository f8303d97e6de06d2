"""The trainer's client with a gateway and engines as processes: through the gateway, directly, and back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.errors import Retryable
from orchestrrl.engines.base import RequestRefused
from orchestrrl.gateway.client import ClientPatience, GatewayClient
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.testbed.engines import LocalEngine, start_simulated
from tests.orchestrrl.gateway.processes import GatewayProcess, free_port

DEADLINE_S = 120.0
ARGUMENTS = ("--speed", "10", "--tick-s", "0.005")
# About 4 s each, so that they are running when a process is killed.
BODY: dict[str, Any] = {"model": "simulated", "temperature": 0, "max_tokens": 2000, "ignore_eos": True}
PATIENCE = ClientPatience(connect_s=2.0, probe_first_s=0.05, probe_cap_s=0.2, watch_s=0.1, unreachable_s=20.0)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    log_dir = tmp_path_factory.mktemp("engines")

    async def start() -> list[LocalEngine]:
        names = ("e0", "e1")
        return await asyncio.gather(*(start_simulated(name, log_dir=log_dir, arguments=ARGUMENTS) for name in names))

    started = asyncio.run(start())
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture
async def gateway(engines: list[LocalEngine], tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    arguments = [f"--engine=e{index}={engine.url}" for index, engine in enumerate(engines)]
    process = GatewayProcess(
        tmp_path / "gateway.log", ["--engine-kind", "simulated", "--drain-s", "0", *arguments], free_port()
    )
    await process.start()
    yield process
    await process.stop()


def prompt(index: int) -> list[int]:
    return [10 + index, 20, 30]


async def direct(engine: LocalEngine, index: int) -> list[int]:
    """Return the responses of an undisturbed engine."""
    body = {**BODY, "prompt": prompt(index), "return_token_ids": True}
    async with aiohttp.ClientSession() as http, http.post(engine.url + "/v1/completions", json=body) as answer:
        ids: list[int] = (await answer.json())["choices"][0]["token_ids"]
        return ids


async def running(engines: list[LocalEngine]) -> int:
    clients = [SimulatedEngine(engine.url) for engine in engines]
    metrics = await asyncio.gather(*(client.metrics() for client in clients))
    await asyncio.gather(*(client.close() for client in clients))
    return sum(reading.running for reading in metrics)


async def until_running(engines: list[LocalEngine], count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await running(engines) < count:
            await asyncio.sleep(0.02)


async def test_client_bypasses_a_killed_gateway_and_returns_to_it(
    engines: list[LocalEngine], gateway: GatewayProcess
) -> None:
    async with GatewayClient(gateway.url, [engine.url for engine in engines], patience=PATIENCE) as client:
        asking = [
            asyncio.create_task(client.complete({**BODY, "prompt": prompt(index), "return_token_ids": True}))
            for index in range(6)
        ]
        await until_running(engines, 6)
        gateway.kill()
        answers = await asyncio.gather(*asking)
        expected = await asyncio.gather(*(direct(engines[0], index) for index in range(6)))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        assert client.bypassed == 6
        assert not client.through_gateway
        async with asyncio.timeout(DEADLINE_S):
            while await running(engines):
                await asyncio.sleep(0.02)

        await gateway.start()
        async with asyncio.timeout(DEADLINE_S):
            while not client.through_gateway:
                await asyncio.sleep(0.02)
        await client.complete({**BODY, "prompt": prompt(0), "max_tokens": 3})
        assert client.bypassed == 6


async def test_requests_of_a_stopped_gateway_continue(engines: list[LocalEngine], gateway: GatewayProcess) -> None:
    async with GatewayClient(gateway.url, [engine.url for engine in engines], patience=PATIENCE) as client:
        asking = [asyncio.create_task(client.complete({**BODY, "prompt": prompt(index)})) for index in range(3)]
        await until_running(engines, 3)
        assert await gateway.stop() == 0
        answers = await asyncio.gather(*asking)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [2000] * 3


async def test_missing_engine_is_skipped(engines: list[LocalEngine]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    urls = [nowhere, engines[0].url]
    async with GatewayClient(f"http://127.0.0.1:{free_port()}", urls, patience=PATIENCE) as client:
        answers = await asyncio.gather(
            *(
                client.chat({"model": "simulated", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3})
                for _ in range(4)
            )
        )
        assert all(answer["usage"]["completion_tokens"] == 3 for answer in answers)


async def test_invalid_request_is_rejected_without_retry(engines: list[LocalEngine], gateway: GatewayProcess) -> None:
    async with GatewayClient(gateway.url, [engine.url for engine in engines], patience=PATIENCE) as client:
        with pytest.raises(RequestRefused) as refusal:
            await client.complete({**BODY, "prompt": prompt(0), "max_tokens": -1})
        assert refusal.value.status == 400
        assert client.through_gateway


async def test_client_raises_retryable_without_servers() -> None:
    patience = ClientPatience(probe_first_s=0.01, probe_cap_s=0.02, unreachable_s=0.2)
    async with GatewayClient(f"http://127.0.0.1:{free_port()}", patience=patience) as client:
        with pytest.raises(Retryable):
            await client.complete({"prompt": "x"})
