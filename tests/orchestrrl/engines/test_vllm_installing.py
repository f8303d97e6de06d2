"""Weight loads with servers that fail during the load. The conformance suite covers correct ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Engine, LoadedWeights, weights_engine
from orchestrrl.engines.managed_conformance import write_version
from orchestrrl.integrations.instrument.checkpoint_files import folder_sum
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROMPT = tuple(range(65, 81))


class Meddled(SimulatedServer):
    """A server with some replaced answers. The connection is cut after the orders in `after` were carried out."""

    def __init__(self, options: SimulatedOptions) -> None:
        super().__init__(options)
        self.received: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.cut_after: set[str] = set()

    def application(self) -> web.Application:
        @web.middleware
        async def meddle(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method == "POST":
                self.received.append(request.path)
            if request.path in self.answers:
                status, body = self.answers[request.path]
                return web.json_response(body, status=status)
            response = await handler(request)
            if request.path in self.cut_after:
                assert request.transport is not None
                request.transport.abort()
            return response

        application = super().application()
        application.middlewares.insert(0, meddle)
        return application


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    return write_version(tmp_path / "v0", 0), write_version(tmp_path / "v1", 1)


@pytest.fixture
async def server() -> AsyncIterator[Meddled]:
    async with Meddled(SimulatedOptions(speed=1000, tick_s=0.002, enable_sleep_mode=True)) as server:
        yield server


@pytest.fixture
async def engine(server: Meddled) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(server.url)
    yield engine
    await engine.close()


async def test_lost_answer_keeps_engine_paused_until_the_next_load(
    engine: SimulatedEngine, server: Meddled, versions: tuple[Path, Path]
) -> None:
    server.cut_after = {"/update_weights"}
    with pytest.raises(OutcomeUnknown):
        await engine.weights.load_weights(versions[1], 1)
    assert await engine.is_paused()
    assert await engine.weights.loaded() is None
    server.cut_after = set()
    assert await engine.weights.load_weights(versions[1], 1) == await engine.weights.loaded()
    assert await engine.is_paused()


@pytest.mark.parametrize("field", ["version", "is_torn"])
async def test_disagreeing_workers_are_an_unknown_outcome(
    field: str, engine: SimulatedEngine, server: Meddled, versions: tuple[Path, Path]
) -> None:
    report = {"version": 1, "sum": "s", "is_read_back": True, "not_read_back": "", "fault": "", "is_torn": False}
    good = {**report, "is_updating": False}
    bad = {**good, **({"version": 0} if field == "version" else {"version": None, "is_torn": True, "fault": "no"})}
    server.answers["/collective_rpc"] = (200, {"results": [good, bad]})
    with pytest.raises(OutcomeUnknown):
        await engine.weights.load_weights(versions[1], 1)
    assert await engine.is_paused()
    server.answers["/collective_rpc"] = (200, {"results": [good, {**good, "sum": "t", "is_read_back": False}]})
    # Hosts hold different parts of a version.
    assert await engine.weights.load_weights(versions[1], 1) == LoadedWeights(1, "s+t", is_read_back=False)


async def test_engine_is_not_resumed_if_its_version_cannot_be_set(
    engine: SimulatedEngine, server: Meddled, versions: tuple[Path, Path]
) -> None:
    server.cut_after = {"/update_weight_version"}
    with pytest.raises(OutcomeUnknown):
        await engine.weights.load_weights(versions[1], 1)
    assert await engine.is_paused()
    assert await engine.weights.loaded() is None


async def test_busy_server_keeps_its_weights(
    engine: SimulatedEngine, server: Meddled, versions: tuple[Path, Path]
) -> None:
    first = await engine.weights.load_weights(versions[0], 1)
    server.answers["/pause"] = (503, {"error": {"message": "scaling"}})
    with pytest.raises(Retryable):
        await engine.weights.load_weights(versions[1], 2)
    assert await engine.weights.loaded() == first
    assert not await engine.is_paused()


async def test_load_is_refused_if_asleep_or_endpoints_are_missing(
    engine: SimulatedEngine, server: Meddled, versions: tuple[Path, Path]
) -> None:
    await engine.sleep()
    with pytest.raises(Permanent, match="asleep"):
        await engine.weights.load_weights(versions[1], 2)
    await engine.wake()
    server.answers["/openapi.json"] = (200, {"paths": {"/v1/completions": {}}})
    server.runtime.began_s += 1.0  # a restart: a running server loses no endpoints
    with pytest.raises(Permanent, match="VLLM_SERVER_DEV_MODE"):
        await engine.weights.load_weights(versions[1], 2)


async def test_failed_pause_after_a_probe_is_an_unknown_outcome(engine: SimulatedEngine, server: Meddled) -> None:
    await engine.pause(PauseMode.ABORT)
    server.answers["/pause"] = (500, {"error": {"message": "no"}})
    with pytest.raises(OutcomeUnknown, match="may now run"):
        await engine.weights.continue_greedily(PROMPT, 4)


async def test_cancelled_probe_leaves_the_engine_paused(engine: SimulatedEngine, server: Meddled) -> None:
    await engine.pause(PauseMode.ABORT)
    probe = asyncio.create_task(engine.weights.continue_greedily(PROMPT, 30_000))
    while "/v1/completions" not in server.received:
        await asyncio.sleep(0.005)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    assert await engine.is_paused()


async def test_probe_completes_if_another_client_pauses_the_engine(engine: SimulatedEngine, server: Meddled) -> None:
    """A gateway that attaches while the pause barrier is closed pauses all engines."""
    await engine.pause(PauseMode.ABORT)
    probe = asyncio.create_task(engine.weights.continue_greedily(PROMPT, 30_000))
    while "/v1/completions" not in server.received:
        await asyncio.sleep(0.005)
    await engine.pause(PauseMode.KEEP)
    assert not probe.done()
    assert len(await asyncio.wait_for(probe, 60)) == 30_000
    assert await engine.is_paused()


async def test_load_after_a_failed_reload_is_done_twice(versions: tuple[Path, Path], tmp_path: Path) -> None:
    async with Meddled(SimulatedOptions(weight_transfer=False)) as server:
        engine = SimulatedEngine(server.url)
        with pytest.raises(OutcomeUnknown):
            await engine.weights.load_weights(tmp_path / "nowhere", 1)
        server.received.clear()
        assert await engine.weights.load_weights(versions[1], 1) == LoadedWeights(1, folder_sum(versions[1]))
        assert server.received.count("/collective_rpc") == 2
        server.received.clear()
        await engine.weights.load_weights(versions[0], 2)
        assert server.received.count("/collective_rpc") == 1
        await engine.close()


def test_product_without_weight_loads_is_refused() -> None:
    class Another:
        url = "http://another"

    with pytest.raises(Permanent, match="Another does not support loading weights"):
        weights_engine(cast("Engine", Another()))
