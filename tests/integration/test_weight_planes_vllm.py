"""Weights go from a trainer's process straight into two real vLLM servers, by vLLM's own weight transfer, with a
backend over gloo: all of the way but NCCL."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from orchestrrl.bench.weights_vllm import peers_beside
from orchestrrl.demo.scenario import load_scenario
from orchestrrl.demo.stack import Stack, orchestrrl
from orchestrrl.deployers.attended import LocalEngine, start_vllm
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.engines.weights_conformance import PROMPT, TOKENS
from orchestrrl.sync_reports import SYNC, EngineSync, SyncReport, SyncState
from tests.integration.conftest import MAX_NUM_SEQS, REPOSITORY, VLLM_ARGUMENTS, VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PLUGIN = Path(__file__).parent / "gloo_plugin"
PUBLISHED_WITHIN_S = 240.0
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
async def servers(tiny_model: Path, tmp_path: Path) -> AsyncIterator[list[LocalEngine]]:
    async def start(name: str) -> LocalEngine:
        return await start_vllm(
            name,
            python=VLLM_PYTHON,
            model=tiny_model,
            log_dir=tmp_path,
            max_num_seqs=MAX_NUM_SEQS,
            arguments=(*VLLM_ARGUMENTS, "--weight-transfer-config", json.dumps({"backend": "gloo_for_tests"})),
            environment={
                "PYTHONPATH": str(PLUGIN),
                **ENVIRONMENT,
            },
        )

    engines = list(await asyncio.gather(start("direct-0"), start("direct-1")))
    yield engines
    await asyncio.gather(*(engine.stop() for engine in engines))


async def published(stack: Stack, folders: Sequence[Path]) -> list[SyncReport]:
    """Each as a version, in one trainer's process."""
    process = await asyncio.create_subprocess_exec(
        *(str(VLLM_PYTHON), str(PLUGIN / "publish_directly.py"), stack.daemon_address, json.dumps(list(PROMPT))),
        *map(str, folders),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{REPOSITORY}:{PLUGIN}", "HF_HUB_OFFLINE": "1"},
    )
    try:
        told, log = await asyncio.wait_for(process.communicate(), PUBLISHED_WITHIN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, log.decode(errors="replace")[-5000:]
    return [SYNC.validate_json(line) for line in told.splitlines() if line.startswith(b"{")]


async def answers(servers: Sequence[LocalEngine]) -> list[tuple[int | None, tuple[int, ...]]]:
    """The version that each says it has, and what it goes on with."""
    told = []
    for server in servers:
        engine = VllmEngine(server.url, timeout_s=100)
        assert not await engine.is_paused()
        version = await engine.weight_version()
        told.append((version, (await engine.excerpt(PROMPT, TOKENS)).token_ids))
        await engine.close()
    return told


async def test_one_broadcast_into_two_servers(
    servers: list[LocalEngine], tiny_model: Path, other_weights: Path, tmp_path: Path
) -> None:
    (_, own), (_, same) = await answers(servers)
    assert own == same
    async with (
        orchestrrl(load_scenario("vllm"), "vllm", servers, tmp_path) as stack,
        peers_beside(stack, servers, tmp_path),
    ):
        first, back = await published(stack, [other_weights, tiny_model])
        for report in (first, back):
            assert (report.state, report.code, report.plane) == (SyncState.DONE, "done", "vllm_transfer"), report
            assert all(engine.state is EngineSync.SERVES for engine in report.engines)
        assert await answers(servers) == [(2, own), (2, own)]
