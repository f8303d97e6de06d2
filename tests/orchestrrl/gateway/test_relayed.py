"""Requests that need the engine's own answer: the body is sent unchanged, and the answer is relayed."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import (
    CloseBarrier,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.engines.base import CompletionEndpoint, EngineSample
from orchestrrl.gateway.http.responses import response
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.ledger import VersionSpan
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from planner.model import EngineId, RequestId, RequestMove, RequestState
from tests.orchestrrl.gateway.fakes import world
from tests.orchestrrl.gateway.http_harness import CHAT_PATH, PATH, HttpHarness, http_harness, request

PROMPT = [97, 32, 98]

ECHO: dict[str, Any] = {"prompt": "sane", "max_tokens": 3, "echo": True}
NAMED = b"X-Request-Id: r\r\n"


@pytest.fixture
async def harness() -> AsyncIterator[HttpHarness]:
    async with http_harness(engines=2) as fixture:
        yield fixture


def asked_of(harness: HttpHarness) -> list[dict[str, Any]]:
    return [asked.body for engine in harness.engines for asked in engine.asked]


async def until_asked(harness: HttpHarness) -> None:
    async with asyncio.timeout(60):
        while not harness.tries:
            await asyncio.sleep(0.002)


async def test_body_and_answer_are_relayed_unchanged(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.choice_fields = {"prompt_logprobs": [None, {"7": {"logprob": -1.0}}], "logprobs": {"tokens": ["x"]}}
        engine.answer_fields = {"kv_transfer_params": {"a": 1}, "metrics": None}
    body = {**ECHO, "logprobs": 1, "prompt_logprobs": 2, "stream": False, "return_token_ids": False}
    status, answer = await harness.post(body, headers=NAMED)
    assert status == 200
    assert asked_of(harness) == [body]
    (choice,) = answer["choices"]
    assert choice["text"] == "saneabc"
    assert choice["logprobs"] == {"tokens": ["x"]}
    assert choice["prompt_logprobs"] == [None, {"7": {"logprob": -1.0}}]
    assert (answer["id"], answer["model"]) == ("cmpl-r", "m")
    assert (answer["kv_transfer_params"], answer["metrics"]) == ({"a": 1}, None)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    async with asyncio.timeout(60):
        while not harness.gateway.ledger.finished:
            await asyncio.sleep(0.002)
    summary = harness.gateway.ledger.finished[-1]
    assert (summary.prompt_tokens, summary.generated_tokens, summary.finish_reason) == (2, 3, "length")


@pytest.mark.parametrize("experts", [False, True])
async def test_routed_experts_in_a_whole_answer_mark_the_engine(harness: HttpHarness, experts: bool) -> None:
    for engine in harness.engines:
        engine.choice_fields = {"routed_experts": "k05VTVBZ"} if experts else {}
    await harness.post(ECHO, headers=NAMED)
    marks = {backend.whole_field for backend in harness.gateway.fleet}
    assert ("routed_experts" in marks) == experts


@pytest.mark.parametrize("usage", [False, True])
async def test_stream_is_relayed_event_by_event(harness: HttpHarness, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = await harness.stream({**ECHO, **options}, headers=NAMED)
    assert asked_of(harness) == [{**ECHO, **options, "stream": True}]
    assert [event["choices"][0]["text"] for event in events[:3]] == ["a", "b", "c"]
    assert {event["id"] for event in events} == {"cmpl-r"}
    assert [event["choices"][0]["finish_reason"] for event in events[:3]] == [None, None, "length"]
    assert [event["usage"]["prompt_tokens_details"] for event in events[3:]] == [{"cached_tokens": 1}] * usage
    async with asyncio.timeout(60):
        while not harness.gateway.ledger.finished:
            await asyncio.sleep(0.002)
    assert harness.gateway.ledger.finished[-1].generated_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_each_sample_is_relayed_separately(harness: HttpHarness, stream: bool) -> None:
    body = {**ECHO, "n": 2, "temperature": 1, "seed": 5}
    if stream:
        events = await harness.stream({**body, "stream_options": {"include_usage": True}})
        texts = {0: "", 1: ""}
        for event in events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "abc", 1: "abc"}
        usage = events[-1]["usage"]
    else:
        _, answer = await harness.post(body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [choice["text"] for choice in answer["choices"]] == ["saneabc"] * 2
        usage = answer["usage"]
    assert sorted(asked["seed"] for asked in asked_of(harness)) == [5, 6]
    assert not any("n" in asked for asked in asked_of(harness))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 6)


@pytest.mark.parametrize(("path", "more"), [(PATH, {"prompt": "a"}), (CHAT_PATH, {"messages": [{"role": "user"}]})])
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
async def test_several_greedy_answers_are_refused(
    harness: HttpHarness, path: str, more: dict[str, Any], temperature: float
) -> None:
    status, answer = await harness.post({**more, "n": 2, "temperature": temperature}, path)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "greedy" in answer["error"]["message"]
    assert harness.tries == 0
    assert (await harness.post({**more, "n": 2, "temperature": 0.1, "max_tokens": 3}, path))[0] == 200


async def test_running_relayed_request_does_not_move(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.hold_after = 1
    asking = asyncio.create_task(harness.stream(ECHO, headers=NAMED))
    await until_asked(harness)
    record = harness.gateway.ledger.get(RequestId("r"))
    assert record is not None
    assert record.engine is not None
    order = RequestMove(record.id, record.engine, EngineId("e1" if record.engine == "e0" else "e0"))
    (result,) = await harness.gateway.move([order])
    assert (result.done, "echo: the answer begins with the prompt" in result.detail) == (False, True)
    (view,) = harness.gateway.report().in_flight
    assert (view.movable, view.movable_detail) == (False, "echo: the answer begins with the prompt")
    for engine in harness.engines:
        engine.released.set()
    await asking


async def test_aborted_relayed_request_is_sent_to_another_engine(harness: HttpHarness) -> None:
    broken = iter([True, False])

    def refuse(body: dict[str, Any]) -> web.Response | None:
        return web.json_response({"error": {"message": "dying"}}, status=500) if next(broken) else None

    for engine in harness.engines:
        engine.refuses = refuse
    status, answer = await harness.post(ECHO)
    assert (status, answer["choices"][0]["text"]) == (200, "saneabc")
    assert asked_of(harness) == [ECHO, ECHO]


async def test_broken_relayed_stream_ends_with_an_error(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.hold_after = 1
    data = json.dumps({**ECHO, "stream": True}).encode()
    asking = asyncio.create_task(harness.send(request(data, headers=NAMED)))
    record = None
    async with asyncio.timeout(60):
        while record is None or not record.delivered:
            record = harness.gateway.ledger.get(RequestId("r"))
            await asyncio.sleep(0.002)
    backend = harness.gateway.fleet.get(record.engine)
    assert backend is not None
    await backend.engine.close()  # its connections break
    _, answer = await asking
    error = json.loads(answer.split(b"\n\n")[-3][len(b"data: ") :])["error"]
    assert error["code"] == 502
    assert "echo: the answer begins with the prompt" in error["message"]
    assert harness.tries == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_relayed_request_can_be_cancelled(harness: HttpHarness, stream: bool) -> None:
    for engine in harness.engines:
        engine.hold_after = 1
    ask = harness.stream if stream else harness.post
    asking: asyncio.Task[Any] = asyncio.create_task(ask(ECHO, headers=NAMED))
    await until_asked(harness)
    assert harness.gateway.cancel([RequestId("r")], (), "redundant") == ("r",)
    answer = await asking
    last = answer[-1] if stream else answer[1]
    assert last["choices"][0]["finish_reason"] == "abort"
    for engine in harness.engines:
        engine.released.set()


async def test_relayed_answer_has_policy_versions(harness: HttpHarness) -> None:
    for backend in harness.gateway.fleet:
        backend.policy_version = 7
    _, answer = await harness.post({**ECHO, "return_policy_versions": True})
    assert answer["choices"][0]["policy_versions"] == [{"version": 7, "start": 0, "end": 3}]
    events = await harness.stream({**ECHO, "return_policy_versions": True})
    assert [event["choices"][0]["policy_version"] for event in events] == [7, 7, 7]
    assert not any("return_policy_versions" in body for body in asked_of(harness))


async def test_relayed_events_have_policy_versions(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.hold_after = 1
    for backend in harness.gateway.fleet:
        backend.policy_version = 7
    asking = asyncio.create_task(harness.stream({**ECHO, "return_policy_versions": True}, headers=NAMED))
    async with asyncio.timeout(60):
        while (record := harness.gateway.ledger.get(RequestId("r"))) is None or not record.relayed_tokens:
            await asyncio.sleep(0.002)
    for backend in harness.gateway.fleet:
        backend.policy_version = 8
    for engine in harness.engines:
        engine.released.set()
    assert [event["choices"][0]["policy_version"] for event in await asking] == [7, 8, 8]
    assert record.versions.spans(3) == (VersionSpan(7, 0, 1), VersionSpan(8, 1, 3))


async def test_relayed_answer_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_S", 0.001)
    store = LedgerStore(RetentionPolicy(tmp_path / "ledger.db", from_s=0.0), WallClock())
    store.start()
    async with http_harness(store=store) as harness:
        for tries in (1, 2):
            assert (await harness.post(ECHO, headers=NAMED))[0] == 200
            assert harness.tries == tries
    await store.close()


# --- without sockets ---


async def test_engine_that_computes_a_whole_answer_is_not_stalled() -> None:
    """A non-streamed answer shows no token before its end, but the engine's counters show progress."""
    there = world(1, stall_s=10.0)
    engine = there.engines["e0"]
    engine.hangs = True
    computed = EngineSample(1, 0, 0.0, 0, 0, 0, 0)

    async def metrics() -> EngineSample:
        return computed

    engine.metrics = metrics  # type: ignore[method-assign]
    engine.can_pause = True
    watching = asyncio.create_task(there.gateway.watch())
    job = there.gateway.request_group(there.ask(**ECHO))
    running = asyncio.create_task(job.run())
    await there.settle()
    for tokens in range(1, 6):
        computed = replace(computed, generation_tokens_total=tokens)
        await there.clock.advance(12.0)
        await there.settle()
    assert len(engine.seen) == 1
    engine.paused = False
    for _ in range(4):  # no further tokens: it has stalled
        await there.clock.advance(12.0)
        await there.settle()
    assert len(engine.seen) > 1  # the capabilities are read again
    running.cancel()
    watching.cancel()
    await asyncio.gather(running, watching, return_exceptions=True)
    await there.fleet.close()


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_closing_barrier_waits_for_or_ends_relayed_request(mode: PauseMode) -> None:
    there = world(1)
    job = there.gateway.request_group(there.ask(**ECHO))
    running = asyncio.create_task(job.run())
    await there.settle()
    now_s = there.clock.now_s()
    order = CloseBarrier("lease", "", mode, FrozenRequests.CONTINUE, now_s + 60.0, now_s + 50.0)
    closing = asyncio.create_task(there.gateway.barrier.close(order))
    for _ in range(5):
        await there.clock.advance(0.5)
        if mode is PauseMode.WAIT:
            assert job.records[0].engine == "e0" or job.records[0].done
            await there.step()
    await closing
    await running
    assert job.records[0].finish_reason == ("length" if mode is PauseMode.WAIT else "abort")
    assert len(there.engines["e0"].seen) == 1
    answer = response(job.request.form, job.records, 1)
    assert answer["choices"][0]["finish_reason"] == job.records[0].finish_reason
    await there.gateway.barrier.open(OpenBarrier("lease"))
    await there.fleet.close()


