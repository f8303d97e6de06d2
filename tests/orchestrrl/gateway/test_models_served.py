"""A request whose model only some engines serve, such as a LoRA adapter, goes to these engines only."""

import pytest

from orchestrrl.engines.base import RequestRefused
from orchestrrl.gateway.core import WATCH_FRACTION
from orchestrrl.gateway.routing.backends import MODELS_AGAIN_S
from planner.model import EngineId
from tests.orchestrrl.gateway.fakes import World, world
from tests.orchestrrl.gateway.test_relay import finish, move


async def learned(engines: int, **models: tuple[str, ...]) -> World:
    w = world(engines)
    for name, served in models.items():
        w.engines[name].models = served
    for backend in w.fleet:
        await w.fleet.learn(backend)
    return w


async def test_request_goes_to_engines_that_serve_its_model() -> None:
    w = await learned(3, e1=("model", "adapter"))
    for number in range(5):
        async with w.gateway.request_group(
            w.ask(request_id=f"r{number}", prompt="a", model="adapter", max_tokens=4)
        ) as job:
            await finish(w, job)
    assert {name: len(engine.seen) for name, engine in w.engines.items()} == {"e0": 0, "e1": 5, "e2": 0}
    await w.fleet.close()


async def test_request_waits_for_the_engine_that_serves_its_model() -> None:
    w = await learned(2, e1=("model", "adapter"))
    w.engines["e1"].die()
    async with w.gateway.request_group(w.ask(prompt="a", model="adapter", max_tokens=4)) as job:
        await w.clock.advance(0.1)
        assert not w.engines["e0"].seen
        w.engines["e1"].revive()
        await finish(w, job)
    assert job.failure is None
    assert not w.engines["e0"].seen
    await w.fleet.close()


async def test_move_to_an_engine_without_the_model_is_refused() -> None:
    w = await learned(2, e1=("model", "adapter"))
    async with w.gateway.request_group(w.ask(prompt="a", model="adapter", max_tokens=40)) as job:
        await w.step()
        await w.step()
        result = await move(w, "e0")
        assert not result.done
        assert result.detail == "engine e0 cannot answer the request: it does not serve model 'adapter'"
        await finish(w, job)
    await w.fleet.close()


async def test_unknown_model_is_refused_by_an_engine_at_once() -> None:
    w = await learned(2, e1=("model", "adapter"))
    for engine in w.engines.values():
        engine.refuses = RequestRefused("no such model", 404, {"error": {"message": "no such model"}})
    async with w.gateway.request_group(w.ask(prompt="a", model="unknown")) as job:
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 404
    await w.fleet.close()


@pytest.mark.parametrize("known", [False, True], ids=["on no engine before", "on another engine before"])
async def test_adapter_that_is_loaded_later_is_found(known: bool) -> None:
    w = await learned(3, e0=("model", "adapter") if known else ("model",))
    w.engines["e1"].models = ("model", "adapter")
    if known:  # the models that differ are read again from time to time
        watching = w.fleet.in_background(w.gateway.watch())
        await w.clock.advance(2 * WATCH_FRACTION * w.gateway.limits.stall_s)
        watching.cancel()
    await w.fleet.find_model("adapter")
    assert w.fleet.without_model("adapter") == {"e2"} | (set() if known else {"e0"})
    await w.fleet.close()


async def test_search_for_unknown_models_is_limited() -> None:
    w = await learned(2)
    await w.fleet.find_model("unknown")
    w.engines["e1"].models = ("adapter",)
    await w.fleet.find_model("adapter")
    assert w.fleet.without_model("adapter") == frozenset()
    await w.clock.advance(MODELS_AGAIN_S)
    await w.fleet.find_model("adapter")
    assert w.fleet.without_model("adapter") == {EngineId("e0")}
    await w.fleet.close()
