"""Tests of a gateway process with clients that leave, ids in use, bodies of 64 MB, and ten thousand requests at
once."""

import asyncio
import itertools
import json
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front import (
    PATH,
    WITHIN_S,
    Front,
    Question,
    check,
    resident_bytes,
    resident_peak_bytes,
    session,
    start_engine,
    start_gateway,
    until,
)

from orchestrrl.gateway.http.connections import MOST_BODY_BYTES
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.orchestrrl.gateway.processes import GatewayProcess
from tests.system.streams import Answer

numbers = itertools.count(100_000, step=10)
MIB = 1 << 20
Start = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start this many equal engines, and a gateway in front of them."""
    engines: list[LocalEngine] = []
    gateways: list[GatewayProcess] = []
    async with session() as http:

        async def starting(*gateway_flags: str, count: int = 1, **engine_flags: object) -> Front:
            starts = (start_engine(f"e{index}", tmp_path, **engine_flags) for index in range(count))
            engines.extend(await asyncio.gather(*starts))
            gateways.append(await start_gateway(engines, tmp_path, *gateway_flags))
            return Front(engines, gateways[0], http)

        yield starting
    for gateway in gateways:
        await gateway.stop()
    for engine in engines:
        engine.kill()


# --- clients that leave ----------------------------------------------------------------------------------------------


async def posted(url: str, question: Question, *headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send this request on it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=MIB)
    writer.write(request(question, *headers))
    await writer.drain()
    return reader, writer


def request(question: Question, *headers: str) -> bytes:
    body = json.dumps(question.body).encode()
    lines = (f"POST {PATH} HTTP/1.1", "Host: gateway", f"X-Request-Id: {question.id}", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half":  # shut down for writing, as some clients do that no longer need an answer
        writer.write_eof()
        return
    if how == "reset":
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_client_that_leaves_is_aborted_on_its_engine_and_its_kv_is_freed(start: Start, how: str) -> None:
    """Streamed or not, running or waiting, on a kept connection or not; other requests are not disturbed."""
    front = await start(speed=3, max_num_seqs=5)
    staying = Question(next(numbers), prompt_tokens=100, max_tokens=1200, stream=True)
    leaving = [Question(next(numbers), 100, 20_000, stream=index % 2 == 0) for index in range(8)]
    answering = front.asking(staying)
    await front.running(staying)
    headers = [("Connection: close",) if index % 4 < 2 else () for index in range(len(leaving))]
    connections = [await posted(front.url, each, *more) for each, more in zip(leaving, headers, strict=True)]

    async def all_there() -> bool:
        now = await front.metrics(0)
        return (now.running, now.waiting) == (5, 4)

    await until(all_there)
    await front.running_at("e0", 5)
    for _, writer in connections:
        leave(writer, how)
    await front.pause(0)  # the remaining request does not end before all others have left

    async def alone() -> bool:
        now = await front.metrics(0)
        return (now.running, now.waiting) == (1, 0)

    await until(alone)
    assert not answering.done()
    now = await front.metrics(0)
    held_tokens = now.kv_usage_fraction * now.kv_capacity_tokens
    assert held_tokens <= 100 + 1200 + 16  # of the remaining one; blocks have 16 tokens
    await front.resume(0)
    check(staying, await answering)
    ended = await front.finished(staying, *leaving)
    assert [item["finish_reason"] for item in ended] == ["length"] + ["abort"] * len(leaving)
    made = (await front.idle(0)).generation_tokens_total
    await front.ask_all([Question(next(numbers))])
    assert (await front.idle(0)).generation_tokens_total == made + 40  # no token was still generated for the others
    for _, writer in connections:
        writer.close()


# --- ids in use ------------------------------------------------------------------------------------------------------


async def test_id_in_flight_is_refused_and_the_first_request_is_unharmed(start: Start) -> None:
    front = await start(count=2, speed=5)
    firsts = [Question(next(numbers), max_tokens=800, stream=stream) for stream in (False, True)]
    answering = [front.asking(first) for first in firsts]
    for first in firsts:
        await front.running(first)
    await front.pause_all()
    seconds = [
        Question(first.number, max_tokens=10, stream=stream, more=more)
        for first in firsts
        for stream in (False, True)
        for more in ({}, {"n": 1})
    ]
    for second in seconds:
        status, error = await front.refused(second)
        assert (status, error["code"]) == (409, 409)
        assert second.id in error["message"]
    assert not any(task.done() for task in answering)
    running = [(await front.metrics(engine)).running for engine in range(2)]
    assert sum(running) == len(firsts)  # none of them reached an engine
    await front.resume_all()
    for first, answer in zip(firsts, await asyncio.gather(*answering), strict=True):
        check(first, answer)
    await front.finished(*firsts)
    await front.ask_all(firsts)  # an id that is free again may be reused


def all_but(few: int, asking: Sequence["asyncio.Task[int]"]) -> Callable[[], Awaitable[bool]]:
    """Return whether at most this many requests have no answer yet."""

    async def answered() -> bool:
        return sum(not task.done() for task in asking) <= few

    return answered


async def test_two_processes_accept_an_id_once_each(start: Start) -> None:
    """The processes do not share ids: both answer a request with the same id, each correctly, and neither is cancelled
    when the other's client leaves."""
    front = await start("--processes", "2", speed=2)
    asked = Question(next(numbers), max_tokens=150)

    async def ask(wait_s: float) -> int:
        headers = {"X-Request-Id": asked.id}
        timeout = aiohttp.ClientTimeout(total=wait_s)
        async with front.http.post(front.url + PATH, json=asked.body, headers=headers, timeout=timeout) as response:
            body = await response.json()
            if response.status == 200:
                assert body["choices"][0]["token_ids"] == asked.answer[0]
            return response.status

    await front.pause(0)  # no request ends before all have arrived
    leaving = asyncio.create_task(ask(0.5))
    asking = [asyncio.create_task(ask(WITHIN_S)) for _ in range(40)]
    await until(all_but(2, asking))
    await front.resume(0)
    statuses = await asyncio.gather(*asking)
    assert set(statuses) == {200, 409}
    assert statuses.count(200) <= 2
    await asyncio.wait({leaving})
    assert isinstance(leaving.exception(), TimeoutError) or leaving.result() == 409
    await front.idle(0)


