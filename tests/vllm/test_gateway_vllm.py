"""The gateway with real vLLM: moved greedy answers equal undisturbed ones, and a killed server loses no request."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OutcomeUnknown
from orchestrrl.core.operations import (
    EngineRoute,
    OperationItemResult,
)
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.moves.reseed import seed_at
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.lab.testbed.engines import LocalEngine
from planner.model import EngineId, MoveMethod, NodeId, RequestId, RequestMove, RequestState
from tests.orchestrrl.gateway.interruptible_engine import InterruptibleEngine
from tests.system.streams import Answer, read_stream, read_whole
from tests.vllm.conftest import INTERRUPTED_TOKENS, StartVllm

DEADLINE_S = 120.0
TOKENS = 400
TRIES = 3
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
}
COMPLETION = ("/v1/completions", {**GREEDY, "prompt": [40, 41, 42, 43], "logprobs": 2})
CHAT = (
    "/v1/chat/completions",
    {**GREEDY, "messages": [{"role": "user", "content": "Tell me"}], "logprobs": True, "top_logprobs": 2},
)
# vLLM applies this penalty to prompt and answer alike, so the request may be continued.
REPEATING = ("/v1/completions", {**GREEDY, "prompt": [50, 51], "repetition_penalty": 1.3})


class Harness:
    """A gateway in this process with vLLM servers e0, e1, ... `holds` apply to the next attempts, in order."""

    def __init__(self, engines: tuple[LocalEngine, ...], http: aiohttp.ClientSession, kv_version: str = "") -> None:
        self.engines = engines
        self.http = http
        self.pause_registry: deque[int] = deque()
        self.released = asyncio.Event()
        self.fleet = EngineBackends(
            lambda url: InterruptibleEngine(url, self.pause_registry, self.released), clock=WallClock()
        )
        limits = RelayLimits(coalesce_tokens=4, move_answer_s=DEADLINE_S)
        self.gateway = Gateway(NodeId("gateway"), self.fleet, limits=limits)
        self.gateway.set_routes(
            [EngineRoute(EngineId(f"e{i}"), engine.url, kv_version=kv_version) for i, engine in enumerate(engines)]
        )
        self.server = GatewayServer(self.gateway, reseed=True)
        self.url = ""

    async def ask(self, url: str, path: str, body: dict[str, Any], request_id: str = "", *, stream: bool) -> Answer:
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with self.http.post(url + path, json={**body, "stream": stream}, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await (read_stream(response) if stream else read_whole(response))

    async def until(self, request_id: str, tokens: int) -> EngineId:
        """Return the engine of a request once it has this many tokens and runs (or, without tokens, waits)."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                record = self.gateway.ledger.get(RequestId(request_id))
                settled = record is not None and (record.state is RequestState.RUNNING or not tokens)
                if settled and record.engine is not None and len(record.generated_ids) >= tokens:
                    return record.engine
                await asyncio.sleep(0.002)

    async def move(
        self, request_id: str, tokens: int, method: MoveMethod = MoveMethod.RECOMPUTE, other_s: float = 0.0
    ) -> OperationItemResult:
        """Move the request once it has this many tokens in total."""
        source = await self.until(request_id, tokens)
        target = EngineId("e1" if source == "e0" else "e0")
        order = RequestMove(RequestId(request_id), source, target, method=method, other_s=other_s)
        (result,) = await self.gateway.move([order])
        return result


