"""Loading new weights into vLLM servers: pause, load and resume, and the outcomes of failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import CloseBarrier, EngineRoute, FrozenRequests, PauseMode
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.integrations.trl import GatewayRollout
from orchestrrl.integrations.vllm_weights import reload_weights
from planner.model import EngineId, NodeId
from tests.orchestrrl.gateway.processes import free_port, operator_url
from tests.orchestrrl.integrations.fake_vllm import FakeVllm, servers
from tests.orchestrrl.integrations.test_trl_adapter import FakeTrainer


@asynccontextmanager
async def gateway_before(engines: list[FakeVllm]) -> AsyncIterator[tuple[Gateway, str]]:
    clock = WallClock()
    fleet = EngineBackends(lambda url: VllmEngine(url), clock=clock)
    gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits())
    gateway.set_routes([EngineRoute(EngineId(f"e{index}"), engine.url) for index, engine in enumerate(engines)])
    server = GatewayServer(gateway)
    url = await server.start("127.0.0.1", 0)
    await server.start_operator("127.0.0.1", 0)
    try:
        yield gateway, url
    finally:
        await server.close()
        await fleet.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_text("new")
    return tmp_path


def versions(gateway: Gateway) -> dict[str, int | None]:
    return {slot.id: slot.policy_version for slot in gateway.fleet}


def assert_all_loaded(log: list[str], urls: list[str], what: str) -> None:
    count = len(urls)
    assert sorted(log[:count]) == sorted(f"{url} /pause?mode=keep" for url in urls)
    assert sorted(log[count : 2 * count]) == sorted(f"{url} reload_weights {what}" for url in urls)
    assert sorted(log[2 * count : 3 * count]) == sorted(f"{url} /resume" for url in urls)


async def test_weights_are_loaded_only_before_a_rollout_of_a_new_step(tmp_path: Path) -> None:
    async with servers(2) as engines, gateway_before(engines) as (gateway, url):
        urls = [engine.url for engine in engines]
        rollout, trainer = GatewayRollout(url, engine_urls=urls, weights_dir=tmp_path), FakeTrainer()
        for trainer.state.global_step in (0, 0, 1):
            await asyncio.to_thread(rollout, ["a"], trainer)
            assert versions(gateway) == dict.fromkeys(("e0", "e1"), trainer.state.global_step)
        assert rollout.syncs == 2
        await asyncio.to_thread(rollout.sync_weights, trainer)
        assert gateway.barrier.closed is None
        assert rollout.bypassed == 0
        (newest,) = tmp_path.iterdir()
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{await operator_url(http, url)}/orchestrrl/barrier") as answer:
                source = (await answer.json())["weights_source"]
        assert source == str(newest), "engines that start later load them there"
    log = engines[0].log
    for sync, step in enumerate((0, 1, 1)):
        assert_all_loaded(log[6 * sync :], urls, f"weights of step {step}")
    assert len(log) == 18
    assert len(list(tmp_path.iterdir())) == 1, "weights that nobody reads any longer are left"


async def test_engines_are_paused_one_by_one_without_a_gateway(weights: Path) -> None:
    async with servers(2) as engines:
        urls = [engine.url for engine in engines]
        nobody = f"http://127.0.0.1:{free_port()}"
        await asyncio.to_thread(reload_weights, urls, weights, gateway_url=nobody, policy_version=1)
        assert_all_loaded(engines[0].log, urls, "new")


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc"])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a gateway"])
async def test_engine_that_fails_to_load_stays_paused(path: str, behind: bool, weights: Path) -> None:
    async with servers(2) as (good, bad), gateway_before([good, bad]) as (gateway, url):
        bad.statuses[path] = 500
        outcome = Permanent if path == "/pause" else OutcomeUnknown
        asked = {"gateway_url": url, "policy_version": 3} if behind else {}
        with pytest.raises(outcome, match=bad.url):
            await asyncio.to_thread(reload_weights, [good.url, bad.url], weights, **asked)  # type: ignore[arg-type]
        assert gateway.barrier.closed is None
        usable = [slot.usable for slot in gateway.fleet]
        if behind and path == "/collective_rpc":
            assert versions(gateway) == {"e0": 3, "e1": None}
            assert usable == [True, False]
    assert not good.paused
    assert bad.paused is (path == "/collective_rpc"), "half of the weights must not answer"
    assert any("reload_weights" in line for line in good.log) is (path == "/collective_rpc")


async def test_unreachable_engine_leaves_the_others_unchanged(weights: Path) -> None:
    async with servers() as (engine,):
        gone = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(Retryable, match="no weights were changed"):
            await asyncio.to_thread(reload_weights, [engine.url, gone], weights)
        assert not engine.paused
        engine.statuses["/pause"] = 404
        with pytest.raises(Permanent, match="VLLM_SERVER_DEV_MODE"):
            await asyncio.to_thread(reload_weights, [engine.url], weights)


async def test_engines_unknown_to_the_gateway_or_the_caller(weights: Path) -> None:
    async with servers(3) as engines, gateway_before(engines[:2]) as (gateway, url):
        first, second, stranger = engines
        both = [first.url, stranger.url]
        with pytest.raises(Permanent, match=f"{stranger.url} is not an engine of the gateway"):
            await asyncio.to_thread(reload_weights, both, weights, gateway_url=url, policy_version=1)
        assert not any("reload_weights" in line for line in first.log)
        await asyncio.to_thread(reload_weights, [first.url], weights, gateway_url=url, policy_version=1)
        assert [slot.usable for slot in gateway.fleet] == [True, False]
        assert (first.paused, second.paused) == (False, True)


async def test_operator_api_of_another_gateway_is_rejected(weights: Path) -> None:
    """A loopback address refers to a different server on each host."""
    async with servers() as (engine,), gateway_before([engine]) as (other, theirs):
        other.node = NodeId("another")
        async with aiohttp.ClientSession() as http:
            at = await operator_url(http, theirs)

        async def version(_: web.Request) -> web.Response:
            return web.json_response({"gateway": "gateway", "operator_url": at})

        app = web.Application()
        app.router.add_get("/version", version)
        async with TestServer(app) as front:
            with pytest.raises(Permanent, match=r"'another', expected 'gateway'.*; no weights were changed"):
                await asyncio.to_thread(reload_weights, [engine.url], weights, gateway_url=str(front.make_url("")))
        assert other.barrier.closed is None
        assert not engine.log


async def test_lease_is_renewed_during_the_load_and_expires_with_the_trainer(weights: Path) -> None:
    async with servers() as (engine,), gateway_before([engine]) as (gateway, url):
        engine.load_s = 3.0
        asked = {"gateway_url": url, "policy_version": 1, "lease_s": 2.0}
        await asyncio.to_thread(reload_weights, [engine.url], weights, **asked)  # type: ignore[arg-type]
        assert versions(gateway) == {"e0": 1}
        assert gateway.barrier.expired_total == 0


async def test_other_holder_of_the_barrier_is_named(weights: Path) -> None:
    async with servers() as (engine,), gateway_before([engine]) as (gateway, url):
        now_s = gateway.clock.now_s()
        held = CloseBarrier("l", "somebody else", PauseMode.KEEP, FrozenRequests.RECOMPUTE, now_s + 600, now_s + 600)
        await gateway.barrier.close(held)
        with pytest.raises(Permanent, match=r"somebody else holds the pause barrier.*; no weights were changed"):
            await asyncio.to_thread(reload_weights, [engine.url], weights, gateway_url=url)


async def test_reload_weights_works_inside_a_running_loop(weights: Path) -> None:
    reload_weights([], weights)
