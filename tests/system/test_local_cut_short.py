"""Daemons that are killed during a start, a stop or a loan: the next daemon finds the processes, and stops them or
continues. The engine has two processes, so that one of them can be missing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import stub_launch, until
from orchestrrl.fleet.deployers.local import LocalDeployer
from orchestrrl.fleet.deployers.local_machine import MARK
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism
from tests.system.cut_short import fleet_at, launch_at

ENGINE = EngineId("e/0")
TWO_PROCESSES = Parallelism(attention_gpus=1, ffn_gpus=1)


def spec(engine: EngineId = ENGINE, gpus: tuple[int, ...] = (0, 1)) -> EngineSpec:
    return EngineSpec(engine, ConfigurationId("afd"), TWO_PROCESSES, tuple(map(GpuId, gpus)))


def cut(folder: Path, change: str, launch: EngineLaunch) -> list[str]:
    """Return the effects of the change. It leaves fleets 0 to their number; the last one was not interrupted."""
    script = Path(__file__).with_name("cut_short.py")
    printed = [
        TypeAdapter(kind).dump_json(value).decode() for kind, value in ((EngineLaunch, launch), (EngineSpec, spec()))
    ]
    command = [sys.executable, str(script), str(folder), change, *printed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def processes(wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """Return the processes of these fleets, found by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if mark is not None and wanted(json.loads(mark)["fleet"]):
            found.append(process)
    return found


class Killed:
    """The state that a deployer killed at one place has left."""

    def __init__(self, folder: Path, launch: EngineLaunch, place: int) -> None:
        self.identity = fleet_at(folder, place)
        self.deployer = LocalDeployer(launch_at(launch, place), self.identity, {"grace_s": 0.5}, WallClock())

    @property
    def processes(self) -> list[psutil.Process]:
        mine = f"{self.identity.name} in {os.path.realpath(self.identity.folder)}"
        return processes(lambda fleet: fleet == mine)

    async def check_whole(self) -> None:
        found = await until(self.deployer, ENGINE, EngineLife.ALIVE)
        assert (found.gpus, found.spec) == ((0, 1), spec())
        assert len(self.processes) == 2

    async def check_gone(self) -> None:
        await self.deployer.stop(ENGINE)
        assert await self.deployer.list_engines() == ()
        assert self.processes == []
        other = spec(EngineId("other"))
        assert (await self.deployer.start(other)).gpus == other.gpus
        await self.deployer.stop(other.engine)
        assert self.processes == []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[EngineLaunch]:
    yield replace(stub_launch(tmp_path), device=EngineDevice.CUDA)
    for process in processes(lambda fleet: str(tmp_path) in fleet):
        process.kill()


@pytest.mark.parametrize("then", ["start", "stop"])
@pytest.mark.parametrize("change", ["start", "stop", "lend"])
async def test_engines_of_a_killed_deployer_are_found_and_started_or_stopped(
    tmp_path: Path, launch: EngineLaunch, change: str, then: str
) -> None:
    effects = cut(tmp_path, change, launch)
    assert effects.count("os.posix_spawn") == (2 if change == "start" else 0), effects
    for place in range(len(effects) + 1):
        left = Killed(tmp_path, launch, place)
        there = await left.deployer.list_engines()
        assert len(there) <= 1
        if change != "stop" and left.processes:  # signalled processes are about to end
            assert [each.engine for each in there] == [ENGINE]
            assert there[0].life is (EngineLife.ALIVE if len(left.processes) == 2 else EngineLife.ENDED)
        if change == "lend":
            assert len(left.processes) == 2
            assert there[0].lent or place < len(effects)
        if then == "start":
            started = await left.deployer.start(spec())
            assert started.life is EngineLife.ALIVE, (place, effects[:place], started)
            await left.check_whole()
        await left.check_gone()