@pytest.fixture
async def harness(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Harness]:
    async with aiohttp.ClientSession() as http:
        harness = Harness(vllm_servers, http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        yield harness
        await harness.server.close()
        await harness.fleet.close()


async def moved_at(
    harness: Harness, request_id: str, asking: "asyncio.Task[Answer]", *totals: int
) -> list[OperationItemResult]:
    """Move the request at each total of tokens. There may be fewer results: vLLM merges outputs not yet streamed
    (`RequestOutputCollector`), so that after a pause the rest may arrive at once, with nothing left to move."""
    results: list[OperationItemResult] = []
    for tokens in totals:
        moving = asyncio.create_task(harness.move(request_id, tokens))
        await asyncio.wait({moving, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not moving.done():
            moving.cancel()
            break
        if moving.result().detail == "the request finished before the move":
            break
        results.append(moving.result())
    return results


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ask", [COMPLETION, CHAT, REPEATING], ids=["completion", "chat", "repetition_penalty"])
async def test_moved_answer_equals_the_undisturbed_one(harness: Harness, ask: tuple[str, Any], stream: bool) -> None:
    path, body = ask
    undisturbed = await harness.ask(harness.engines[0].url, path, body, stream=stream)
    assert len(undisturbed.token_ids) == TOKENS
    totals = (20, 90, 211)
    for attempt in range(TRIES):
        harness.pause_registry.clear()
        harness.pause_registry.extend((20, 70, 121))
        asking = asyncio.create_task(harness.ask(harness.url, path, body, f"r{attempt}", stream=stream))
        results = await moved_at(harness, f"r{attempt}", asking, *totals)
        answer = await asking
        if len(results) == len(totals):
            break
    for result, tokens in zip(results, totals, strict=True):
        assert result.done, result.detail
        assert result.recomputed_tokens >= tokens
    assert answer.token_ids == undisturbed.token_ids
    assert answer.text == undisturbed.text
    assert answer.finish_reason == undisturbed.finish_reason == "length"
    assert answer.prompt_token_ids == undisturbed.prompt_token_ids
    assert answer.usage == undisturbed.usage
    # Batches of other shapes differ in the last bits.
    assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
    # The client has its answer before the gateway has archived the record.
    async with asyncio.timeout(DEADLINE_S):
        while not harness.gateway.ledger.finished:
            await asyncio.sleep(0.01)
    assert harness.gateway.ledger.finished[-1].moves == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_reseeded_answer_equals_requests_with_the_announced_seeds(harness: Harness, stream: bool) -> None:
    """The comparison runs on one bare server: one request per part of the answer, with the part's seed."""
    path, body = COMPLETION
    body = {**body, "temperature": 1.0, "seed": 5, "max_tokens": 90}
    harness.pause_registry.extend((20, 30))
    asking = asyncio.create_task(harness.ask(harness.url, path, body, "seeded", stream=stream))
    results = await moved_at(harness, "seeded", asking, 20, 50)
    assert all(result.done for result in results)
    answer = await asking
    cuts = [each["position"] for each in answer.reseeded]
    assert len(cuts) == len(results) > 0
    assert answer.reseeded == [{"position": position, "seed": seed_at(5, position)} for position in cuts]
    token_ids: list[int] = []
    logprobs: list[float] = []
    for start, end in pairwise([0, *cuts, 90]):
        part = {**body, "prompt": [*body["prompt"], *token_ids], "seed": seed_at(5, start), "max_tokens": end - start}
        reference = await harness.ask(harness.engines[0].url, path, part, stream=False)
        token_ids += reference.token_ids
        logprobs += reference.logprobs
    assert answer.token_ids == token_ids
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_stop_string_across_the_cut_ends_the_answer(harness: Harness, stream: bool) -> None:
    path, body = COMPLETION
    body = {**body, "max_tokens": 80}
    url = harness.engines[0].url
    text = (await harness.ask(url, path, body, stream=False)).text
    for tokens, included in ((9, False), (26, True), (43, False)):
        before = (await harness.ask(url, path, {**body, "max_tokens": tokens}, stream=False)).text
        stop = text[len(before) - 3 : len(before) + 24]
        asked = {**body, "stop": [stop, "never"], "include_stop_str_in_output": included}
        undisturbed = await harness.ask(url, path, asked, stream=stream)
        assert (undisturbed.finish_reason, undisturbed.stop_reason) == ("stop", stop)
        assert tokens < len(undisturbed.token_ids) < 80
        harness.pause_registry.append(tokens)
        asking = asyncio.create_task(harness.ask(harness.url, path, asked, f"stop-{tokens}", stream=stream))
        result = await harness.move(f"stop-{tokens}", tokens)
        answer = await asking
        assert result.done, result.detail
        assert answer.token_ids == undisturbed.token_ids
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (undisturbed.text, "stop", stop)
        assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)


async def test_moved_chat_with_tools_equals_the_undisturbed_one(harness: Harness) -> None:
    path, body = CHAT
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {**body, "tools": [tool], "max_tokens": 60}
    url = harness.engines[0].url
    undisturbed = await harness.ask(url, path, body, stream=False)
    harness.pause_registry.append(20)
    asking = asyncio.create_task(harness.ask(harness.url, path, body, "tools", stream=False))
    result = await harness.move("tools", 20)
    harness.released.set()
    answer = await asking
    engine = VllmEngine(url)
    parses_chats = (await engine.capabilities()).parses_chats  # not vLLM 0.31
    assert result.done == parses_chats, result.detail
    assert (answer.token_ids, answer.text) == (undisturbed.token_ids, undisturbed.text)
    assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
    # The model's random weights generate no tool call.
    prompt = 'a <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    async with harness.http.post(url + "/tokenize", json={"model": "tiny", "prompt": prompt}) as response:
        tokens = (await response.json())["tokens"]
    assert await engine.samples_plainly(body)
    if parses_chats:  # a grammar permits one call
        assert not await engine.samples_plainly({**body, "parallel_tool_calls": False})
    message = await engine.parse_chat(body, undisturbed.prompt_token_ids or [], tokens)
    assert (message["content"], message["tool_calls"][0]["function"]) == ("a ", {"name": "f", "arguments": "{}"})
    await engine.close()


async def test_text_is_correct_for_every_position_of_the_cut(harness: Harness) -> None:
    """Random weights generate many incomplete characters; the request is cut after each of several tokens."""
    path, body = COMPLETION
    body = {**body, "max_tokens": 60, "logprobs": None}
    undisturbed = await harness.ask(harness.engines[0].url, path, body, stream=True)
    for tokens in range(1, 40, 3):
        harness.pause_registry.append(tokens)
        asking = asyncio.create_task(harness.ask(harness.url, path, body, f"cut-{tokens}", stream=True))
        result = await harness.move(f"cut-{tokens}", tokens)
        answer = await asking
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text, result


@pytest.mark.slow
async def test_text_is_correct_if_servers_do_not_detokenize(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dropped(_: InterruptibleEngine, token_ids: Sequence[int]) -> str:
        raise OutcomeUnknown(f"/detokenize of {len(token_ids)} tokens: Server disconnected")

    monkeypatch.setattr(InterruptibleEngine, "detokenize", dropped)
    path, body = COMPLETION
    body = {**body, "max_tokens": 60, "logprobs": None}
    undisturbed = await harness.ask(harness.engines[0].url, path, body, stream=True)
    for tokens in range(3, 40, 5):
        harness.pause_registry.append(tokens)
        asking = asyncio.create_task(harness.ask(harness.url, path, body, f"undecoded-{tokens}", stream=True))
        result = await harness.move(f"undecoded-{tokens}", tokens)
        answer = await asking
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text, result


@pytest.mark.smoke
async def test_waiting_request_moves_to_a_free_seat(harness: Harness) -> None:
    """e0 has four seats, so the fifth request waits there until it is moved."""
    harness.gateway.set_routes([EngineRoute(EngineId("e0"), harness.engines[0].url)])
    path, body = COMPLETION
    long_body = {**body, "max_tokens": 10 * INTERRUPTED_TOKENS, "logprobs": None}
    harness.pause_registry.extend([5] * 4)
    long_ones = [
        asyncio.create_task(harness.ask(harness.url, path, long_body, f"l{i}", stream=False)) for i in range(4)
    ]
    await asyncio.gather(*(harness.until(f"l{i}", 5) for i in range(4)))
    late = asyncio.create_task(harness.ask(harness.url, path, {**body, "max_tokens": 10}, "late", stream=False))
    await harness.until("late", 0)
    harness.gateway.set_routes([EngineRoute(EngineId(f"e{i}"), engine.url) for i, engine in enumerate(harness.engines)])
    result = await harness.move("late", 0)
    assert result.done, result.detail
    assert result.recomputed_tokens == 0
    answer = await late
    undisturbed = await harness.ask(harness.engines[1].url, path, {**body, "max_tokens": 10}, stream=False)
    assert answer.token_ids == undisturbed.token_ids
    for task in long_ones:
        task.cancel()
    await asyncio.gather(*long_ones, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        while (await harness.fleet.get(EngineId("e0")).engine.metrics()).running:  # type: ignore[union-attr]
            await asyncio.sleep(0.05)


async def test_paused_server_freezes_requests_and_loses_none(harness: Harness) -> None:
    path, body = COMPLETION
    undisturbed = await harness.ask(harness.engines[0].url, path, body, stream=False)
    harness.pause_registry.append(30)
    asking = asyncio.create_task(harness.ask(harness.url, path, body, "r", stream=False))
    source = await harness.until("r", 30)
    slot = harness.fleet.get(source)
    assert slot is not None
    async with harness.http.post(slot.engine.url + "/pause?mode=abort") as response:
        assert response.status == 200
    await slot.engine.resume()
    harness.released.set()
    answer = await asking
    assert answer.token_ids == undisturbed.token_ids
    assert answer.text == undisturbed.text


async def test_server_killed_during_a_step_loses_no_request(
    vllm_servers: tuple[LocalEngine, ...], start_vllm_server: StartVllm
) -> None:
    doomed = await start_vllm_server("doomed", "1:0.5")  # two tokens per second: killed long before a request ends
    async with aiohttp.ClientSession() as http:
        harness = Harness((vllm_servers[0], doomed), http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        asks = []
        for index in range(8):
            path, body = (COMPLETION, CHAT)[index % 2]
            body = {**body, "max_tokens": 300 + index}
            if path == "/v1/completions":
                body["prompt"] = [60 + index, 61, 62]
            asks.append((path, body, index % 4 < 2))
        expected = await asyncio.gather(
            *(harness.ask(harness.engines[0].url, path, body, stream=stream) for path, body, stream in asks)
        )
        harness.pause_registry.extend([4] * 8)
        asking = [
            asyncio.create_task(harness.ask(harness.url, path, body, f"q{index}", stream=stream))
            for index, (path, body, stream) in enumerate(asks)
        ]
        slot = harness.fleet.get(EngineId("e1"))
        assert slot is not None
        async with asyncio.timeout(DEADLINE_S):
            while not any(len(record.generated_ids) > 3 for record in slot.records.values()):
                await asyncio.sleep(0.002)
        doomed.kill()
        harness.released.set()
        answers = await asyncio.gather(*asking)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert [answer.text for answer in answers] == [answer.text for answer in expected]
        assert sum(summary.engine == "e0" for summary in harness.gateway.ledger.finished) == len(asks)
        assert len(harness.gateway.ledger) == 0
        await harness.server.close()
        await harness.fleet.close()


async def test_disconnecting_clients_free_the_servers_kv(harness: Harness) -> None:
    path, body = COMPLETION
    long_body = {**body, "max_tokens": 10 * INTERRUPTED_TOKENS, "logprobs": None}
    asking = [
        asyncio.create_task(harness.ask(harness.url, path, long_body, f"g{index}", stream=index % 2 == 0))
        for index in range(4)
    ]
    await asyncio.gather(*(harness.until(f"g{index}", 5) for index in range(4)))
    metrics = [await slot.engine.metrics() for slot in harness.fleet]
    assert sum(each.running for each in metrics) == 4
    assert any(each.kv_usage_fraction > 0 for each in metrics)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        for slot in harness.fleet:
            while (now := await slot.engine.metrics()).running or now.waiting or now.kv_usage_fraction:
                await asyncio.sleep(0.05)
    assert harness.gateway.ledger.finished_by_reason == {"abort": 4}


async def test_destination_killed_during_a_move_returns_the_request(
    vllm_servers: tuple[LocalEngine, ...], start_vllm_server: StartVllm
) -> None:
    """The destination is stopped (SIGSTOP) until the request arrives, and never generates a token."""
    doomed = await start_vllm_server("doomed")
    async with aiohttp.ClientSession() as http:
        harness = Harness((vllm_servers[0], doomed), http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        path, body = COMPLETION
        undisturbed = await harness.ask(harness.engines[0].url, path, body, stream=False)
        harness.pause_registry.append(20)
        asking = asyncio.create_task(harness.ask(harness.url, path, body, "r", stream=True))
        assert await harness.until("r", 20) == "e0"
        os.killpg(doomed.pid, signal.SIGSTOP)
        moving = asyncio.create_task(harness.move("r", 20))
        record = harness.gateway.ledger.get(RequestId("r"))
        assert record is not None
        async with asyncio.timeout(DEADLINE_S):
            while record.engine != "e1":
                await asyncio.sleep(0.002)
        doomed.kill()
        harness.released.set()
        result = await moving
        assert not result.done
        assert "e1 failed" in result.detail
        answer = await asking
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
        await harness.server.close()
        await harness.fleet.close()
