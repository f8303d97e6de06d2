"""Real vLLM servers with a tiny random model, without a GPU, started once per session."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.testbed.engines import VLLM_ENVIRONMENT, LocalEngine, start_vllm
from orchestrrl.lab.testbed.processes import VLLM_PYTHON
from tests import fork_server

pytest.register_assert_rewrite(
    "orchestrrl.engines.conformance",
    "orchestrrl.engines.managed_conformance",
    "orchestrrl.engines.responses_conformance",
    "orchestrrl.engines.sampling_conformance",
    "orchestrrl.engines.token_endpoints_conformance",
)

REPOSITORY = Path(__file__).parents[2]
VLLM_PLUGIN = Path(__file__).parent / "vllm_plugin"
# A weight-transfer backend that broadcasts over gloo, in addition to the ways that need no backend.
GLOO_PLUGIN = Path(__file__).parent / "gloo_plugin"
GLOO_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}
# Chats with tools move if an engine parses their whole answer (derender, with --enable-scale-out).
PARSER_ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
GLOO_ARGUMENTS = ("--weight-transfer-config", '{"backend": "gloo_for_tests"}')
TINY_MODEL_SCRIPT = REPOSITORY / "orchestrrl" / "lab" / "tiny_model.py"

MAX_NUM_SEQS = 4
# Blocks have 128 tokens. There is KV for one sequence of the maximum length, so that preemption is possible.
VLLM_ARGUMENTS = (
    *("--max-model-len", "16384", "--num-gpu-blocks-override", "130", "--no-enable-prefix-caching"),
    *("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--trust-request-chat-template"),
)

# Requests for this many tokens, which tests interrupt, are slowed to at most 50 tokens/s on any machine.
INTERRUPTED_TOKENS = 1_000
SLOW_STEPS = f"{INTERRUPTED_TOKENS}:0.02"


class StartVllm(Protocol):
    """Starts one more server like those of `vllm_servers`. The format of `slow_steps` is that of `slow_steps.py`."""

    async def __call__(self, name: str, slow_steps: str = SLOW_STEPS) -> LocalEngine: ...


fork_server.install(
    fork_server.Program(
        str(VLLM_PYTHON),
        (
            "vllm.entrypoints.openai.api_server",
            "vllm.entrypoints.openai.chat_completion.serving",
            "vllm.distributed.elastic_ep.elastic_execute",
            "vllm.v1.engine.async_llm",
            "vllm.v1.executor.multiproc_executor",
            "vllm.v1.worker.cpu_worker",
            "vllm.v1.attention.backends.cpu_attn",
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        ),
        lambda words: list(words[:2]) == ["-m", "vllm.entrypoints.openai.api_server"],
        environment={**VLLM_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
        settings=(*fork_server.OURS.settings, "OMP_", "MKL_", "HF_", "TORCH", "VLLM_"),
        late=(*fork_server.OURS.late, "VLLM_CPU_"),
    )
)

# Servers without their own PYTHONPATH also fork their engine cores, see vllm_plugin/sitecustomize.py.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(VLLM_PLUGIN))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests without vLLM: `make test-vllm` installs it first; `make test` has one test here."""
    if not VLLM_PYTHON.exists():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"{VLLM_PYTHON} is missing: run `make venv-vllm`"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the tiny model, which is served under the directory's name."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    made = subprocess.run([VLLM_PYTHON, TINY_MODEL_SCRIPT, directory], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def other_weights(tiny_model: Path) -> Path:
    """Return the directory of a model that differs from the tiny one only in its weights."""
    directory = tiny_model.parent / "other"
    made = subprocess.run(
        [VLLM_PYTHON, TINY_MODEL_SCRIPT, directory, "--seed", "1"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def vllm_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, ...]]:
    """Return two warm vLLM servers of one model, `MAX_NUM_SEQS` seats each. Tests must leave them idle and running."""
    log_dir = tmp_path_factory.mktemp("vllm")

    async def start() -> list[LocalEngine]:
        return await asyncio.gather(*(_start(name, tiny_model, log_dir) for name in ("vllm-0", "vllm-1")))

    async def stop(engines: list[LocalEngine]) -> None:
        await asyncio.gather(*(engine.stop() for engine in engines))

    engines = asyncio.run(start())
    yield tuple(engines)
    asyncio.run(stop(engines))


@contextlib.asynccontextmanager
async def as_they_were(servers: Sequence[LocalEngine], model: Path) -> AsyncIterator[None]:
    """Restore the servers after the test: the model's weights without a version, and not paused."""
    try:
        yield
    finally:
        for server in servers:
            engine = VllmEngine(server.url, timeout_s=100)
            await engine.weights.load_weights(model, 0, None)
            await engine.name_weights(None)
            if await engine.is_paused():
                await engine.resume()
            await engine.close()


@pytest.fixture
async def start_vllm_server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[StartVllm]:
    """Return a function that starts one more server like those of `vllm_servers`, for tests that kill it."""
    started: list[LocalEngine] = []

    async def start(name: str, slow_steps: str = SLOW_STEPS) -> LocalEngine:
        started.append(await _start(name, tiny_model, tmp_path, slow_steps))
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


async def _start(name: str, model: Path, log_dir: Path, slow_steps: str = SLOW_STEPS) -> LocalEngine:
    return await start_vllm(
        name,
        python=VLLM_PYTHON,
        model=model,
        log_dir=log_dir,
        max_num_seqs=MAX_NUM_SEQS,
        arguments=(*VLLM_ARGUMENTS, "--logits-processors", "slow_steps:SlowSteps", *PARSER_ARGUMENTS, *GLOO_ARGUMENTS),
        environment={
            "PYTHONPATH": f"{VLLM_PLUGIN}:{GLOO_PLUGIN}",
            "ORCHESTRRL_TEST_SLOW_STEPS": slow_steps,
            **GLOO_ENVIRONMENT,
        },
    )
