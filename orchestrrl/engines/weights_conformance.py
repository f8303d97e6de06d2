"""The contract of an engine that takes new weights while it runs, as tests: subclass `WeightsConformance`.

    class TestMine(WeightsConformance):
        @pytest.fixture
        async def engine(self): ...  # as EngineConformance has it

        @pytest.fixture
        def versions(self): ...  # folders of three versions, the first of them what the engine was started with

        @pytest.fixture
        def broken(self, versions, tmp_path):
            return broken_of(versions[1], tmp_path)

The engine is otherwise idle, not paused, and has the weights that it was started with; each test leaves it so.
"""

import json
import math
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import LoadedWeights, WeightsEngine, weights_engine
from orchestrrl.engines.conformance import LONG_TOKENS, EngineUnderTest, at
from orchestrrl.engines.managed_conformance import SAME_NATS, EngineOfBothKinds, mean_nats
from orchestrrl.integrations.instrument.checkpoint_files import MODEL_FILE

PROMPT = tuple(range(65, 81))
TOKENS = 24
CACHED_TOKENS = 700  # several blocks
NOWHERE = Path("/nowhere")
# Of versions for engines that take any.
SHAPES = {"lm_head.weight": (6, 4), "model.layers.0.mlp.up_proj.weight": (8, 4), "model.norm.weight": (4,)}


def write_version(folder: Path, seed: int, shapes: Mapping[str, Sequence[int]] = SHAPES) -> Path:
    """A checkpoint of random float32 of these shapes."""
    header, data, chance = {}, b"", Random(seed)
    for name, shape in sorted(shapes.items()):
        items = math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + 4 * items]}
        data += struct.pack(f"<{items}f", *(chance.gauss(0, 1) for _ in range(items)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(_file(header, data))
    return folder


def broken_of(whole: Path, into: Path) -> dict[str, Path]:
    """Folders with something wrong in each, made of a whole checkpoint in one file."""
    raw = (whole / MODEL_FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    matrix = sorted(name for name, told in header.items() if len(told["shape"]) == 2)[-1]
    rows, columns = header[matrix]["shape"]
    turned = {**header[matrix], "shape": [rows // 2, columns * 2]}
    contents = {
        "cut": raw[: -len(data) // 2],
        "cut in the header": raw[: 8 + length // 2],
        "missing": _file({name: told for name, told in header.items() if name != matrix}, data),
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


@asynccontextmanager
async def as_it_was(engine: EngineOfBothKinds, own: Path) -> AsyncIterator[WeightsEngine]:
    try:
        yield weights_engine(engine)
    finally:
        await engine.load_weights(str(own), None)
        if await engine.is_paused():
            await engine.resume()


class WeightsConformance:
    async def test_versions_in_a_row_and_back(self, engine: EngineOfBothKinds, versions: Sequence[Path]) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            assert await weights.loaded() is None
            at_start = await weights.continue_greedily(PROMPT, TOKENS)
            found: dict[int, tuple[LoadedWeights, tuple[int, ...]]] = {}
            for version in (1, 2, 3, 3, 2, 1):
                told = await weights.load_weights(versions[version - 1], version)
                assert told.version == version
                assert await weights.loaded() in (told, LoadedWeights(version))  # one that does not sum says less later
                assert not await engine.is_paused()
                tokens = await weights.continue_greedily(PROMPT, TOKENS)
                assert len(tokens) == TOKENS
                assert found.setdefault(version, (told, tokens)) == (told, tokens)
            assert found[1][1] == at_start
            assert len({told.sum for told, _ in found.values()}) == 3
            assert len({tokens for _, tokens in found.values()}) == 3

    async def test_what_is_not_whole_changes_nothing(
        self, engine: EngineOfBothKinds, versions: Sequence[Path], broken: Mapping[str, Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            await weights.load_weights(versions[1], 1)
            before, tokens = await weights.loaded(), await weights.continue_greedily(PROMPT, TOKENS)
            for name, folder in broken.items():
                with pytest.raises((Permanent, OutcomeUnknown)) as error:
                    await weights.load_weights(folder, 9)
                if error.errisinstance(OutcomeUnknown):  # it did not see it coming
                    assert folder == NOWHERE, f"{name}: {error.value}"
                    assert await engine.is_paused()
                    assert await weights.loaded() is None
                    await weights.load_weights(versions[1], 1)
                    await engine.resume()
                assert await weights.loaded() == before
                assert not await engine.is_paused()
                assert await weights.continue_greedily(PROMPT, TOKENS) == tokens

    async def test_a_pause_is_found_again(self, engine: EngineOfBothKinds, versions: Sequence[Path]) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            at_start = await weights.continue_greedily(PROMPT, TOKENS)
            await engine.pause(PauseMode.ABORT)
            await weights.load_weights(versions[1], 1)
            assert await engine.is_paused()
            other = await weights.continue_greedily(PROMPT, TOKENS)
            assert other != at_start
            assert await engine.is_paused()
            with pytest.raises(Permanent):
                await weights.continue_greedily([PROMPT[0]] * 1_000_000, 1)
            assert await engine.is_paused()
            await engine.resume()
            assert await weights.continue_greedily(PROMPT, TOKENS) == other
            assert not await engine.is_paused()

    async def test_requests_that_are_frozen_do_not_go_on_with_a_probe(
        self, engine: EngineOfBothKinds, versions: Sequence[Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights, at(engine) as bench:
            run = await _frozen(bench)
            with pytest.raises(Permanent):
                await weights.continue_greedily(PROMPT, 1)
            assert await engine.is_paused()
            await engine.resume()
            await engine.abort([run])

    async def test_requests_that_run_go_on_under_the_new_weights(
        self, engine: EngineOfBothKinds, versions: Sequence[Path]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights, at(engine) as bench:
            run = bench.start(PROMPT, max_tokens=LONG_TOKENS)
            await bench.until_all_answer(run)
            await weights.load_weights(versions[1], 1)
            await bench.until_all_answer(run, tokens=len(run.token_ids) + TOKENS)
            await engine.abort([run.id])
            partial = (await run.done()).token_ids
            rest = partial[:-TOKENS], partial[-TOKENS:]
            assert await weights.continue_greedily([*PROMPT, *rest[0]], TOKENS) == tuple(rest[1])
            await weights.load_weights(versions[0], 2)
            assert await weights.continue_greedily(PROMPT, 1) == (partial[0],)
            assert await weights.continue_greedily([*PROMPT, *rest[0]], TOKENS) != tuple(rest[1])

    async def test_a_prompt_that_is_cached_is_computed_anew(
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
                # A score reads no cached prefix: where the old weights' KV was used, it is another.
                assert mean_nats(after, await engine.score(after)) < SAME_NATS
                assert math.isfinite(sum(after.logprobs))


async def _frozen(bench: EngineUnderTest) -> str:
    """The id of a request that is in the middle."""
    run = bench.start(PROMPT, max_tokens=LONG_TOKENS)
    await bench.until_all_answer(run)
    await bench.engine.pause(PauseMode.KEEP)
    return run.id
