"""The simulated engine passes the conformance suite of deployed engines, and its faults are visible to clients."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import CompletionEndpoint, GenerationRequest, ReportedLayout
from orchestrrl.engines.managed_conformance import PROMPT, TOKENS, ManagedConformance, mean_nats, write_version
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer

OPTIONS = SimulatedOptions(
    max_num_seqs=4,
    kv_capacity_tokens=16640,
    block_tokens=128,
    max_model_len_tokens=16384,
    speed=1000,
    tick_s=0.002,
)
WIDE = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Path]:
    return write_version(tmp_path / "seed-0", 0), write_version(tmp_path / "seed-1", 1)


class TestPlain(ManagedConformance):
    layout = ReportedLayout(tp=1, pp=1, dp=1, ep=False)

    @pytest.fixture
    async def engine(self, weights: tuple[Path, Path]) -> AsyncIterator[SimulatedEngine]:
        async with SimulatedServer(OPTIONS.model_copy(update={"weights": weights[0]})) as server:
            engine = SimulatedEngine(server.url)
            yield engine
            await engine.close()


class TestOfManyTalents(ManagedConformance):
    layout = ReportedLayout(tp=2, pp=3, dp=2, ep=True)

    @pytest.fixture
    async def engine(self, weights: tuple[Path, Path]) -> AsyncIterator[SimulatedEngine]:
        offers = {"enable_sleep_mode": True, "enable_elastic_ep": True, "load_s": 2, "sleep_s": 3, "scale_s": 5}
        async with SimulatedServer(OPTIONS.model_copy(update={**WIDE, **offers, "weights": weights[0]})) as server:
            engine = SimulatedEngine(server.url)
            yield engine
            await engine.close()


async def engines(*options: SimulatedOptions) -> AsyncIterator[SimulatedEngine]:
    for each in options:
        async with SimulatedServer(each) as server:
            engine = SimulatedEngine(server.url, timeout_s=5.0)
            yield engine
            await engine.close()


def faulty(**faults: object) -> SimulatedOptions:
    return SimulatedOptions.model_validate({**dict(OPTIONS), **faults})


async def test_replicas_agree_and_a_wrong_engine_does_not() -> None:
    wide = OPTIONS.model_copy(update=WIDE)
    found = []
    excerpt = None
    async for engine in engines(OPTIONS, wide, faulty(wrong_answers=True)):
        excerpt = excerpt or await engine.excerpt(PROMPT, TOKENS)
        found.append(mean_nats(excerpt, await engine.score(excerpt)))
    same, also_same, wrong = found
    assert same == also_same == 0
    assert wrong > 1


async def test_initial_weights_are_read_from_a_folder(weights: tuple[Path, Path]) -> None:
    first, second = (OPTIONS.model_copy(update={"weights": folder}) for folder in weights)
    excerpts = [await engine.excerpt(PROMPT, TOKENS) async for engine in engines(first, first, second, OPTIONS)]
    assert excerpts[0] == excerpts[1]
    assert len({excerpt.token_ids for excerpt in excerpts}) == 3
    with pytest.raises(Permanent, match="has no tensors"):
        SimulatedServer(OPTIONS.model_copy(update={"weights": weights[0].parent}))


async def test_unreadable_weights_tear_a_paused_engine(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"seven")
    async for engine in engines(OPTIONS.model_copy(update={"weight_transfer": False})):
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        with pytest.raises(OutcomeUnknown, match="may have loaded only part of the weights"):
            await engine.weights.load_weights(tmp_path, 3, None)
        assert await engine.is_paused()
        assert await engine.weight_version() is None
        await engine.resume()
        assert mean_nats(excerpt, await engine.score(excerpt)) > 1


async def test_frozen_request_continues_with_the_new_weights(
    weights: tuple[Path, Path],
) -> None:
    async for engine in engines(OPTIONS.model_copy(update={"speed": 40, "tick_s": 0.005})):
        body = {"model": "simulated", "prompt": list(PROMPT), "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        got: list[int] = []

        async def read(engine: SimulatedEngine = engine, body: dict[str, object] = body, got: list[int] = got) -> None:
            async for chunk in engine.generate(GenerationRequest("r", CompletionEndpoint.COMPLETIONS, body)):
                got.extend(chunk.token_ids)

        reading = asyncio.create_task(read())
        while len(got) < 20:
            await asyncio.sleep(0.005)
        await engine.pause(PauseMode.KEEP)
        await engine.weights.load_weights(weights[1], 1, None)
        before = await asyncio.sleep(0.05, len(got))
        await engine.resume()
        await reading
        assert len(got) == 400
        rest = await engine.excerpt([*PROMPT, *got[:before]], 400 - before)
        assert list(rest.token_ids) == got[before:]


async def test_sleep_is_refused_while_requests_run() -> None:
    async for engine in engines(OPTIONS.model_copy(update={"speed": 1, "enable_sleep_mode": True})):
        body = {"model": "simulated", "prompt": [65], "max_tokens": 5000, "ignore_eos": True}
        stream = engine.generate(GenerationRequest("r", CompletionEndpoint.COMPLETIONS, body))
        await anext(stream)
        with pytest.raises(Permanent, match="has 1 requests"):
            await engine.sleep()
        assert not await engine.asleep()
        await engine.abort(["r"])


async def test_hanging_engine_times_out() -> None:
    async with SimulatedServer(faulty(hang=True)) as server:
        engine = SimulatedEngine(server.url, timeout_s=0.2)
        assert not await engine.healthy()
        with pytest.raises(Retryable):
            await engine.layout()
        with pytest.raises(Retryable):
            await engine.excerpt(PROMPT, TOKENS)
        await engine.close()


async def test_engine_can_misreport_its_layout() -> None:
    async for engine in engines(faulty(misreport={"tp": 4, "ep": 1})):
        assert await engine.layout() == ReportedLayout(tp=4, pp=1, dp=1, ep=True)


async def test_engine_that_fails_to_start_reports_the_reason() -> None:
    with pytest.raises(Permanent, match="--fail-start"):
        async with SimulatedServer(faulty(fail_start=True)):
            raise AssertionError("it has started")


async def test_batch_size_and_capacity_cover_all_replicas() -> None:
    async for engine in engines(OPTIONS.model_copy(update={"data_parallel_size": 3})):
        assert (await engine.capabilities()).max_sequences == 12
        assert (await engine.metrics()).kv_capacity_tokens == 3 * 16640
