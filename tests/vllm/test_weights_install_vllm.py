"""Installation of weight versions from folders into real vLLM, by both ways; the results must match transformers."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orchestrrl.engines.handover import MODULE_FOLDER
from orchestrrl.engines.managed_conformance import PROMPT, TOKENS, WeightsConformance, as_it_was, broken_of
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.engines.vllm_weight_flags import VLLM_ARGUMENTS as OUR_BACKEND
from orchestrrl.integrations.instrument.checkpoint_files import folder_sum
from orchestrrl.lab.testbed.engines import LocalEngine, start_vllm
from tests.vllm.conftest import MAX_NUM_SEQS, SLOW_STEPS, TINY_MODEL_SCRIPT, VLLM_PLUGIN, VLLM_PYTHON

# vLLM's CPU build packs the layers; this option keeps them as on GPUs, so that they can be read back.
UNPACKED = ("--worker-extension-cls", "unpacked_weights.Unpacked")
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
prompt, tokens, *folders = json.loads(sys.argv[1])
told = []
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
                         pad_token_id=0)
    told.append(ids[0].tolist()[len(prompt):])
print(json.dumps(told))
"""


@pytest.fixture(scope="session")
def versions(tiny_model: Path, other_weights: Path) -> tuple[Path, ...]:
    """Return three versions. The second and third have only a weights file, like received versions."""
    third = tiny_model.parent / "third"
    made = subprocess.run(
        [VLLM_PYTHON, TINY_MODEL_SCRIPT, third, "--seed", "2"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    carried = []
    for whole in (other_weights, third):
        carried.append(whole.parent / f"carried-{whole.name}")
        carried[-1].mkdir()
        (carried[-1] / "model.safetensors").hardlink_to(whole / "model.safetensors")
    return tiny_model, *carried


@pytest.fixture(scope="session")
def reference(tiny_model: Path, other_weights: Path, versions: tuple[Path, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that transformers generates with each version."""
    folders = [tiny_model, other_weights, tiny_model.parent / "third"]
    asked = json.dumps([PROMPT, TOKENS, *map(str, folders)])
    ran = subprocess.run([VLLM_PYTHON, "-c", REFERENCE, asked], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return tuple(map(tuple, json.loads(ran.stdout.splitlines()[-1])))


@pytest.fixture
def broken(versions: tuple[Path, ...], tmp_path: Path) -> dict[str, Path]:
    folders = broken_of(versions[1], tmp_path)
    del folders["no folder"]  # without OrchestrRL's backend, vLLM crashes
    return folders


@pytest.fixture(scope="module")
def server_with_backend(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    async def start() -> LocalEngine:
        return await start_vllm(
            "vllm-weights",
            python=VLLM_PYTHON,
            model=tiny_model,
            log_dir=tmp_path_factory.mktemp("vllm-weights"),
            max_num_seqs=MAX_NUM_SEQS,
            arguments=(
                *("--max-model-len", "16384", "--num-gpu-blocks-override", "130", "--enable-prefix-caching"),
                *("--logits-processors", "slow_steps:SlowSteps"),
                *OUR_BACKEND,
                *UNPACKED,
            ),
            environment={
                "PYTHONPATH": f"{MODULE_FOLDER}:{VLLM_PLUGIN}",
                "ORCHESTRRL_TEST_SLOW_STEPS": SLOW_STEPS,
            },
        )

    engine = asyncio.run(start())
    yield engine
    asyncio.run(engine.stop())


@pytest.mark.slow
class TestThroughOurBackend(WeightsConformance):
    @pytest.fixture
    async def engine(self, server_with_backend: LocalEngine) -> AsyncIterator[VllmEngine]:
        engine = VllmEngine(server_with_backend.url, timeout_s=100)
        yield engine
        await engine.close()

    async def test_engine_with_the_backend_reports_its_weights_and_matches_transformers(
        self, engine: VllmEngine, versions: tuple[Path, ...], reference: tuple[tuple[int, ...], ...]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            for version, (folder, expected) in enumerate(zip(versions, reference, strict=True), 1):
                told = await weights.load_weights(folder, version)
                assert told.is_read_back
                assert told.sum == folder_sum(folder)
                assert await weights.continue_greedily(PROMPT, TOKENS) == expected


class TestByReloadWeights(WeightsConformance):
    @pytest.fixture
    async def engine(self, vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[VllmEngine]:
        engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
        yield engine
        await engine.close()

    async def test_engine_without_the_backend_reports_its_version_and_matches_transformers(
        self, engine: VllmEngine, versions: tuple[Path, ...], reference: tuple[tuple[int, ...], ...]
    ) -> None:
        async with as_it_was(engine, versions[0]) as weights:
            for version, (folder, expected) in enumerate(zip(versions, reference, strict=True), 1):
                told = await weights.load_weights(folder, version)
                assert not told.is_read_back
                assert told.sum == folder_sum(folder)
                assert await weights.continue_greedily(PROMPT, TOKENS) == expected
