"""Moves by KV transfer: the parameters for engines, the conditions for KV, and the reported results."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import ANY

import pytest

from orchestrrl.core.errors import Retryable
from orchestrrl.core.operations import (
    OperationItemResult,
)
from orchestrrl.engines.base import EngineSample
from orchestrrl.gateway.moves.move import KvLoadCount
from orchestrrl.gateway.routing.backend import EngineBackend
from planner.model import EngineId, MoveMethod, RequestId, RequestMove
from tests.orchestrrl.gateway.fakes import FakeEngine, RunningGroup, World, undisturbed, world

PROMPT = list(b"what is the answer?")
MAX_TOKENS = 60
R = RequestId("r")


@dataclass
class Loading:
    """The loaded tokens that the engines' metrics report, by engine."""

    w: World
    tokens: dict[str, int | None]

    def __post_init__(self) -> None:
        for name, engine in self.w.engines.items():
            engine.metrics = self._metrics_of(name)  # type: ignore[method-assign]

    def _metrics_of(self, name: str) -> Any:
        async def metrics() -> EngineSample:
            return EngineSample(0, 0, 0.0, 0, 0, 0, 0, self.tokens[name])

        return metrics


def handing_world(**versions: str) -> tuple[World, Loading]:
    """Return a world whose engines e0 and e1 transfer KV, by default of version `c/v1`."""
    w = world()
    set_versions(w, **{"e0": "c/v1", "e1": "c/v1", **versions})
    return w, Loading(w, {"e0": 0, "e1": 0})


def set_versions(w: World, **versions: str) -> None:
    w.gateway.set_routes(
        [replace(backend.route, kv_version=versions.get(backend.id, backend.route.kv_version)) for backend in w.fleet]
    )


def source_of(w: World) -> tuple[FakeEngine, EngineBackend, FakeEngine, EngineBackend]:
    """Return the request's engine and the other one."""
    record = w.gateway.ledger.get(R)
    assert record is not None
    assert record.engine is not None
    names = [record.engine, EngineId("e1" if record.engine == "e0" else "e0")]
    (here, source), (there, target) = ((w.engines[name], w.fleet.get(name)) for name in names)
    assert source is not None
    assert target is not None
    return here, source, there, target


def kv_parameters(engine: FakeEngine) -> Any:
    """Return the KV parameters of the engine's last request."""
    params = engine.seen[-1].body.get("kv_transfer_params")
    return None if params is None else params["handover"]


async def begun(w: World, job: RunningGroup) -> None:
    for _ in range(5):
        await w.step()
        await w.clock.advance(0.1)


def ordered(source: EngineBackend, target: EngineBackend, method: MoveMethod = MoveMethod.TRANSFER) -> RequestMove:
    return RequestMove(R, source.id, target.id, method=method, predicted_s=0.5, other_s=3.0)


async def carry_out(w: World, order: RequestMove, loading: Loading, loaded: int | None) -> OperationItemResult:
    """Carry out a move in which the destination loads this many tokens."""
    moving = asyncio.create_task(w.gateway.move([order]))
    await w.settle()
    before = loading.tokens[order.to_engine]
    loading.tokens[order.to_engine] = None if loaded is None or before is None else before + loaded
    await w.clock.advance(0.4)
    await w.step()
    (result,) = await moving
    return result


async def finish(w: World, job: RunningGroup) -> None:
    for _ in range(2 * MAX_TOKENS):
        if not job.done:
            await w.step()
    (record,) = job.records
    assert list(record.generated_ids) == undisturbed(PROMPT, MAX_TOKENS)[0]


async def test_move_by_kv_names_the_entry_of_its_source() -> None:
    w, loading = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        here, source, there, target = source_of(w)
        left = kv_parameters(here)
        assert set(left) == {"weights", "save"}
        (record,) = job.records
        context = record.context_tokens
        result = await carry_out(w, ordered(source, target), loading, context - 1)
        wish = kv_parameters(there)
        assert (wish["weights"], wish["load"]) == (left["weights"], left["save"])
        assert wish["save"] not in (None, left["save"])
        assert wish["wait_s"] == 1.5  # half of the predicted recomputation time
        assert (result.done, result.method, result.predicted_s) == (True, MoveMethod.TRANSFER, 0.5)
        assert (result.loaded_tokens, result.recomputed_tokens) == (context - 1, 1)
        assert result.duration_s == pytest.approx(0.4 - 0.1)  # a step took 0.1 s
        # And back, with the entry that it leaves there.
        context = record.context_tokens
        again = await carry_out(w, ordered(target, source), loading, context - 1)
        assert again.method is MoveMethod.TRANSFER
        assert kv_parameters(here)["load"] == wish["save"]
        await finish(w, job)


@pytest.mark.parametrize(("predicted_s", "seen"), [(0.5, False), (2.5, True), (100.0, True)])
async def test_slow_predicted_move_is_awaited_until_it_is_done(predicted_s: float, seen: bool) -> None:
    w, loading = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        _, source, _, target = source_of(w)
        moving = asyncio.create_task(w.gateway.move([replace(ordered(source, target), predicted_s=predicted_s)]))
        await w.settle()
        loading.tokens[target.id] = 10
        await w.clock.advance(4.0)
        assert moving.done() is not seen
        await w.step()
        (result,) = await moving
        assert result.done
        assert (result.method, result.duration_s > 0) == ((MoveMethod.TRANSFER, True) if seen else (None, False))
        await finish(w, job)