async def test_one_of_many_concurrent_requests_with_one_id_is_answered(start: Start) -> None:
    front = await start(speed=5)
    asked = Question(next(numbers), max_tokens=200)

    async def ask() -> int:
        headers = {"X-Request-Id": asked.id}
        async with front.http.post(front.url + PATH, json=asked.body, headers=headers) as response:
            body = await response.json()
            if response.status == 200:
                assert body["choices"][0]["token_ids"] == asked.answer[0]
            return response.status

    await front.pause(0)
    asking = [asyncio.create_task(ask()) for _ in range(50)]
    await until(all_but(1, asking))
    await front.resume(0)
    statuses = await asyncio.gather(*asking)
    assert sorted(statuses) == [200] + [409] * 49
    await front.finished(asked)


# --- bodies of 64 MB -------------------------------------------------------------------------------------------------


def text_prompt(free_bytes: int) -> str:
    return '"%s"' % ("x" * (free_bytes - 2))


def ids_prompt(free_bytes: int) -> str:
    """Return a prompt of three-digit ids, which cost Python the most memory per byte."""
    return "[%s7]" % ("999," * ((free_bytes - 3) // 4))


def body_of(size_bytes: int, prompt: Callable[[int], str]) -> bytes:
    """Return a body of exactly this many bytes."""
    frame = '{"max_tokens": 4, "temperature": 0, "prompt": %s}'
    body = frame % prompt(size_bytes - len(frame) + 2)
    return body.encode() + b" " * (size_bytes - len(body))


async def post_raw(front: Front, body: bytes) -> tuple[int, dict[str, Any]]:
    async with front.http.post(front.url + PATH, data=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("prompt", "times"), [(text_prompt, 10), (ids_prompt, 20)], ids=["text", "ids"])
async def test_bodies_at_the_limit_are_handled(start: Start, prompt: Callable[[int], str], times: int) -> None:
    """Just below the limit, the engine refuses: no model has such a context. Above it, the answer is 413. The gateway's
    memory is at most a multiple of the body's size (an id in Python takes more than its digits), and is freed for the
    next."""
    front = await start(speed=5)
    pid = front.gateway.pid
    before_bytes = resident_bytes(pid)
    for _ in range(2):
        status, answer = await post_raw(front, body_of(MOST_BODY_BYTES - 1024, prompt))
        assert status == 400, answer
        assert "maximum context length is 32768 tokens" in answer["error"]["message"]
    status, answer = await post_raw(front, body_of(MOST_BODY_BYTES + 1, prompt))
    assert (status, answer["error"]["code"]) == (413, 413)
    grown_bytes = resident_peak_bytes(pid) - before_bytes
    print(f"{grown_bytes / MIB:.0f} MiB more at the most, {grown_bytes / MOST_BODY_BYTES:.1f} times the body")
    assert grown_bytes < times * MOST_BODY_BYTES
    await front.ask_all([Question(next(numbers)), Question(next(numbers), stream=True)])


# --- ten thousand at once --------------------------------------------------------------------------------------------

BURST = 10_000
BURST_TOKENS = 6
BURST_WITHIN_S = 280.0
ENGINE_FAILURES = "orchestrrl_gateway_engine_failures_total{"
IN_FLIGHT = "orchestrrl_gateway_requests{"
# Per request in flight: two connections with their buffers, the record, and the handler.
REQUEST_BYTES = 48 << 10


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files for all connections, here and in started processes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.alone  # it uses most of the kernel's ephemeral ports
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_ten_thousand_requests_at_once_are_answered(start: Start, many_files: None, stream: bool) -> None:
    """Each has a connection of its own. Each is answered correctly and once; the gateway's memory is bounded."""
    # Beyond the queue's depth they wait in the gateway: it needs no more files for engines than that.
    flags = ("--log-level", "error", "--queue-depth", "1024")
    front = await start(*flags, count=2, speed=50, max_num_seqs=512)
    first = next(numbers) + 1_000_000
    asked = [Question(first + index, 6, BURST_TOKENS, stream) for index in range(BURST)]
    pid = front.gateway.pid
    before_bytes, cpu_s = resident_bytes(pid), front.gateway.cpu_s()

    async def one(question: Question) -> bytes:
        reader, writer = await posted(front.url, question, "Connection: keep-alive")
        answer = await whole_answer(reader)
        writer.close()
        return answer

    async def all_in_flight() -> bool:
        return await in_flight(front) == BURST

    async with asyncio.timeout(BURST_WITHIN_S):
        for engine in range(2):
            await front.pause(engine)  # no request ends before all have arrived
        answering = asyncio.gather(*(one(question) for question in asked))
        await until(all_in_flight, every_s=1.0)
        for engine in range(2):
            await front.resume(engine)
        answers = await answering
    for question, answer in zip(asked, answers, strict=True):
        check(question, read_answer(answer, stream=stream))
    per_request_bytes = (resident_peak_bytes(pid) - before_bytes) / BURST
    print(f"{per_request_bytes / 1024:.1f} KiB each, {front.gateway.cpu_s() - cpu_s:.1f} CPU s")
    assert per_request_bytes < REQUEST_BYTES
    generated = [(await front.idle(engine)).generation_tokens_total for engine in range(2)]
    assert sum(generated) == BURST * BURST_TOKENS + 2  # once each, and the engines' first probes
    await front.finished()
    await front.ask_all([Question(next(numbers))])


async def test_requests_beyond_the_gateways_file_limit_wait(start: Start) -> None:
    """Requests without a connection to an engine wait, for any time, and the engines are not considered failed."""
    front = await start(count=2, speed=20, max_num_seqs=256)
    files = len(os.listdir(f"/proc/{front.gateway.pid}/fd"))
    asked = [Question(next(numbers), max_tokens=20, stream=index % 2 == 0) for index in range(200)]
    for engine in range(2):
        await front.pause(engine)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # For all their clients, and for half of their connections to the engines.
    resource.prlimit(front.gateway.pid, resource.RLIMIT_NOFILE, (files + 300, most))
    answering = asyncio.gather(*(front.ask(question) for question in asked))

    async def as_many_as_can_be() -> bool:
        there = [await front.metrics(engine) for engine in range(2)]
        return sum(engine.waiting for engine in there) >= 90

    await until(as_many_as_can_be)
    await asyncio.sleep(8)  # six attempts in a row take no longer
    assert not answering.done()
    for engine in range(2):
        await front.resume(engine)
    for question, answer in zip(asked, await answering, strict=True):
        check(question, answer)
    assert {item["finish_reason"] for item in await front.finished(*asked)} == {"length"}
    async with front.http.get(front.url + "/metrics") as response:
        failures = [line for line in (await response.text()).splitlines() if line.startswith(ENGINE_FAILURES)]
    assert [line.rpartition(" ")[2] for line in failures] == ["0.0", "0.0"]


async def in_flight(front: Front) -> int:
    """Return the requests in flight by the gateway's metrics, since the page of all requests would be long."""
    async with front.http.get(front.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(IN_FLIGHT))


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    """Read an HTTP answer from a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head:
        return head + await reader.readuntil(b"\r\n0\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


def read_answer(data: bytes, *, stream: bool) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), data[:400]
    answer = Answer()
    if not stream:
        answer.add(json.loads(body))
        return answer
    events = [line[len(b"data: ") :] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    for event in events:
        answer.add(json.loads(event))
    return answer
