"""Recorded calls of other projects' clients, sent to a gateway in front of simulated engines. The answers have every
field that the clients read, with the types that vLLM's answers have."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from planner.model import EngineId, NodeId
from tests.clients.recordings import FOLDER, READ_FIELDS, types_at

OPTIONS = SimulatedOptions(model_name="tiny", speed=1000.0, tick_s=0.001, vocab_size=1024)
RECORDED = [
    pytest.param(path.stem, call, id=f"{path.stem}{call['path'].partition('?')[0]}")
    for path in sorted(FOLDER.glob("*.json"))
    for call in json.loads(path.read_text())
]


@pytest.fixture
async def gateway_url() -> AsyncIterator[str]:
    async with SimulatedServer(OPTIONS) as first, SimulatedServer(OPTIONS) as second:
        fleet = EngineBackends(VllmEngine, clock=WallClock())
        gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits())
        gateway.set_routes([EngineRoute(EngineId(f"e{i}"), server.url) for i, server in enumerate((first, second))])
        server = GatewayServer(gateway, reseed=True)
        yield await server.start("127.0.0.1", 0)
        await server.close()
        await fleet.close()


@pytest.mark.parametrize(("client", "call"), RECORDED)
async def test_recorded_call(client: str, call: dict[str, Any], gateway_url: str) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            call["method"], gateway_url + call["path"], json=call["body"], headers=call["headers"]
        ) as response,
    ):
        content = await response.text()
        assert response.status == call["status"], content
        is_stream = response.content_type == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: {")]
    answer = [json.loads(line) for line in lines] if is_stream else json.loads(content) if call["read"] else None
    assert call["read"].keys() == set(READ_FIELDS[client][call["path"].partition("?")[0]])
    for path, types in call["read"].items():
        assert types
        assert sorted(types_at(answer, path)) == types, path


def test_every_client_has_a_recording_that_shows_each_field() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(READ_FIELDS)
    for name, endpoints in READ_FIELDS.items():
        calls = json.loads((FOLDER / f"{name}.json").read_text())
        assert {call["path"].partition("?")[0] for call in calls} == set(endpoints)
