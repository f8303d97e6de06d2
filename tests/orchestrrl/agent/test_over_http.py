"""Tests of watching over real HTTP: an engine process that is killed and restarts changed, and servers that are no
engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from orchestrrl.agent.watch import EngineWatch, HealthLimits
from orchestrrl.core.clock import WallClock
from orchestrrl.engines.base import connect
from orchestrrl.fleet.reports import EngineReport
from planner.model import EngineHealth, EngineId, NodeId

DEADLINE_S = 120.0


@contextlib.asynccontextmanager
async def watching(url: str, limits: HealthLimits | None = None) -> AsyncIterator[list[EngineReport]]:
    seen: list[EngineReport] = []
    engine = connect("vllm", url)
    watch = EngineWatch(
        EngineId("e0"),
        engine,
        seen.append,
        agent=NodeId("a"),
        clock=WallClock(),
        interval_s=0.05,
        limits=limits or HealthLimits(),
    )
    task = asyncio.create_task(watch.run())
    try:
        yield seen
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await engine.close()


async def until(seen: list[EngineReport], condition: Callable[[EngineReport], bool]) -> EngineReport:
    async with asyncio.timeout(DEADLINE_S):
        while not (seen and condition(seen[-1])):
            await asyncio.sleep(0.01)
    return seen[-1]


ANSWERS = {
    "a web page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 15\r\n\r\n<html>hi</html>",
    "an error": b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a cut answer": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:num_requests_running 1",
    "not a number": b'HTTP/1.1 200 OK\r\nContent-Length: 39\r\n\r\nvllm:num_requests_running{a="b"} seven\n\n',
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_server_that_is_no_engine_is_marked_without_a_crash(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, watching(f"http://127.0.0.1:{port}") as seen:
        marked = await until(seen, lambda seen: seen.health in (EngineHealth.GONE, EngineHealth.NONSENSE))
        assert marked.sample is None
        assert marked.health_detail
        count = len(seen)
        await until(seen, lambda _: len(seen) > count + 2)


async def test_server_that_accepts_without_an_answer_is_gone() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with watching(f"http://127.0.0.1:{port}", HealthLimits(slow_after_s=0.1, gone_after_s=0.5)) as seen:
            gone = await until(seen, lambda seen: seen.health is EngineHealth.GONE)
            assert gone.health_detail.startswith("no answer for")
