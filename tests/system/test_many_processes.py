"""`orchestrrl gateway --processes N`: one port, N gateways, and a daemon to which all of them are attached."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.stack import Stack, engine_flags, named
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from tests.orchestrrl.gateway.processes import GatewayProcess, free_port, operator_url, two_engines

DEADLINE_S = 120.0
PROCESSES = 3
ENGINE = ("--speed", "5", "--tick-s", "0.005")
BODY: dict[str, Any] = {"model": "simulated", "temperature": 0, "ignore_eos": True, "return_token_ids": True}

Start = Callable[..., Awaitable[GatewayProcess]]


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[LocalEngine]]:
    async with two_engines(tmp_path, *ENGINE) as started:
        yield started


@pytest.fixture
async def start(engines: list[LocalEngine], tmp_path: Path) -> AsyncIterator[Start]:
    processes: list[GatewayProcess] = []

    async def starting(*more: str, port: int = 0) -> GatewayProcess:
        flags = [f"--engine=e{index}={engine.url}" for index, engine in enumerate(engines)]
        flags += ["--engine-kind", "simulated", "--id", "g", "--processes", str(PROCESSES), *more]
        processes.append(GatewayProcess(tmp_path / f"gateway-{len(processes)}.log", flags, port))
        await processes[-1].start()
        return processes[-1]

    yield starting
    for process in processes:
        await process.stop()


async def requests_at(engines: list[LocalEngine]) -> int:
    clients = [SimulatedEngine(engine.url) for engine in engines]
    metrics = await asyncio.gather(*(client.metrics() for client in clients))
    await asyncio.gather(*(client.close() for client in clients))
    return sum(reading.running + reading.waiting for reading in metrics)


async def node_of(url: str) -> str:
    """Return the gateway that accepts a new connection."""
    async with aiohttp.ClientSession() as http:
        async with http.get(url + "/version") as answer:
            return str((await answer.json())["gateway"])


async def all_nodes(url: str) -> set[str]:
    seen: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < PROCESSES:
            try:
                seen.add(await node_of(url))
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    return seen


async def ask(http: aiohttp.ClientSession, url: str, index: int, max_tokens: int = 50) -> list[int]:
    body = {**BODY, "prompt": [index, 7, 8], "max_tokens": max_tokens}
    async with http.post(url + "/v1/completions", json=body, headers={"X-Request-Id": f"q{index}"}) as answer:
        assert answer.status == 200, await answer.text()
        ids: list[int] = (await answer.json())["choices"][0]["token_ids"]
        return ids


def fresh() -> aiohttp.ClientSession:
    """Return a session with a new connection for each request, so that requests spread over gateways."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))


async def test_all_processes_serve_one_port_and_end_together(engines: list[LocalEngine], start: Start) -> None:
    gateway = await start()
    assert await all_nodes(gateway.url) == {"g-0", "g-1", "g-2"}
    async with fresh() as http:
        expected = await asyncio.gather(*(ask(http, engines[0].url, index) for index in range(24)))
        assert await asyncio.gather(*(ask(http, gateway.url, index) for index in range(24))) == expected
        for engine in engines:  # no request ends before all have started
            await http.post(f"{engine.url}/pause?mode=keep&clear_cache=false")
        asking = [asyncio.create_task(ask(http, gateway.url, index, 1500)) for index in range(12)]
        async with asyncio.timeout(DEADLINE_S):
            while await requests_at(engines) < 12:
                await asyncio.sleep(0.02)
        stopping = asyncio.create_task(gateway.stop())
        await asyncio.sleep(0.1)
        for engine in engines:
            await http.post(f"{engine.url}/resume")
        assert await stopping == 0
        assert [len(ids) for ids in await asyncio.gather(*asking)] == [1500] * 12
    with pytest.raises(aiohttp.ClientConnectorError):
        await node_of(gateway.url)


async def test_killed_process_is_restarted_and_others_continue(start: Start) -> None:
    gateway = await start()
    assert len(await all_nodes(gateway.url)) == PROCESSES
    victim = children(gateway)[0]
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while len(children(gateway)) < PROCESSES or victim in children(gateway):
            await asyncio.sleep(0.05)
    assert len(await all_nodes(gateway.url)) == PROCESSES


async def test_processes_end_with_their_parent(start: Start) -> None:
    gateway = await start()
    pids = children(gateway)
    gateway.kill()
    async with asyncio.timeout(DEADLINE_S):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)


async def test_port_in_use_is_reported_immediately(start: Start, tmp_path: Path) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
    with pytest.raises(Permanent, match=r"--listen: cannot listen on 127.0.0.1:\d+: Address already in use"):
        await start(port=port)
    server.close()


def children(gateway: GatewayProcess) -> list[int]:
    """Return the gateway processes. Python's resource tracker is also a child, but not a gateway."""
    pid = gateway.pid
    pids = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid for pid in pids if b"spawn_main" in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Return the command line of a process, or an empty string if it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
async def daemon_address(engines: list[LocalEngine], tmp_path: Path) -> AsyncIterator[str]:
    """Run a daemon in mode advise, and an agent that reports the engines."""
    async with Stack(tmp_path) as stack:
        await stack.start_daemon({"mode": "advise"})
        urls = named([engine.url for engine in engines])
        stack.start_agent("--engine-kind", "simulated", "--interval-s", "0.1", *engine_flags("--engine", urls))
        yield stack.daemon_address


@pytest.mark.smoke
async def test_daemon_lists_all_requests_and_moves_reach_their_gateway(daemon_address: str, start: Start) -> None:
    gateway = await start("--daemon", daemon_address)
    async with fresh() as http, ControlClient(daemon_address) as control:
        asking = [asyncio.create_task(ask(http, gateway.url, index, 6000)) for index in range(12)]
        wanted = {f"q{index}" for index in range(12)}
        running: dict[str, str] = {}
        async with asyncio.timeout(DEADLINE_S):
            while running.keys() != wanted:
                listed = await control.control.ListRequests(control_pb2.ListRequestsRequest())
                running = {
                    request.request_id: request.engine_id for request in listed.requests if request.generated_tokens
                }
                await asyncio.sleep(0.05)
        # Each of these connections may reach another gateway, and most requests belong to other gateways.
        for request_id, engine in running.items():
            move = {"request_id": request_id, "to_engine_id": "e1" if engine == "e0" else "e0"}
            operator = await operator_url(http, gateway.url)
            async with http.post(operator + "/orchestrrl/move", json={"moves": [move]}) as answer:
                (item,) = (await answer.json())["items"]
                assert item["done"], item
        async with http.post(
            operator + "/orchestrrl/move", json={"moves": [{"request_id": "none", "to_engine_id": "e0"}]}
        ) as answer:
            (item,) = (await answer.json())["items"]
            assert not item["done"]
            assert "not in flight" in item["detail"]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
