"""Tests of local engines on a real machine: orphans, lost records, foreign processes and ports, logs, and a real
engine."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.fleet.deployers.base import DEPLOYERS, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import stub_launch
from orchestrrl.fleet.deployers.local import LocalDeployer
from orchestrrl.fleet.deployers.local_machine import EngineRecords
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

ENGINE, OTHER = EngineId("e0"), EngineId("e1")


def spec(engine: EngineId = ENGINE, gpus: tuple[int, ...] = (0,), **more: Any) -> EngineSpec:
    held = tuple(map(GpuId, gpus))
    return EngineSpec(engine, ConfigurationId("tp"), Parallelism(tp=len(gpus)), held, **more)


class Fleet:
    """A fleet in a folder."""

    def __init__(self, folder: Path, launch: EngineLaunch) -> None:
        self.folder = folder
        self.launch = launch
        self.records = folder / "fleet" / "engines"
        self.logs = folder / "fleet" / "logs"

    def deployer(self, name: str = "mine", **options: Any) -> LocalDeployer:
        identity = FleetIdentity(name, str(self.folder / "fleet"))
        return LocalDeployer(self.launch, identity, {"grace_s": 0.5, **options}, WallClock())

    def leader(self) -> psutil.Process:
        """Return the leader by the only record."""
        (path,) = self.records.glob("*.json")
        return psutil.Process(json.loads(path.read_text())["leaders"][0][0])


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, stub_launch(tmp_path))
    yield fleet
    deployer = fleet.deployer()
    for deployed in await deployer.list_engines():
        await deployer.stop(deployed.engine)


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!{sys.executable} -IS\n{text}")
    path.chmod(0o755)
    return str(path)


async def test_cancelled_start_starts_nothing_later(fleet: Fleet) -> None:
    deployer = fleet.deployer()
    with EngineRecords(fleet.folder / "fleet").alone():
        starting = asyncio.create_task(deployer.start(spec()))
        await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.sleep(0.05)
        assert not starting.done()  # its thread waits for the lock, and will start the engine
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await deployer.status(ENGINE) is not None


# Ports.


# Logs, options, refusals.


async def test_missing_program_starts_nothing(tmp_path: Path, fleet: Fleet) -> None:
    fleet.launch = replace(fleet.launch, python=str(tmp_path / "nothing"))
    with pytest.raises(ProblemFaults, match=r"python: must be a program of this machine, got '.*nothing'"):
        await fleet.deployer().start(spec())
    assert await fleet.deployer().list_engines() == ()


async def test_invalid_command_line_starts_nothing(fleet: Fleet) -> None:
    with pytest.raises(ProblemFaults, match="contradicts"):
        await fleet.deployer().start(spec(arguments=("-tp", "4")))
    assert await fleet.deployer().list_engines() == ()


async def test_gpus_of_other_machines_are_refused(fleet: Fleet) -> None:
    fleet.launch = replace(fleet.launch, device=EngineDevice.CUDA)
    with pytest.raises(Permanent, match="only on this machine"):
        await fleet.deployer().start(spec(gpus=(8,)))


def test_all_option_faults_are_reported_at_once() -> None:
    identity = FleetIdentity("mine", "/nowhere")
    with pytest.raises(ProblemFaults) as caught:
        DEPLOYERS.load("local")(EngineLaunch("p", "m"), identity, {"grace_s": 0, "logs_kept": -1, "x": 1}, WallClock())
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "options.grace_s",
        "options.logs_kept",
        "options.x",
    ]
