"""Real vLLM as local processes: a crashed server leaves workers that have overwritten their environment."""

import asyncio
import os
from pathlib import Path

import psutil

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.fleet.deployers.base import EngineLife, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import free_range, until
from orchestrrl.fleet.deployers.local import LocalDeployer
from orchestrrl.lab.testbed.engines import VLLM_ARGUMENTS, VLLM_ENVIRONMENT
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism
from tests.vllm.conftest import VLLM_PYTHON

ENGINE = EngineId("e0")
READY_WITHIN_S = 300.0


def of_session(leader: int) -> list[int]:
    """Return the live processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


async def test_workers_left_by_a_crashed_server_are_ended(tiny_model: Path, tmp_path: Path) -> None:
    launch = EngineLaunch(
        python=str(VLLM_PYTHON),
        model=str(tiny_model),
        device=EngineDevice.CPU,
        first_port=free_range(),
        arguments=(*VLLM_ARGUMENTS, "--max-model-len", "4096"),
        environment=VLLM_ENVIRONMENT,
    )
    deployer = LocalDeployer(launch, FleetIdentity("crash", str(tmp_path)), {}, WallClock())
    spec = EngineSpec(ENGINE, ConfigurationId("tp2"), Parallelism(tp=2), (GpuId(0), GpuId(1)))
    started = await deployer.start(spec)
    client = VllmEngine(started.url, timeout_s=120.0)
    async with asyncio.timeout(READY_WITHIN_S):
        while not await client.healthy():
            there = await deployer.status(ENGINE)
            assert there is not None
            assert there.life is EngineLife.ALIVE, there.detail
            await asyncio.sleep(0.2)
    assert await client.probe() > 0
    assert (await client.layout()).tp == 2
    await client.close()

    (leader,) = (
        each for each in psutil.process_iter() if _serves(each, started.url) and os.getsid(each.pid) == each.pid
    )
    assert len(of_session(leader.pid)) > 3  # the server, its core, two workers
    leader.kill()
    # A multi-threaded process appears as ended before its last thread ends and its exit status is available.
    async with asyncio.timeout(READY_WITHIN_S):
        while "was ended by SIGKILL" not in (await until(deployer, ENGINE, EngineLife.ENDED)).detail:
            await asyncio.sleep(0.05)
    await deployer.stop(ENGINE)
    assert of_session(leader.pid) == []
    assert await deployer.list_engines() == ()


def _serves(process: psutil.Process, url: str) -> bool:
    try:
        return str(VLLM_PYTHON) in process.cmdline() and url.rpartition(":")[2] in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
