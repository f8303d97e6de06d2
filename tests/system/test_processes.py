"""A gateway and engines as processes, and their reaction to signals."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.lab.testbed.engines import LocalEngine
from tests.orchestrrl.gateway.processes import GatewayProcess, operator_url, two_engines

DEADLINE_S = 120.0
ARGUMENTS = ("--speed", "10", "--tick-s", "0.005")
BODY: dict[str, Any] = {
    "model": "simulated",
    "temperature": 0,
    "max_tokens": 2000,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[LocalEngine]]:
    async with two_engines(tmp_path, *ARGUMENTS) as started:
        yield started


@pytest.fixture
async def gateway(engines: list[LocalEngine], tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    arguments = [f"--engine=e{index}={engine.url}" for index, engine in enumerate(engines)]
    process = GatewayProcess(tmp_path / "gateway.log", ["--engine-kind", "simulated", *arguments])
    await process.start()
    yield process
    await process.stop()


async def ask(http: aiohttp.ClientSession, url: str, index: int) -> list[int]:
    """Return the token ids of one response. Every second request is streamed."""
    body = {**BODY, "prompt": [index, 7, 8], "stream": index % 2 == 1}
    async with http.post(url + "/v1/completions", json=body, headers={"X-Request-Id": f"q{index}"}) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return ids
        ids = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice["token_ids"]
        return ids


async def until_running(http: aiohttp.ClientSession, url: str, count: int) -> dict[str, str]:
    """Wait until `count` requests run, and return the engine of each."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get(await operator_url(http, url) + "/orchestrrl/requests") as response:
                shown = (await response.json())["in_flight"]
            running = {request["id"]: request["engine"] for request in shown if request["state"] == "running"}
            if len(running) >= count:
                return running
            await asyncio.sleep(0.02)


@pytest.mark.smoke
async def test_engine_killed_during_a_step_loses_no_request(
    engines: list[LocalEngine], gateway: GatewayProcess
) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        expected = await asyncio.gather(*(ask(http, engines[0].url, index) for index in range(16)))
        asking = [asyncio.create_task(ask(http, gateway.url, index)) for index in range(16)]
        running = await until_running(http, gateway.url, 16)
        assert set(running.values()) == {"e0", "e1"}
        engines[1].kill()
        assert await asyncio.gather(*asking) == expected
        async with http.get(await operator_url(http, gateway.url) + "/orchestrrl/requests") as response:
            ledger = await response.json()
        assert not ledger["in_flight"]
        assert sorted(request["id"] for request in ledger["finished"]) == sorted(f"q{index}" for index in range(16))


async def test_sigterm_finishes_running_requests_and_rejects_new_ones(
    engines: list[LocalEngine], gateway: GatewayProcess
) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        asking = [asyncio.create_task(ask(http, gateway.url, index)) for index in range(4)]
        await until_running(http, gateway.url, 4)
        stopping = asyncio.create_task(gateway.stop())
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with http.get(gateway.url + "/health") as response:
                    if response.status == 503:
                        break
                await asyncio.sleep(0.01)
        async with http.post(gateway.url + "/v1/completions", json={**BODY, "prompt": [1]}) as response:
            assert response.status == 503
            assert "shutting down" in (await response.json())["error"]["message"]
        assert [len(ids) for ids in await asyncio.gather(*asking)] == [2000] * 4
        assert await stopping == 0


def test_all_invalid_flags_are_reported_at_once() -> None:
    flags = ["--listen", "nowhere", "--engine", "e0", "--engine", "e1=ftp://x", "--policy", "fair", "--stall-s", "-1"]
    flags += ["--engine-kind", "abacus", "--daemon", "nowhere", "--log-level", "loud"]
    command = [sys.executable, "-m", "orchestrrl", "gateway", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    named = ["listen", "engine[0]", "engine[1]", "daemon", "policy", "stall-s", "log-level", "engine-kind"]
    assert [line.split(":")[0] for line in lines] == [f"--{name}" for name in named]
    assert "must be one of simulated, vllm" in result.stderr


def test_gateway_requires_engines_or_a_daemon() -> None:
    command = [sys.executable, "-m", "orchestrrl", "gateway"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 2
    assert "--engine: is required without --daemon" in result.stderr
