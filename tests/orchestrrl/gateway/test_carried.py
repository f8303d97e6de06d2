"""Request headers reach engines, and additional engine fields reach clients, or the request stays on its engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import (
    OperationItemResult,
)
from orchestrrl.engines.base import Chunk, CompletionEndpoint, EngineCapabilities
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.responses import response
from orchestrrl.gateway.http.server import KEPT_HERE, end_to_end
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from planner.model import EngineId, RequestId, RequestMove
from tests.orchestrrl.gateway.http_harness import CHAT_PATH, PATH, SANE, HttpHarness, http_harness, usage_of

CHAT = {"messages": [{"role": "user", "content": "sane"}], "max_tokens": 3}
BODIES = {PATH: SANE, CHAT_PATH: CHAT}
EXPERTS = {"routed_experts": "k05VTVBZ"}
NAMED = b"X-Request-Id: r\r\n"


@pytest.fixture
async def harness() -> AsyncIterator[HttpHarness]:
    async with http_harness(engines=2) as fixture:
        yield fixture


async def until_tokens(harness: HttpHarness, tokens: int) -> None:
    """Wait until request `r` has this many tokens, or waits on an engine without any."""
    async with asyncio.timeout(60):
        while True:
            record = harness.gateway.ledger.get(RequestId("r"))
            if (
                record is not None
                and record.engine is not None
                and len(record.generated_ids) >= tokens
                and harness.tries
            ):
                return
            await asyncio.sleep(0.002)


async def move(harness: HttpHarness) -> OperationItemResult:
    record = harness.gateway.ledger.get(RequestId("r"))
    assert record is not None
    assert record.engine is not None
    target = EngineId("e1" if record.engine == "e0" else "e0")
    (result,) = await harness.gateway.move([RequestMove(record.id, record.engine, target)])
    return result


def hold(harness: HttpHarness, tokens: int) -> None:
    for engine in harness.engines:
        engine.hold_after = tokens


def release(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.released.set()


def asked_of(harness: HttpHarness) -> list[Any]:
    return [asked for engine in harness.engines for asked in engine.asked]


# --- headers ---

SENT = (
    b"Authorization: Bearer s3cret\r\nX-Session-ID: s1\r\nX-Vllm-Priority: 3\r\ntraceparent: 00-ab-cd-01\r\n"
    b"X-Correlation-ID: c1\r\nX-Twice: 1\r\nX-Twice: 2\r\nX_Under.score: u\r\nX-Bytes: \xc3\xa9\xff\r\n"
)


@pytest.mark.parametrize("path", [PATH, CHAT_PATH])
@pytest.mark.parametrize("stream", [False, True])
async def test_request_headers_reach_the_engine(harness: HttpHarness, path: str, stream: bool) -> None:
    more = b"X-Request-Id: r\r\nX-Tag: t\r\nX-Group-Id: g\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
    more += b"Proxy-Authorization: p\r\n"
    more += b"Connection: close, X-Named\r\nX-Named: n\r\nAccept-Encoding: gzip\r\nContent-Language: en\r\n"
    if stream:
        await harness.stream(BODIES[path], path, SENT + more)
    else:
        assert (await harness.post(BODIES[path], path, SENT + more))[0] == 200
    (asked,) = asked_of(harness)
    assert asked.values("Authorization") == ["Bearer s3cret"]
    assert asked.values("X-Session-ID") == ["s1"]
    assert asked.values("X-Vllm-Priority") == ["3"]
    assert asked.values("traceparent") == ["00-ab-cd-01"]
    assert asked.values("X-Correlation-ID") == ["c1"]
    assert asked.values("X-Twice") == ["1", "2"]
    assert asked.values("X_Under.score") == ["u"]
    assert asked.values("X-Bytes") == ["é\udcff"]
    assert asked.values("X-Request-Id") == ["r~1"]
    for name in ("X-Tag", "X-Group-Id", "Keep-Alive", "TE", "Proxy-Authorization", "X-Named", "Accept-Encoding"):
        assert asked.values(name) == []
    assert len(asked.values("Host")) == len(asked.values("Content-Length")) == len(asked.values("Content-Type")) == 1
    assert not any("s3cret" in line for line in harness.log.take())


async def test_moved_request_keeps_its_headers(harness: HttpHarness) -> None:
    hold(harness, 2)
    asking = asyncio.create_task(harness.post({**SANE, "return_token_ids": True}, PATH, SENT + NAMED))
    await until_tokens(harness, 2)
    release(harness)
    assert (await move(harness)).done
    assert (await asking)[0] == 200
    assert [asked.values("X-Session-ID") for asked in asked_of(harness)] == [["s1"], ["s1"]]
    assert [asked.values("Authorization") for asked in asked_of(harness)] == [["Bearer s3cret"]] * 2


async def test_request_for_a_rank_stays_on_its_engine(harness: HttpHarness) -> None:
    """Even before its first token, since the rank belongs to that engine."""
    for engine in harness.engines:
        engine.hold_after = 1
    asking = asyncio.create_task(harness.post(SANE, PATH, b"X-data-parallel-rank: 1\r\n" + NAMED))
    await until_tokens(harness, 0)
    result = await move(harness)
    assert not result.done
    assert "X-data-parallel-rank: names a rank of one engine" in result.detail
    (view,) = harness.gateway.report().in_flight
    assert (view.movable, view.movable_detail) == (False, "X-data-parallel-rank: names a rank of one engine")
    release(harness)
    assert (await asking)[0] == 200
    assert asked_of(harness)[0].values("X-data-parallel-rank") == ["1"]


@given(
    st.lists(
        st.tuples(st.sampled_from([*sorted(KEPT_HERE), "X-A", "x-b", "Cookie", "content-md5"]), st.text(max_size=4))
    )
)
def test_connection_and_gateway_headers_are_not_forwarded(headers: list[tuple[str, str]]) -> None:
    passed_on = end_to_end(headers)
    assert set(passed_on) <= set(headers)
    assert not {name.lower() for name, _ in passed_on} & (KEPT_HERE | {"content-md5"})
    named = {token.strip().lower() for name, value in headers if name == "connection" for token in value.split(",")}
    others = [pair for pair in headers if pair[0] in ("X-A", "x-b", "Cookie") and pair[0].lower() not in named]
    assert list(passed_on) == others


def test_repr_of_record_has_no_credential() -> None:
    headers = (("Authorization", "Bearer s3cret"),)
    ask = read_completion_request(
        CompletionEndpoint.COMPLETIONS,
        SANE,
        request_id="r",
        group="",
        tag="",
        default_model="",
        now_s=0.0,
        headers=headers,
    )
    assert ask.records[0].headers == headers
    assert "s3cret" not in repr(ask)


# --- fields of answers ---


@pytest.mark.parametrize("path", [PATH, CHAT_PATH])
@pytest.mark.parametrize("placed", ["each", "last"])
async def test_engine_fields_are_included_in_the_response(harness: HttpHarness, path: str, placed: str) -> None:
    for engine in harness.engines:
        engine.placed = placed
        engine.choice_fields = {**EXPERTS, "nothing": None, "weight_versions": [{"version": 3}]}
        engine.answer_fields = {"system_fingerprint": "f", "service_tier": "flex", "sglext": {"a": 1}}
    _, whole = await harness.post(BODIES[path], path)
    assert whole["choices"][0]["routed_experts"] == EXPERTS["routed_experts"]
    assert whole["choices"][0]["weight_versions"] == [{"version": 3}] * (3 if placed == "each" else 1)
    assert (whole["system_fingerprint"], whole["service_tier"], whole["sglext"]) == ("f", "flex", {"a": 1})
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    events = await harness.stream({**BODIES[path], "stream_options": {"include_usage": True}}, path)
    with_fields = [event for event in events if event["choices"] and "routed_experts" in event["choices"][0]]
    assert len(with_fields) == (3 if placed == "each" else 1)
    assert all(event["sglext"] == {"a": 1} for event in with_fields)
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert events[-1]["system_fingerprint"] == "f"


def test_several_answers_keep_their_own_fields() -> None:
    ask = read_completion_request(
        CompletionEndpoint.COMPLETIONS,
        {**SANE, "prompt": ["a", "b"]},
        request_id="r",
        group="",
        tag="",
        default_model="",
        now_s=0.0,
    )
    for number, record in enumerate(ask.records):
        last = Chunk((1,), "a", finish_reason="stop", choice_fields=EXPERTS, answer_fields={"same": [1], "own": number})
        record.append(last, "a", None, 0.0)
        record.usage = usage_of(2, 1)
    whole = response(ask.form, ask.records, 1)
    assert whole["same"] == [1]
    assert "own" not in whole
    assert [choice["own"] for choice in whole["choices"]] == [0, 1]
    assert all(choice["routed_experts"] == EXPERTS["routed_experts"] for choice in whole["choices"])
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_with_per_token_data_does_not_move(harness: HttpHarness, stream: bool) -> None:
    hold(harness, 2)
    for engine in harness.engines:
        engine.choice_fields = EXPERTS
    ask = harness.stream if stream else harness.post
    asking: asyncio.Task[Any] = asyncio.create_task(ask(SANE, PATH, NAMED))
    await until_tokens(harness, 2)
    result = await move(harness)
    assert not result.done
    assert "routed_experts" in result.detail
    (view,) = harness.gateway.report().in_flight
    assert not view.movable
    assert "routed_experts" in view.movable_detail
    release(harness)
    await asking


async def test_answer_with_portable_fields_may_move(harness: HttpHarness) -> None:
    hold(harness, 2)
    for engine in harness.engines:
        engine.answer_fields = {"system_fingerprint": "f", "service_tier": "flex"}
    asking = asyncio.create_task(harness.post(SANE, PATH, NAMED))
    await until_tokens(harness, 2)
    release(harness)
    result = await move(harness)
    assert result.done, result.detail
    _, answer = await asking
    assert answer["system_fingerprint"] == "f"
    assert "prompt_tokens_details" not in answer["usage"]  # the second engine's fields describe the continued prompt


async def test_moved_answer_with_new_engine_field_starts_over(harness: HttpHarness) -> None:
    """The engine had not returned this field before, so the request moved. It starts over, and the next one stays."""
    hold(harness, 2)
    for engine in harness.engines:
        engine.choice_fields, engine.placed = EXPERTS, "last"
    asking = asyncio.create_task(harness.post(SANE, PATH, NAMED))
    await until_tokens(harness, 2)
    release(harness)
    await move(harness)
    status, answer = await asking
    assert status == 200
    assert answer["choices"][0]["routed_experts"] == EXPERTS["routed_experts"]
    assert answer["choices"][0]["text"] == "abc"
    assert sorted(isinstance(asked.body["prompt"], list) for asked in asked_of(harness)) == [False, False, True]
    assert not harness.gateway.fleet.failovers.totals  # no engine failed
    for engine in harness.engines:
        engine.released.clear()
    hold(harness, 1)
    harness.gateway.set_routes([backend.route for backend in harness.gateway.fleet if backend.tying_field])
    asking = asyncio.create_task(harness.post(SANE, PATH, NAMED))
    await until_tokens(harness, 1)
    (view,) = harness.gateway.report().in_flight
    assert "routed_experts" in view.movable_detail
    release(harness)
    assert (await asking)[0] == 200


async def test_field_requested_by_one_client_binds_no_other_request(harness: HttpHarness) -> None:
    for engine in harness.engines:
        engine.choice_fields = {"odd": 1}
    assert (await harness.post({**SANE, "not_known": 1}))[0] == 200
    assert not any(backend.tying_field for backend in harness.gateway.fleet)
    assert (await harness.post(SANE))[0] == 200
    assert [backend.tying_field for backend in harness.gateway.fleet].count("odd") == 1


@pytest.mark.parametrize("known", ["capabilities", "asked for"])
async def test_field_of_whole_answers_needs_a_whole_answer(harness: HttpHarness, known: str) -> None:
    """Streams lack the field, as in vLLM. The gateway requests a whole answer, which does not move."""
    for engine in harness.engines:
        engine.choice_fields, engine.placed = EXPERTS, "whole"
    body = dict(SANE)
    if known == "capabilities":
        for backend in harness.gateway.fleet:
            backend.capabilities = EngineCapabilities("vllm", "1", ("m",), routed_experts=True)
    else:
        body["routed_experts_prompt_start"] = 0
    _, whole = await harness.post(body)
    assert whole["choices"][0]["routed_experts"] == EXPERTS["routed_experts"]
    assert whole["id"].startswith("cmpl-")
    assert "stream" not in asked_of(harness)[0].body
    events = await harness.stream(body)
    assert not any("routed_experts" in event["choices"][0] for event in events)


# --- the ledger on disk ---


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_S", 0.001)


@pytest.mark.usefixtures("fast")
async def test_ledger_stores_fields_without_credential_for_same_credential_only(tmp_path: Path) -> None:
    async def asked(credential: bytes) -> tuple[int, Any]:
        store = LedgerStore(RetentionPolicy(tmp_path / "ledger.db", from_s=0.0), WallClock())
        store.start()
        async with http_harness(store=store) as harness:
            harness.engine.choice_fields = EXPERTS
            answer = await harness.post(SANE, PATH, NAMED + credential)
            tries = harness.tries
        await store.close()
        return tries, answer

    bearer = b"Authorization: Bearer s3cret\r\n"
    assert (await asked(bearer))[0] == 1
    tries, (status, answer) = await asked(bearer)
    assert (tries, status) == (0, 200)
    assert answer["choices"][0]["routed_experts"] == EXPERTS["routed_experts"] * 1
    for other in (b"", b"Authorization: Bearer other\r\n"):
        tries, (status, answer) = await asked(other)
        assert (tries, status) == (0, 409)
        assert "credential" in answer["error"]["message"]
    assert not any(b"s3cret" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
