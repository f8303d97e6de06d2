"""Conformance tests of the ManagedEngine and WeightsEngine protocols. Subclass `ManagedConformance` and
`WeightsConformance` in a test module:

    class TestMine(ManagedConformance):
        layout = ReportedLayout(tp=1, pp=1, dp=1, ep=False)

        @pytest.fixture
        async def engine(self): ...  # as in EngineConformance

        @pytest.fixture
        def weights(self): ...  # a folder with the engine's initial weights, and one with other weights

    class TestItsWeights(WeightsConformance):
        @pytest.fixture
        async def engine(self): ...

        @pytest.fixture
        def versions(self): ...  # folders of three versions; the first has the engine's initial weights

        @pytest.fixture
        def broken(self, versions, tmp_path):
            return broken_of(versions[1], tmp_path)

The engine must be idle, must not be paused, and must have its initial weights. Each test restores this state. The
engine's capabilities must not include unsupported features, and calls of unsupported features must fail.
"""

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import (
    AnswerExcerpt,
    Engine,
    LoadedWeights,
    ManagedEngine,
    ReportedLayout,
    WeightsEngine,
    weights_engine,
)
from orchestrrl.engines.conformance import LONG_TOKENS, at
from orchestrrl.integrations.instrument.checkpoint_files import MODEL_FILE

PROMPT = tuple(range(65, 81))
TOKENS = 48
CACHED_TOKENS = 700  # several blocks
# Tolerances in nats, mean over the tokens of an excerpt. Other numbers of ranks and batches sum in another order.
SAME_NATS = 1e-3
OTHER_NATS = 0.5
DEADLINE_S = 120.0


def mean_nats(excerpt: AnswerExcerpt, scores: tuple[float, ...]) -> float:
    """Return the mean absolute difference, in nats, between the log-probabilities in `excerpt` and those in
    `scores`."""
    pairs = zip(excerpt.logprobs, scores, strict=True)
    return math.fsum(abs(one - other) for one, other in pairs) / len(scores)


class EngineOfBothKinds(Engine, ManagedEngine, Protocol):
    """An engine client that implements both Engine and ManagedEngine. Only engines with such a client can be
    deployed."""


@asynccontextmanager
async def as_it_was(engine: EngineOfBothKinds, own: Path) -> AsyncIterator[WeightsEngine]:
    """Yield the interface for loading the engine's weights. After the block, load the initial weights from `own`, clear
    their version, and resume the engine if it is paused."""
    weights = weights_engine(engine)
    try:
        yield weights
    finally:
        await weights.load_weights(own, 0, None)
        await engine.name_weights(None)
        if await engine.is_paused():
            await engine.resume()


