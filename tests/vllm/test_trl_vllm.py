"""TRL's GRPO trainer with real vLLM servers: it generates through the gateway, and the servers get its weights, from a
shared folder or as published versions."""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.lab.demo.scenario import load_scenario
from orchestrrl.lab.demo.stack import orchestrrl
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import weights_pb2
from tests.orchestrrl.gateway.processes import operator_url
from tests.vllm.conftest import REPOSITORY, VLLM_PYTHON, as_they_were
from tests.vllm.weights_stack import TRAINER, peer_folder, peers_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLE = REPOSITORY / "deploy" / "examples" / "trl_grpo.py"
TRAINED_WITHIN_S = 600.0
STEPS, PROMPTS, SAMPLES = 3, 4, 4  # prompts over all processes
REQUESTS = STEPS * PROMPTS * SAMPLES
# Both compute in float32. Without a weight update the difference is 8 after one step.
SAME_WEIGHTS = 1e-3


async def train(
    stack: Stack, engines: Sequence[LocalEngine], model: Path, out: Path, processes: int, more: Sequence[str]
) -> dict[str, Any]:
    """Run the example in the trainer's environment as users do; return its report."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    named = [text for engine in engines for text in ("--engine", engine.url)]
    sizes = ["--steps", str(STEPS), "--prompts", str(PROMPTS // processes), "--samples", str(SAMPLES)]
    process = await asyncio.create_subprocess_exec(
        *(str(VLLM_PYTHON), *launcher, str(EXAMPLE), "--model", str(model), "--gateway", stack.gateway_url, *named),
        *(*sizes, "--out", str(out), *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HF_HOME": str(out / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        shown, _ = await asyncio.wait_for(process.communicate(), TRAINED_WITHIN_S)
    finally:
        if process.returncode is None:
            process.terminate()  # the launcher also ends its processes
            await process.wait()
    assert process.returncode == 0, shown.decode(errors="replace")[-5000:]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


async def greedy(url: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    limits = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = []
    async with aiohttp.ClientSession() as http:
        for prompt in prompts:
            async with http.post(f"{url}/v1/completions", json={"prompt": prompt, **limits}) as response:
                assert response.status == 200, await response.text()
                answers.append((await response.json())["choices"][0]["token_ids"])
    return answers


async def ledger(stack: Stack) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http:
        operator = await operator_url(http, stack.gateway_url)
        async with http.get(f"{operator}/orchestrrl/requests") as response:
            told: dict[str, Any] = await response.json()
            return told


@pytest.mark.parametrize(
    ("processes", "by_peers", "more"),
    [(1, False, []), (2, True, ["--conversations"])],
    ids=["from a folder, text", "by peers, two processes, conversations"],
)
async def test_grpo_trains_through_the_gateway(
    processes: int,
    by_peers: bool,
    more: list[str],
    vllm_servers: tuple[LocalEngine, ...],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    urls = [engine.url for engine in vllm_servers]
    probe = [[40, 41, 42, 43]]
    untrained_probe = await greedy(urls[0], probe, 16)
    async with (
        as_they_were(vllm_servers, tiny_model),
        orchestrrl(load_scenario("vllm"), "vllm", vllm_servers, tmp_path) as stack,
        ControlClient(stack.daemon_address) as daemon,
    ):
        if by_peers:
            way = ["--peer", TRAINER, "--folder", str(peer_folder(tmp_path, TRAINER)), "--daemon", stack.daemon_address]
            await peers_beside(stack, vllm_servers, tmp_path)
            report = await train(stack, vllm_servers, tiny_model, tmp_path, processes, [*way, *more])
        else:
            way = ["--weights-dir", str(tmp_path / "weights")]
            report = await train(stack, vllm_servers, tiny_model, tmp_path, processes, [*way, *more])
        told = await ledger(stack)
        carried = await daemon.call(daemon.weights.ListSyncs, weights_pb2.ListSyncsRequest())
        prompts, expected = report["prompt_ids"], report["greedy_ids"]
        trained = [await greedy(url, prompts, len(expected[0])) for url in urls]
    restored = [await greedy(url, probe, 16) for url in urls]
    untrained = await greedy(urls[0], prompts, len(expected[0]))

    # The trainer has learnt, from answers of its own policy in every step.
    assert len(report["steps"]) == STEPS
    for step in report["steps"]:
        assert all(math.isfinite(step[name]) for name in ("loss", "reward", "reward_std", "grad_norm")), step
    assert any(step["grad_norm"] > 0 for step in report["steps"])
    assert len(report["logprob_gaps"]) == STEPS * processes
    assert max(report["logprob_gaps"]) < SAME_WEIGHTS
    # After the last step, both servers generate what the trainer's model does, unlike before.
    assert trained == [expected, expected]
    assert untrained != expected
    assert restored == [untrained_probe, untrained_probe]
    # If published, each step's weights were a version of the fleet.
    versions = [(sync.version, sync.code) for sync in carried.syncs]
    assert versions == [(step, "done") for step in range(STEPS, -1, -1) if by_peers]
    # Every request went through the gateway once: its token counts equal the trainer's.
    assert (report["requests"], report["bypassed"], report["syncs"]) == (REQUESTS, 0, STEPS + 1)
    assert told["in_flight"] == []
    ended = told["finished"]
    assert len({request["id"] for request in ended}) == len(ended) == REQUESTS
    assert {request["tag"] for request in ended} == {"trl-example"}
    assert {request["finish_reason"] for request in ended} <= {"stop", "length"}
    tokens = sum(request["prompt_tokens"] + request["generated_tokens"] for request in ended)
    assert tokens == report["steps"][-1]["num_tokens"]