@pytest.mark.parametrize(
    ("loaded", "method", "recomputes"), [(0, MoveMethod.RECOMPUTE, True), (None, None, False)], ids=["not", "unknown"]
)
async def test_missing_kv_is_reported_as_recompute(
    loaded: int | None, method: MoveMethod | None, recomputes: bool
) -> None:
    w, loading = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        _, source, _, target = source_of(w)
        context = job.records[0].context_tokens
        result = await carry_out(w, ordered(source, target), loading, loaded)
        assert (result.done, result.method, result.loaded_tokens) == (True, method, 0)
        assert result.recomputed_tokens == (context if recomputes else 0)
        await finish(w, job)


async def test_kv_of_old_weights_is_not_loaded() -> None:
    """Neither if both engines have new weights since the attempt began, nor if only one of them has."""
    for changed in (("e0", "e1"), ("e0",), ("e1",)):
        w, loading = handing_world()
        async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
            await begun(w, job)
            _, source, there, target = source_of(w)
            set_versions(w, **dict.fromkeys(changed, "c/v2"))
            result = await carry_out(w, ordered(source, target), loading, 0)
            assert result.method is MoveMethod.RECOMPUTE
            saves = {"weights": target.route.kv_version, "save": ANY}
            assert kv_parameters(there) == (
                saves if len(changed) == 2 else None
            )  # with different weights, neither can load it
            await finish(w, job)


async def test_weight_change_during_a_move_prevents_the_load() -> None:
    w, _ = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        _, source, there, target = source_of(w)
        moving = asyncio.create_task(w.gateway.move([ordered(source, target)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        set_versions(w, e0="c/v2", e1="c/v2")
        await w.settle()
        assert set(kv_parameters(there)) == {"weights", "save"}
        assert kv_parameters(there)["weights"] == "c/v2"
        await w.step()
        assert (await moving)[0].done
        await finish(w, job)


async def test_move_by_recompute_loads_no_kv() -> None:
    w, loading = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        _, source, there, target = source_of(w)
        result = await carry_out(w, ordered(source, target, MoveMethod.RECOMPUTE), loading, 0)
        assert (result.method, result.recomputed_tokens > 0) == (MoveMethod.RECOMPUTE, True)
        assert set(kv_parameters(there)) == {"weights", "save"}
        await finish(w, job)


@pytest.mark.parametrize("other", ["", "d/v1"])
async def test_engine_saves_no_kv_if_no_other_engine_can_load_it(other: str) -> None:
    w, _ = handing_world(e0=other, e1="" if not other else "c/v1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        here, *_ = source_of(w)
        assert kv_parameters(here) is None
        await finish(w, job)


async def test_immovable_request_saves_no_kv() -> None:
    w, _ = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS, presence_penalty=1.0)) as job:
        await begun(w, job)
        here, *_ = source_of(w)
        assert kv_parameters(here) is None
        while not job.done:
            await w.step()


async def test_failed_move_does_not_reuse_the_kv_entry() -> None:
    """The entry may have been consumed."""
    w, _ = handing_world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        here, source, there, target = source_of(w)
        there.dead = True
        moving = asyncio.create_task(w.gateway.move([ordered(source, target)]))
        await w.settle()
        (result,) = await moving
        assert not result.done
        assert set(kv_parameters(here)) == {"weights", "save"}
        await finish(w, job)


async def test_concurrent_loads_are_counted_separately() -> None:
    w, loading = handing_world()
    set_versions(w)
    asks = [w.ask(request_id=f"q{index}", prompt=PROMPT[index:], max_tokens=MAX_TOKENS) for index in range(3)]
    w.gateway.set_routes([replace(backend.route, draining=backend.id == "e1") for backend in w.fleet])
    async with (
        w.gateway.request_group(asks[0]) as a,
        w.gateway.request_group(asks[1]) as b,
        w.gateway.request_group(asks[2]) as c,
    ):
        await begun(w, a)
        w.gateway.set_routes([replace(backend.route, draining=False) for backend in w.fleet])
        contexts = [job.records[0].context_tokens for job in (a, b, c)]
        orders = [
            RequestMove(RequestId(f"q{index}"), EngineId("e0"), EngineId("e1"), method=MoveMethod.TRANSFER)
            for index in range(3)
        ]
        moving = asyncio.create_task(w.gateway.move(orders))
        await w.settle()
        loading.tokens["e1"] = sum(contexts) - 3
        await w.step()
        results = await moving
        assert [result.loaded_tokens for result in results] == [context - 1 for context in contexts]


async def test_late_counted_load_is_not_attributed_to_the_next() -> None:
    """The second request's count begins when the first one's KV has been loaded but not yet counted."""
    w, loading = handing_world()
    backend = w.fleet.get(EngineId("e1"))
    assert backend is not None
    first = KvLoadCount(backend)
    await w.settle()
    loading.tokens["e1"] = 100
    second = KvLoadCount(backend)
    await w.settle()
    assert await first.tokens(1000) == 100
    loading.tokens["e1"] = 130
    assert await second.tokens(1000) == 30
    assert backend.loads_open == 0
    loading.tokens["e1"] = 500  # by another gateway's request
    third = KvLoadCount(backend)
    await w.settle()
    assert await third.tokens(1000) == 0


async def test_load_is_unknown_if_engine_metrics_cannot_be_read() -> None:
    w, loading = handing_world()

    async def metrics() -> EngineSample:
        raise Retryable("busy", 1.0)

    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS)) as job:
        await begun(w, job)
        _, source, there, target = source_of(w)
        there.metrics = metrics  # type: ignore[method-assign]
        result = await carry_out(w, ordered(source, target), loading, 10)
        assert (result.done, result.method, result.loaded_tokens) == (True, None, 0)
        await finish(w, job)