class ManagedConformance:
    layout: ReportedLayout

    async def test_layout_equals_the_started_one(self, engine: EngineOfBothKinds) -> None:
        assert await engine.layout() == self.layout

    async def test_excerpt_has_full_length_and_is_repeatable(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        assert excerpt.prompt_ids == PROMPT
        assert len(excerpt.token_ids) == len(excerpt.logprobs) == TOKENS
        assert all(logprob <= 0 for logprob in excerpt.logprobs)
        again = await engine.excerpt(PROMPT, TOKENS)
        assert again.token_ids == excerpt.token_ids
        assert mean_nats(excerpt, again.logprobs) < SAME_NATS

    async def test_excerpt_equals_the_answer_to_a_request(self, engine: EngineOfBothKinds) -> None:
        async with at(engine) as bench:
            run = await bench.run(PROMPT, max_tokens=TOKENS)
        assert tuple(run.token_ids) == (await engine.excerpt(PROMPT, TOKENS)).token_ids

    async def test_score_of_own_excerpt_equals_its_logprobs(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        for _ in range(2):  # the second time with a cached prompt
            scores = await engine.score(excerpt)
            assert len(scores) == TOKENS
            assert max(abs(a - b) for a, b in zip(scores, excerpt.logprobs, strict=True)) < SAME_NATS

    async def test_unlikely_text_scores_lower(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        turned = AnswerExcerpt(PROMPT, tuple(reversed(excerpt.token_ids)), excerpt.logprobs)
        assert sum(await engine.score(turned)) < sum(excerpt.logprobs) - OTHER_NATS * TOKENS

    async def test_prompt_beyond_the_context_length_is_refused(self, engine: EngineOfBothKinds) -> None:
        longest = (await engine.capabilities()).max_model_len_tokens
        assert longest is not None
        with pytest.raises(Permanent):
            await engine.excerpt([PROMPT[0]] * (longest + 1), 1)

    async def test_other_weights_change_the_answers_and_the_version(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        own, other = weights
        before = await engine.excerpt(PROMPT, TOKENS)
        async with as_it_was(engine, own) as held:
            await held.load_weights(other, 7, None)
            assert await engine.weight_version() == 7
            assert mean_nats(before, await engine.score(before)) > OTHER_NATS
            assert (await engine.excerpt(PROMPT, TOKENS)).token_ids != before.token_ids
        assert await engine.weight_version() is None  # no version was set for these
        assert mean_nats(before, await engine.score(before)) < SAME_NATS
        assert not await engine.is_paused()

    async def test_version_can_be_set_without_a_load(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        async with as_it_was(engine, weights[0]):
            for version in (0, 8):
                await engine.name_weights(version)
                assert await engine.weight_version() == version

    async def test_sleep_and_wake_work_or_are_refused(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        assert not await engine.asleep()
        if not (await engine.capabilities()).sleep:
            for order in (engine.sleep, engine.wake):
                with pytest.raises(Permanent, match="sleep"):
                    await order()
            assert not await engine.asleep()
            assert await engine.probe() > 0
            return
        for _ in range(2):
            await engine.sleep()
            assert await engine.asleep()
        with pytest.raises(Permanent, match="asleep"):
            await weights_engine(engine).load_weights(NOWHERE, 1, None)
        for _ in range(2):
            await engine.wake()
            assert not await engine.asleep()
        async with asyncio.timeout(DEADLINE_S):
            assert mean_nats(excerpt, await engine.score(excerpt)) < SAME_NATS

    async def test_scale_works_or_is_refused(self, engine: EngineOfBothKinds) -> None:
        replicas = (await engine.layout()).dp or 1
        if not (await engine.capabilities()).scale_elastic_ep:
            with pytest.raises(Permanent, match="scaled"):
                await engine.scale(replicas + 1)
            return
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        before = await engine.metrics()
        for dp in (replicas + 1, replicas + 1, replicas):
            await engine.scale(dp)
            assert (await engine.layout()).dp == dp
            assert (await engine.metrics()).kv_capacity_tokens == before.kv_capacity_tokens // replicas * dp
            assert mean_nats(excerpt, await engine.score(excerpt)) < SAME_NATS
        with pytest.raises(Permanent):
            await engine.scale(0)


NOWHERE = Path("/nowhere")
# Shapes of test versions, for engines that accept any.
SHAPES = {"lm_head.weight": (6, 4), "model.layers.0.mlp.up_proj.weight": (8, 4), "model.norm.weight": (4,)}


def write_version(folder: Path, seed: int, shapes: Mapping[str, Sequence[int]] = SHAPES) -> Path:
    """Write a checkpoint of random float32 tensors with these shapes. Returns the folder."""
    header, data, chance = {}, b"", Random(seed)
    for name, shape in sorted(shapes.items()):
        items = math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + 4 * items]}
        data += struct.pack(f"<{items}f", *(chance.gauss(0, 1) for _ in range(items)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(_file(header, data))
    return folder


def broken_of(whole: Path, into: Path) -> dict[str, Path]:
    """Write broken variants of a complete one-file checkpoint below `into`. Returns the folder of each variant, keyed
    by its fault."""
    raw = (whole / MODEL_FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    matrix = sorted(name for name, entry in header.items() if len(entry["shape"]) == 2)[-1]
    rows, columns = header[matrix]["shape"]
    turned = {**header[matrix], "shape": [rows // 2, columns * 2]}
    contents = {
        "cut": raw[: -len(data) // 2],
        "cut in the header": raw[: 8 + length // 2],
        "missing": _file({name: entry for name, entry in header.items() if name != matrix}, data),
        "another shape": _file({**header, matrix: turned}, data),
        "one too many": _file({**header, "model.layers.99.mlp.up_proj.weight": header[matrix]}, data),
        "no header": b"\xff" * 64,
    }
    made = {name: into / name.replace(" ", "-") for name in contents}
    for name, content in contents.items():
        made[name].mkdir()
        (made[name] / MODEL_FILE).write_bytes(content)
    return {**made, "no folder": NOWHERE}


def _file(header: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class WeightsConformance:
    async def test_versions_load_forward_and_back(self, engine: EngineOfBothKinds, versions: Sequence[Path]) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            assert await weights.loaded() is None
            at_start = await weights.continue_greedily(PROMPT, TOKENS)
            found: dict[int, tuple[LoadedWeights, tuple[int, ...]]] = {}
            for version in (1, 2, 3, 3, 2, 1):
                loaded = await weights.load_weights(versions[version - 1], version)
                assert loaded.version == version
                assert await weights.loaded() in (loaded, LoadedWeights(version))  # without a checksum if not supported
                assert not await engine.is_paused()
                tokens = await weights.continue_greedily(PROMPT, TOKENS)
                assert len(tokens) == TOKENS
                assert found.setdefault(version, (loaded, tokens)) == (loaded, tokens)
            assert found[1][1] == at_start
            assert len({loaded.sum for loaded, _ in found.values()}) == 3
            assert len({tokens for _, tokens in found.values()}) == 3

    async def test_broken_checkpoints_change_nothing(
        self, engine: EngineOfBothKinds, versions: Sequence[Path], broken: Mapping[str, Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            await weights.load_weights(versions[1], 1)
            before, tokens = await weights.loaded(), await weights.continue_greedily(PROMPT, TOKENS)
            for name, folder in broken.items():
                with pytest.raises((Permanent, OutcomeUnknown)) as error:
                    await weights.load_weights(folder, 9)
                if error.errisinstance(OutcomeUnknown):  # the fault was not detected before the load
                    assert folder == NOWHERE, f"{name}: {error.value}"
                    assert await engine.is_paused()
                    assert await weights.loaded() is None
                    await weights.load_weights(versions[1], 1)
                    await engine.resume()
                assert await weights.loaded() == before
                assert not await engine.is_paused()
                assert await weights.continue_greedily(PROMPT, TOKENS) == tokens

    async def test_load_keeps_the_engine_paused(self, engine: EngineOfBothKinds, versions: Sequence[Path]) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            at_start = await weights.continue_greedily(PROMPT, TOKENS)
            await engine.pause(PauseMode.ABORT)
            await weights.load_weights(versions[1], 1)
            assert await engine.is_paused()
            assert not await engine.asleep()
            other = await weights.continue_greedily(PROMPT, TOKENS)
            assert other != at_start
            assert await engine.is_paused()
            with pytest.raises(Permanent):
                await weights.continue_greedily([PROMPT[0]] * 1_000_000, 1)
            assert await engine.is_paused()
            await engine.resume()
            assert await weights.continue_greedily(PROMPT, TOKENS) == other
            assert not await engine.is_paused()

    async def test_frozen_requests_do_not_continue_during_a_probe(
        self, engine: EngineOfBothKinds, versions: Sequence[Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights, at(engine) as bench:
            run = bench.start(PROMPT, max_tokens=LONG_TOKENS)
            await bench.until_all_answer(run)
            await engine.pause(PauseMode.KEEP)
            with pytest.raises(Permanent):
                await weights.continue_greedily(PROMPT, 1)
            assert await engine.is_paused()
            await engine.resume()
            await bench.abort(run)

    async def test_running_requests_continue_under_the_new_weights(
        self, engine: EngineOfBothKinds, versions: Sequence[Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights, at(engine) as bench:
            run = bench.start(PROMPT, max_tokens=LONG_TOKENS)
            await bench.until_all_answer(run)
            await weights.load_weights(versions[1], 1)
            await bench.until_all_answer(run, tokens=len(run.token_ids) + TOKENS)
            await bench.abort(run)
            partial = run.token_ids
            rest = partial[:-TOKENS], partial[-TOKENS:]
            assert await weights.continue_greedily([*PROMPT, *rest[0]], TOKENS) == tuple(rest[1])
            await weights.load_weights(versions[0], 2)
            assert await weights.continue_greedily(PROMPT, 1) == (partial[0],)
            assert await weights.continue_greedily([*PROMPT, *rest[0]], TOKENS) != tuple(rest[1])

    async def test_cached_prompt_is_computed_again_after_a_load(
        self, engine: EngineOfBothKinds, versions: Sequence[Path]
    ) -> None:
        prompt = [20 + 7 * place % 400 for place in range(CACHED_TOKENS)]
        async with as_it_was(engine, versions[0]) as weights:
            for paused in (False, True):
                await weights.load_weights(versions[0], 1)
                for _ in range(2):
                    await weights.continue_greedily(prompt, TOKENS)
                if paused:  # with its KV
                    await engine.pause(PauseMode.KEEP)
                await weights.load_weights(versions[1], 2)
                if paused:
                    await engine.resume()
                after = await engine.excerpt(prompt, TOKENS)
                # A score uses no cached prefix, so it differs if the excerpt used KV of the old weights.
                assert mean_nats(after, await engine.score(after)) < SAME_NATS
                assert math.isfinite(sum(after.logprobs))