def test_engine_body_has_no_gateway_fields() -> None:
    there = world(1)
    ask = there.ask(
        CompletionEndpoint.COMPLETIONS, **ECHO, group_enough=1, max_version_lag=2, on_stale="abort", request_id="r"
    )
    assert {**ask.records[0].body, **ask.records[0].form_fields} == ECHO


async def test_capabilities_are_read_before_a_whole_answer_is_requested() -> None:
    there = world(1)
    there.engines["e0"].routed_experts = True
    async with there.gateway.request_group(there.ask(prompt=PROMPT, max_tokens=3)):
        await there.settle()
        (sent,) = there.engines["e0"].seen
        assert sent.verbatim
    await there.fleet.close()


async def test_capabilities_are_read_again_after_a_restart() -> None:
    there = world(1)
    engine = there.engines["e0"]
    (backend,) = there.fleet
    await there.fleet.capabilities(backend)
    backend.tying_field = "of the server before"
    engine.die()
    there.fleet.suspect(backend, "it died")
    engine.routed_experts = True
    engine.revive()
    await there.clock.advance(10.0)
    await there.settle()
    assert backend.usable
    assert backend.capabilities is not None
    assert backend.capabilities.routed_experts
    assert not backend.tying_field
    await there.fleet.close()


async def test_answer_restarts_on_engine_whose_whole_answers_have_more_fields() -> None:
    there = world(2)
    there.engines["e1"].routed_experts = True
    other = there.fleet.get(EngineId("e1"))
    assert other is not None
    other.outdated = True  # so that the first attempt goes to e0
    there.fleet.announce()
    async with there.gateway.request_group(there.ask(prompt=PROMPT, max_tokens=9)) as job:
        await there.settle()
        (record,) = job.records
        await there.step()
        await there.step()
        assert len(record.generated_ids) == 2
        other.outdated = False
        there.fleet.announce()
        there.engines["e0"].die()
        await there.settle()
        (sent,) = there.engines["e1"].seen
        assert (sent.verbatim, sent.body["prompt"], sent.body["max_tokens"]) == (True, PROMPT, 9)
        assert not record.generated_ids
        assert other.running_tokens + other.waiting_tokens == len(PROMPT)
    await there.settle()
    assert [(backend.running_tokens, backend.waiting_tokens) for backend in there.fleet] == [(0, 0), (0, 0)]
    await there.fleet.close()


