"""Bodies of requests that are passed through: the gateway reads few of their fields, and the engine reports faults."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from orchestrrl.gateway.http.completion_requests import MAX_NAME_LENGTH
from orchestrrl.gateway.moves.movable import MOST_TOKENS
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.rpc.codecs.telemetry import GATEWAY_REPORT
from tests.orchestrrl.gateway.passing_fleet import PassedEngine, PassingFleet, passing_fleet
from tests.orchestrrl.gateway.test_passthrough import hangs

BODIES = [
    '{"model": "m", "previous_response_id": "\\ud800"}',
    '{"model": "\\ud800", "stop": ["\\udfff"]}',
    '{"model": "m", "stop": 5}',
    '{"model": "m", "stop": [[]]}',
    '{"model": "m", "prompt": ["a"]}',
    '{"model": "m", "prompt": [-1]}',
    '{"model": "m", "messages": ' + "[" * 400 + "]" * 400 + "}",
    '{"model": ["m"], "messages": [{"content": NaN}], "max_tokens": -1}',
]


@pytest.mark.parametrize("policy", ["load_index", "prefix_affinity"])
async def test_engine_receives_any_body(policy: str) -> None:
    async with passing_fleet(PassedEngine("e0"), PassedEngine("e1")) as fleet:
        fleet.gateway.fleet.routing = RoutingPolicy(policy)
        for body in BODIES:
            headers = {"Content-Type": "application/json"}
            status, received = await fleet.ask("POST", "/v1/responses", data=body.encode(), headers=headers)
            assert (status, received["body"]) == (201, body)
        assert not any(backend.records for backend in fleet.gateway.fleet)


async def held(fleet: PassingFleet, body: dict[str, Any]) -> "asyncio.Task[Any]":
    asking = asyncio.create_task(fleet.ask("POST", "/v1/responses", json=body))
    await fleet.until(lambda: len(fleet.gateway.ledger))
    return asking


@pytest.mark.parametrize("limit", [MOST_TOKENS, MOST_TOKENS + 1, 2**70, -1, 1.5])
async def test_report_to_the_daemon_takes_any_token_limit(limit: float) -> None:
    async with passing_fleet(PassedEngine("e0", answer=hangs)) as fleet:
        asking = await held(fleet, {"model": "m", "max_output_tokens": limit})
        (reported,) = GATEWAY_REPORT.to_pb(fleet.gateway.report()).in_flight
        assert reported.max_tokens == (MOST_TOKENS if limit == MOST_TOKENS else 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_engines_are_not_asked_for_a_response_with_a_long_id() -> None:
    async def refuses(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such response", "code": 404}}, status=404)

    async with passing_fleet(PassedEngine("e0", answer=refuses)) as fleet:
        for length, asked in ((MAX_NAME_LENGTH, 2), (MAX_NAME_LENGTH + 1, 1)):
            fleet.engines[0].asked.clear()
            body = {"model": "m", "previous_response_id": "a" * length}
            assert (await fleet.message("POST", "/v1/responses", json=body))[0] == 404
            assert len(fleet.engines[0].asked) == asked
