"""The operator API has its own listener, and nothing listens beyond loopback without a flag."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrrl.cli.gateway import GatewayFlags
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.service import GatewayOptions, ProcessPlace
from orchestrrl.integrations.vllm_weights import reload_weights
from tests.orchestrrl.gateway.fakes import world
from tests.orchestrrl.gateway.processes import free_port
from tests.orchestrrl.gateway.test_server import PROMPT, Harness, harness
from tests.orchestrrl.integrations.fake_vllm import servers

__all__ = ["harness"]  # a fixture

OPERATOR = [
    ("GET", "/orchestrrl/requests"),
    ("GET", "/orchestrrl/requests?id=r"),
    ("POST", "/orchestrrl/move"),
    ("GET", "/orchestrrl/barrier"),
    ("POST", "/orchestrrl/pause"),
    ("POST", "/orchestrrl/renew"),
    ("POST", "/orchestrrl/resume"),
    ("POST", "/orchestrrl/set-version"),
    ("POST", "/orchestrrl/cancel"),
]
REMOTE = ["0.0.0.0:8000", "[::]:8000", "192.0.2.1:8000", "gpu7.example:8000", "[2001:db8::1]:8000", "0:8000"]
LOOPBACK = ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "127.9.9.9:8000"]


def test_all_operator_routes_are_listed() -> None:
    server = GatewayServer(world().gateway)
    trainers, operator = (
        {(method, path) for path, method in routes} for routes in (server.routes, server.operator_routes)
    )
    common = {("GET", path) for path in ("/health", "/metrics", "/version")}
    assert operator - common == {(method, path.partition("?")[0]) for method, path in OPERATOR}
    asks = {("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")}
    assert trainers - common == {("GET", "/v1/models")} | asks


@pytest.mark.parametrize(("method", "path"), [*OPERATOR, ("GET", "/orchestrrl/"), ("PUT", "/orchestrrl/anything")])
async def test_trainer_port_has_no_operator_route(harness: Harness, method: str, path: str) -> None:
    async with harness.http.request(method, harness.url + path, json={}) as answer:
        assert answer.status == 404
        message = (await answer.json())["error"]["message"]
        assert message.endswith(f": Not Found; the operator API is at {harness.operator_url}")
    async with harness.http.get(harness.operator_url + "/orchestrrl/barrier") as answer:
        assert (await answer.json())["phase"] == "open"


async def test_operator_api_serves_no_completions(harness: Harness) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with harness.http.post(harness.operator_url + path, json={"prompt": PROMPT}) as answer:
            assert answer.status == 404
    for path in ("/health", "/metrics", "/version"):
        pages = []
        for url in (harness.url, harness.operator_url):
            async with harness.http.get(url + path) as answer:
                assert answer.status == 200
                pages.append((await answer.text()).partition("_seconds")[0])
        assert path == "/metrics" or pages[0] == pages[1]


async def test_version_endpoint_returns_the_operator_url(harness: Harness) -> None:
    _, info = await harness.get("/version")
    assert info["operator_url"] == harness.operator_url


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::", "[::1]")])
async def test_operator_url_on_wildcard_uses_the_clients_host(harness: Harness, host: str, asked: str) -> None:
    server = GatewayServer(harness.gateway)
    try:
        await server.start("127.0.0.1", 0)
        url = await server.start_operator(host, 0)
        port = url.rpartition(":")[2]
        async with harness.http.get(f"http://{asked}:{port}/version") as answer:
            assert (await answer.json())["operator_url"] == f"http://{asked}:{port}"
    finally:
        await server.close()


# --- addresses


def options(**flags: Any) -> GatewayOptions:
    usual: dict[str, Any] = {
        "listen": "127.0.0.1:8000", "engines": ["e0=http://127.0.0.1:1"], "daemon": None, "policy": "load_index",
        "drain_s": 1.0, "coalesce_tokens": 1, "processes": 1, "log_level": "info",
    }  # fmt: skip
    return read_options(GatewayFlags(**{**usual, **flags}))


@pytest.mark.parametrize("flag", ["listen", "operator"])
@pytest.mark.parametrize("address", REMOTE)
def test_non_loopback_address_requires_allow_remote(flag: str, address: str) -> None:
    with pytest.raises(ProblemFaults) as caught:
        options(**{flag: address})
    fault = f"--{flag}: is not a loopback address; add --allow-remote to serve other machines, got {address!r}"
    assert caught.value.faults == [fault]
    options(**{flag: address}, allow_remote=True)


@pytest.mark.parametrize("flag", ["listen", "operator"])
@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_address_needs_no_flag(flag: str, address: str) -> None:
    options(**{flag: address})


def test_operator_api_stays_on_loopback_with_remote_trainers() -> None:
    found = options(listen="0.0.0.0:8000", allow_remote=True)
    assert (found.host, found.operator_host, found.operator_port) == ("0.0.0.0", "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        ("here", "--operator: must be HOST:PORT with a port of 0 to 65535, got 'here'"),
        ("127.0.0.1:65536", "--operator: must be HOST:PORT with a port of 0 to 65535, got '127.0.0.1:65536'"),
        ("127.0.0.1:65534", "--operator: must leave ports for --processes 3, got '127.0.0.1:65534'"),
    ],
)
def test_invalid_operator_address_is_refused(operator: str, fault: str) -> None:
    with pytest.raises(ProblemFaults) as caught:
        options(operator=operator, processes=3)
    assert caught.value.faults == [fault]


def test_each_process_has_its_own_operator_port() -> None:
    places = [None, ProcessPlace(0, 8000), ProcessPlace(2, 8000)]
    assert [options(operator="127.0.0.1:9000").operator_port_at(place) for place in places] == [9000, 9000, 9002]
    assert [options().operator_port_at(place) for place in places] == [0, 0, 0]


# --- trainers that use the pause barrier


async def test_weights_are_not_changed_if_operator_api_is_unreachable(tmp_path: Path) -> None:
    """Otherwise the gateway's requests would run while weights change."""

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"operator_url": f"http://127.0.0.1:{free_port()}"})

    gateway = web.Application()
    gateway.router.add_get("/version", version)
    async with servers() as (engine,), TestServer(gateway) as server:
        with pytest.raises(Permanent, match=r"--operator HOST:PORT --allow-remote; no weights were changed"):
            await asyncio.to_thread(reload_weights, [engine.url], tmp_path, gateway_url=str(server.make_url("")))
        assert not engine.log


async def test_weights_are_not_changed_if_url_is_not_a_gateway(tmp_path: Path) -> None:
    async with servers(2) as (engine, other):
        with pytest.raises(Permanent, match="no weights were changed"):
            await asyncio.to_thread(reload_weights, [engine.url], tmp_path, gateway_url=other.url)
        assert not engine.log