async def test_whole_answer_has_its_version_from_the_start_and_counts_as_running() -> None:
    """The engine shows no token before its end."""
    there = world(1)
    (backend,) = there.fleet
    backend.policy_version = 7
    await there.fleet.capabilities(backend)
    async with there.gateway.request_group(there.ask(**ECHO)) as job:
        await there.settle()
        (record,) = job.records
        assert record.versions.oldest == 7
        assert (record.state, backend.running, backend.waiting) == (RequestState.RUNNING, 1, 0)
    await there.settle()
    assert (backend.running, backend.waiting, backend.running_tokens, backend.waiting_tokens) == (0, 0, 0, 0)
    await there.fleet.close()


async def test_whole_answers_beyond_the_seats_count_as_waiting() -> None:
    there = world(1)
    there.engines["e0"].max_sequences = 2
    (backend,) = there.fleet
    await there.fleet.capabilities(backend)
    jobs = [there.gateway.request_group(there.ask(request_id=name, **ECHO)) for name in "abc"]
    running = [asyncio.create_task(job.run()) for job in jobs]
    await there.settle()
    assert (backend.running, backend.waiting) == (2, 1)
    for _ in range(9):
        await there.step()
    await asyncio.gather(*running)
    assert (backend.running, backend.waiting, backend.running_tokens, backend.waiting_tokens) == (0, 0, 0, 0)
    await there.fleet.close()
