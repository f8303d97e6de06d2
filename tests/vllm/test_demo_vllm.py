"""The whole loop on two real vLLM servers: moved requests generate the same tokens as undisturbed ones."""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.demo.scenario import load_scenario, samples
from orchestrrl.lab.demo.stack import engines, orchestrrl
from orchestrrl.lab.demo.step import DemoFleet
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, telemetry_pb2

pytestmark = pytest.mark.timeout(900)

REPOSITORY = Path(__file__).parents[2]


async def keep_moving(stack: Stack) -> None:
    """Act as an operator: move running requests to the other engine, one after another, through the daemon."""
    async with ControlClient(stack.daemon_address) as control:
        while True:
            listed = await control.call(control.control.ListRequests, control_pb2.ListRequestsRequest(), timeout_s=60)
            running = [r for r in listed.requests if r.state == telemetry_pb2.REQUEST_STATE_RUNNING and not r.moves]
            for request in running[:2]:
                other = "e1" if request.engine_id == "e0" else "e0"
                order = control_pb2.MoveRequestRequest(request_id=request.request_id, to_engine_id=other)
                # It has ended, or the machine is busy: the next round tries again.
                with contextlib.suppress(ProblemFaults, Permanent, Retryable, OutcomeUnknown):
                    await control.call(control.control.MoveRequest, order)
            await asyncio.sleep(0.1)


async def test_moved_requests_generate_the_undisturbed_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # where .venv-vllm is searched
    scenario = load_scenario("vllm").model_copy(update={"prompts": 4, "max_tokens": 1200})
    step = samples(scenario, "vllm", 3)
    async with engines(scenario, "vllm", tmp_path) as running:
        clients = [VllmEngine(engine.url) for engine in running]
        fleet = DemoFleet(scenario, "vllm", [], lambda *_: None, clients)
        undisturbed = await fleet.run_step(step, "undisturbed", running[0].url)
        async with orchestrrl(scenario, "vllm", running, tmp_path) as stack:
            moving = asyncio.create_task(keep_moving(stack))
            moved = await fleet.run_step(step, "moved", stack.gateway_url)
            moving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await moving  # raises its error
            async with ControlClient(stack.daemon_address) as control:
                status = await control.control.GetStatus(control_pb2.GetStatusRequest())
        for client in clients:
            await client.close()
    assert undisturbed.faults == moved.faults == {}
    assert moved.answers == undisturbed.answers
    assert {len(ids) for ids in moved.answers.values()} == {sample.output_tokens for sample in step}
    assert status.moves_done > 0
    assert status.tokens_recomputed > 0


@pytest.mark.slow
def test_demo_runs_on_real_vllm(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrrl",
        "demo",
        "--engine-kind",
        "vllm",
        "--seeds",
        "2",
        "--out",
        str(tmp_path),
    ]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
    assert report["requests"] == 32
    assert report["oracle_ratio_median"] is None  # the oracle needs a step time, which vLLM does not report
    assert (tmp_path / "remaining_requests.png").exists()
