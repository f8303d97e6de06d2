"""Transfer of weights from a trainer's process directly into two real vLLM servers by vLLM's weight transfer, with a
backend over gloo: everything except NCCL."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrrl.engines.managed_conformance import PROMPT, TOKENS
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.demo.scenario import load_scenario
from orchestrrl.lab.demo.stack import orchestrrl
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.weights.controller.reports import EngineSync, SyncReport, SyncState
from orchestrrl.weights.controller.state import SYNC
from tests.vllm.conftest import GLOO_ENVIRONMENT, GLOO_PLUGIN, REPOSITORY, VLLM_PYTHON, as_they_were
from tests.vllm.weights_stack import peers_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PUBLISHED_WITHIN_S = 240.0


async def published(stack: Stack, folders: Sequence[Path]) -> list[SyncReport]:
    """Publish each folder as a version, in one trainer process; return the outcomes."""
    process = await asyncio.create_subprocess_exec(
        *(str(VLLM_PYTHON), str(GLOO_PLUGIN / "publish_directly.py"), stack.daemon_address, json.dumps(list(PROMPT))),
        *map(str, folders),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **GLOO_ENVIRONMENT, "PYTHONPATH": f"{REPOSITORY}:{GLOO_PLUGIN}", "HF_HUB_OFFLINE": "1"},
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
    """Return the version that each server reports and the tokens that it generates."""
    told = []
    for server in servers:
        engine = VllmEngine(server.url, timeout_s=100)
        assert not await engine.is_paused()
        version = await engine.weight_version()
        told.append((version, (await engine.excerpt(PROMPT, TOKENS)).token_ids))
        await engine.close()
    return told


async def test_one_broadcast_updates_two_servers(
    vllm_servers: tuple[LocalEngine, ...], tiny_model: Path, other_weights: Path, tmp_path: Path
) -> None:
    servers = vllm_servers
    (_, own), (_, same) = await answers(servers)
    assert own == same
    async with (
        as_they_were(servers, tiny_model),
        orchestrrl(load_scenario("vllm"), "vllm", servers, tmp_path) as stack,
    ):
        await peers_beside(stack, servers, tmp_path)
        first, back = await published(stack, [other_weights, tiny_model])
        for report in (first, back):
            assert (report.state, report.code, report.backend) == (SyncState.DONE, "done", "vllm_transfer"), report
            assert all(engine.state is EngineSync.SERVES for engine in report.engines)
        assert await answers(servers) == [(2, own), (2, own)]
