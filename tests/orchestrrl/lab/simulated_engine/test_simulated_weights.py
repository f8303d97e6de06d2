"""The simulated engine loads weight versions from folders by both methods of vLLM, with its faults."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.engines.base import LoadedWeights
from orchestrrl.engines.managed_conformance import PROMPT, TOKENS, WeightsConformance, broken_of, write_version
from orchestrrl.integrations.instrument.checkpoint_files import MODEL_FILE, folder_sum
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer

OPTIONS = SimulatedOptions(
    max_num_seqs=4, kv_capacity_tokens=16640, block_tokens=128, max_model_len_tokens=16384, speed=300, tick_s=0.002
)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, ...]:
    return tuple(write_version(tmp_path / f"v{seed}", seed) for seed in range(3))


@pytest.fixture
def broken(versions: tuple[Path, ...], tmp_path: Path) -> dict[str, Path]:
    return broken_of(versions[1], tmp_path)


async def serving(options: SimulatedOptions, weights: Path | None = None) -> AsyncIterator[SimulatedEngine]:
    async with SimulatedServer(options.model_copy(update={"weights": weights})) as server:
        engine = SimulatedEngine(server.url)
        yield engine
        await engine.close()


class TestThroughTheBackend(WeightsConformance):
    @pytest.fixture
    async def engine(self, versions: tuple[Path, ...]) -> AsyncIterator[SimulatedEngine]:
        async for engine in serving(OPTIONS.model_copy(update={"tensor_parallel_size": 2}), versions[0]):
            yield engine


class TestByReloadWeights(WeightsConformance):
    @pytest.fixture
    async def engine(self, versions: tuple[Path, ...]) -> AsyncIterator[SimulatedEngine]:
        async for engine in serving(OPTIONS.model_copy(update={"weight_transfer": False}), versions[0]):
            yield engine


def faulty(**faults: object) -> SimulatedOptions:
    return SimulatedOptions.model_validate({**dict(OPTIONS), **faults})


@pytest.mark.parametrize("through_backend", [True, False])
async def test_torn_load_leaves_mixed_weights_until_a_load_succeeds(
    through_backend: bool, versions: tuple[Path, ...]
) -> None:
    options = faulty(tear_load=[2]).model_copy(update={"weight_transfer": through_backend})
    async for engine in serving(options, versions[0]):
        weights = engine.weights
        first = await weights.load_weights(versions[0], 1)
        tokens = await weights.continue_greedily(PROMPT, TOKENS)
        with pytest.raises(OutcomeUnknown):
            await weights.load_weights(versions[1], 2)
        assert await engine.is_paused()
        assert await weights.loaded() is None
        torn = await weights.continue_greedily(PROMPT, TOKENS)
        assert await weights.load_weights(versions[0], 1) == first
        assert await engine.is_paused()
        assert await weights.continue_greedily(PROMPT, TOKENS) == tokens != torn


async def test_refused_load_keeps_the_previous_weights(versions: tuple[Path, ...]) -> None:
    async for engine in serving(faulty(refuse_load=[2]), versions[0]):
        first = await engine.weights.load_weights(versions[0], 1)
        with pytest.raises(Permanent, match="--refuse-load refuses"):
            await engine.weights.load_weights(versions[1], 2)
        assert await engine.weights.loaded() == first
        assert not await engine.is_paused()


async def test_restarted_engine_has_initial_weights_without_version(
    versions: tuple[Path, ...],
) -> None:
    shown = []
    for _ in range(2):
        async for engine in serving(OPTIONS, versions[0]):
            assert await engine.weights.loaded() is None
            shown.append(await engine.weights.continue_greedily(PROMPT, TOKENS))
            await engine.weights.load_weights(versions[2], 7)
    assert shown[0] == shown[1]


async def test_sum_and_tokens_depend_on_every_byte(versions: tuple[Path, ...], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    raw = bytearray((versions[0] / MODEL_FILE).read_bytes())
    raw[-1] ^= 1
    (other / MODEL_FILE).write_bytes(raw)
    async for engine in serving(OPTIONS):
        tokens = []
        for version, folder in enumerate((versions[0], other)):
            shown = await engine.weights.load_weights(folder, version)
            assert shown == LoadedWeights(version, folder_sum(folder), is_read_back=True)
            tokens.append(await engine.weights.continue_greedily(PROMPT, TOKENS))
        assert tokens[0] != tokens[1]


async def test_loading_takes_the_configured_time(versions: tuple[Path, ...]) -> None:
    async for engine in serving(OPTIONS.model_copy(update={"load_s": 0.05, "speed": 1.0})):
        before_s = time.monotonic()
        await engine.weights.load_weights(versions[0], 1)
        assert time.monotonic() - before_s > 0.04
