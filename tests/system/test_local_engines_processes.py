"""Local engines as real processes: orphans, lost records, unrelated processes and ports, logs, and a real engine."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineProduct
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import BEHAVIOUR, LAST_WORDS, EngineBehaviour, free_range, naming, until
from orchestrrl.fleet.deployers.local import LocalDeployer
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from planner.model import EngineId
from tests.orchestrrl.fleet.deployers.test_local_engines import ENGINE, OTHER, Fleet, fleet, program, spec

# Its child resembles vLLM's workers: it has overwritten its environment, and outlives its parent.
WITH_WORKER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"], env={})
print("worker", worker.pid, flush=True)
worker.wait()
"""


def behaving(behaviour: EngineBehaviour, engine: EngineId = ENGINE, gpus: tuple[int, ...] = (0,)) -> EngineSpec:
    return spec(engine, gpus, environment={BEHAVIOUR: behaviour.value})


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is not an engine."""
    with subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"], start_new_session=True) as process:
        yield process
        process.kill()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def end(deployer: LocalDeployer) -> DeployedInstance:
    return await until(deployer, ENGINE, EngineLife.ENDED)


async def test_orphaned_workers_are_found_by_their_output_and_stopped(tmp_path: Path, fleet: Fleet) -> None:
    fleet.launch = replace(fleet.launch, python=program(tmp_path, WITH_WORKER))
    deployer = fleet.deployer()
    await deployer.start(spec())
    while "worker" not in (fleet.logs / "e0.log").read_text():
        await asyncio.sleep(0.01)
    worker = int((fleet.logs / "e0.log").read_text().split()[1])
    fleet.leader().kill()
    ended = await end(deployer)
    assert "was ended by SIGKILL" in ended.detail
    assert not gone(worker)
    with pytest.raises(Permanent):
        await deployer.start(spec(OTHER))
    await fleet.deployer().stop(ENGINE)
    assert gone(worker)
    assert await deployer.list_engines() == ()


async def test_engine_without_record_is_found_by_its_environment(fleet: Fleet) -> None:
    before = await fleet.deployer().start(spec())
    (record,) = fleet.records.glob("*.json")
    record.unlink()
    assert await fleet.deployer().list_engines() == (before,)
    with pytest.raises(Permanent, match="0 by e0"):
        await fleet.deployer().start(spec(OTHER))
    assert await fleet.deployer().start(spec()) == before
    assert record.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"spec": {}}', '{"url": 3, "spec": {"engine": "e0"}}'])
async def test_damaged_record_counts_as_lost(fleet: Fleet, text: str) -> None:
    before = await fleet.deployer().start(spec())
    (record,) = fleet.records.glob("*.json")
    record.write_text(text)
    assert await fleet.deployer().list_engines() == (before,)
    await fleet.deployer().stop(ENGINE)
    assert await fleet.deployer().list_engines() == ()


async def test_process_known_only_by_its_output_is_listed_and_stopped(tmp_path: Path, fleet: Fleet) -> None:
    fleet.launch = replace(fleet.launch, python=program(tmp_path, WITH_WORKER))
    deployer = fleet.deployer()
    await deployer.start(spec())
    while "worker" not in (fleet.logs / "e0.log").read_text():
        await asyncio.sleep(0.01)
    worker = int((fleet.logs / "e0.log").read_text().split()[1])
    leader = fleet.leader()
    leader.kill()
    while not gone(leader.pid):
        await asyncio.sleep(0.01)
    (record,) = fleet.records.glob("*.json")
    record.unlink()
    (found,) = await fleet.deployer().list_engines()
    assert (found.engine, found.life, found.spec, found.gpus) == (ENGINE, EngineLife.ENDED, None, ())
    assert "record was lost" in found.detail
    with pytest.raises(Permanent, match="e0 already exists"):
        await deployer.start(spec())
    await deployer.stop(ENGINE)
    assert gone(worker)


async def test_unrelated_process_with_a_reused_pid_is_not_stopped(
    fleet: Fleet, stranger: subprocess.Popen[bytes]
) -> None:
    deployer = fleet.deployer()
    await deployer.start(spec())
    await deployer.stop(ENGINE)
    record = fleet.records / "e0.json"
    await deployer.start(spec())
    document = json.loads(record.read_text())
    fleet.leader().kill()
    await end(deployer)
    document["leaders"] = [[stranger.pid, document["leaders"][0][1] - 100.0]]
    record.write_text(json.dumps(document))
    assert (await end(deployer)).spec == spec()
    await deployer.stop(ENGINE)
    assert await deployer.list_engines() == ()
    assert stranger.poll() is None


async def test_fleets_in_two_folders_are_separate(tmp_path: Path, fleet: Fleet) -> None:
    await fleet.deployer().start(spec())
    other = Fleet(tmp_path / "elsewhere", fleet.launch)
    assert await other.deployer().list_engines() == ()
    await other.deployer().stop(ENGINE)
    assert [each.life for each in await fleet.deployer().list_engines()] == [EngineLife.ALIVE]


async def test_one_of_two_deployers_gets_the_gpu(fleet: Fleet) -> None:
    specs = [spec(EngineId(f"e{n}"), (0, n + 1)) for n in range(6)]
    outcomes = await asyncio.gather(*(fleet.deployer().start(each) for each in specs), return_exceptions=True)
    started = [each for each in outcomes if isinstance(each, DeployedInstance)]
    assert len(started) == 1
    assert all(isinstance(each, Permanent) for each in outcomes if each not in started)
    deployer = fleet.deployer()
    assert [each.engine for each in await deployer.list_engines()] == [started[0].engine]
    await deployer.stop(started[0].engine)


async def test_port_in_use_is_skipped(fleet: Fleet) -> None:
    with socket.socket() as somebody:
        somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        somebody.bind(("127.0.0.1", fleet.launch.first_port))
        somebody.listen()
        started = await fleet.deployer().start(spec())
        assert not started.url.endswith(f":{fleet.launch.first_port}")
        assert started.spec == spec()


async def test_port_of_a_starting_engine_stays_reserved_without_its_deployer(tmp_path: Path, fleet: Fleet) -> None:
    mine = await fleet.deployer().start(behaving(EngineBehaviour.HANGS))
    assert mine.url == f"http://127.0.0.1:{fleet.launch.first_port}"
    other = Fleet(tmp_path / "elsewhere", fleet.launch)
    theirs = await other.deployer().start(behaving(EngineBehaviour.HANGS))
    await other.deployer().stop(ENGINE)
    assert theirs.url != mine.url


async def test_concurrent_starts_of_two_fleets_get_different_ports(tmp_path: Path, fleet: Fleet) -> None:
    fleets = [Fleet(tmp_path / str(n), fleet.launch) for n in range(5)]
    started = await asyncio.gather(*(each.deployer().start(spec()) for each in fleets))
    assert len({each.url for each in started}) == len(fleets)
    await asyncio.gather(*(each.deployer().stop(ENGINE) for each in fleets))


async def test_spare_ports_are_the_ports_without_gpu(fleet: Fleet) -> None:
    first = fleet.launch.first_port
    fleet.launch = replace(fleet.launch, per_node=2, last_port=first + 9)
    holders = []
    for port in (first, first + 8):
        holders.append(socket.create_server(("127.0.0.1", port)))
    assert (await fleet.deployer().start(spec())).url.endswith(f":{first + 9}")
    await fleet.deployer().stop(ENGINE)
    holders.append(socket.create_server(("127.0.0.1", first + 9)))
    with pytest.raises(Retryable, match="no free port"):
        await fleet.deployer().start(spec())
    assert await fleet.deployer().list_engines() == ()
    for holder in holders:
        holder.close()


async def test_given_port_can_be_reused_directly_after_connections(fleet: Fleet) -> None:
    deployer, wanted = fleet.deployer(), spec(port=fleet.launch.first_port + 2)
    for _ in range(2):
        started = await deployer.start(wanted)
        assert started.url.endswith(f":{wanted.port}")
        while True:
            try:
                with socket.create_connection(("127.0.0.1", wanted.port or 0)) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    while connection.recv(1000):  # until the engine closes: the kernel keeps the port for a minute
                        pass
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        await deployer.stop(ENGINE)


async def test_logs_of_recent_starts_are_kept(fleet: Fleet) -> None:
    deployer, pids = fleet.deployer(logs_kept=2), []
    for _ in range(4):
        await deployer.start(behaving(EngineBehaviour.EXITS))
        assert LAST_WORDS in (await end(deployer)).detail
        pids.append((fleet.logs / "e0.log").read_text().split()[2])
        await deployer.stop(ENGINE)
    names = ["e0.log", "e0.log.1", "e0.log.2"]
    assert sorted(path.name for path in fleet.logs.iterdir()) == names
    assert [(fleet.logs / name).read_text().split()[2] for name in names] == pids[:0:-1]


async def test_end_of_an_engine_has_its_exit_status(fleet: Fleet) -> None:
    deployer = (
        fleet.deployer()
    )  # only the process that waits for a child gets its status; `start` may do so if the engine ends immediately
    await deployer.start(behaving(EngineBehaviour.EXITS))
    assert "ended with status 3" in (await end(deployer)).detail


async def test_stopped_engine_leaves_no_zombie(fleet: Fleet) -> None:
    deployer = fleet.deployer()
    before = set(psutil.Process().children())
    for behaviour in (EngineBehaviour.SERVES, EngineBehaviour.EXITS, EngineBehaviour.HANGS):
        await deployer.start(behaving(behaviour))
        if behaviour is EngineBehaviour.EXITS:
            await asyncio.sleep(0.2)
        await deployer.stop(ENGINE)
    assert set(psutil.Process().children()) <= before


async def test_records_are_readable_only_by_their_owner(fleet: Fleet) -> None:
    await fleet.deployer().start(spec(environment={"HF_TOKEN": "secret"}))
    assert [path.stat().st_mode & 0o077 for path in fleet.records.glob("*.json")] == [0]


async def test_unusual_engine_names_are_valid(fleet: Fleet) -> None:
    names = [EngineId(name) for name in ("../up", "a b", "é", "x.log", "x", "-")]
    deployer = fleet.deployer()
    for gpu, name in enumerate(names):
        await deployer.start(spec(name, (gpu,)))
    assert {each.engine for each in await deployer.list_engines()} == set(names)
    assert not list(fleet.folder.glob("up*"))
    for name in names:
        await deployer.stop(name)
    assert await deployer.list_engines() == ()


async def test_start_during_a_stop_is_retryable(fleet: Fleet) -> None:
    deployer = fleet.deployer()
    await deployer.start(behaving(EngineBehaviour.IGNORES_SIGTERM))
    log = fleet.logs / "e0.log"
    while not log.exists() or "stub" not in log.read_text():
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(deployer.stop(ENGINE))
    await asyncio.sleep(0.2)
    with pytest.raises(Retryable, match=naming("is being stopped")):
        await deployer.start(behaving(EngineBehaviour.IGNORES_SIGTERM))
    await stopping
    assert await deployer.list_engines() == ()


async def test_cancelled_start_leaves_a_whole_engine_or_none(fleet: Fleet) -> None:
    """The engine is never half started: the change continues in its thread, and the next call waits for it."""
    deployer = fleet.deployer()
    for turns in range(6):
        starting = asyncio.create_task(deployer.start(spec()))
        for _ in range(turns):
            await asyncio.sleep(0.002)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert all(each.life is EngineLife.ALIVE for each in await deployer.list_engines())
        await deployer.start(spec())
        await deployer.stop(ENGINE)
        assert await deployer.list_engines() == ()


async def test_simulated_engine_is_started_adopted_and_stopped(tmp_path: Path) -> None:
    launch = EngineLaunch(python=sys.executable, model="simulated", engine=EngineProduct.SIMULATED, first_port=0)
    identity = FleetIdentity("mine", str(tmp_path))
    deployer = LocalDeployer(replace(launch, first_port=free_range()), identity, {}, WallClock())
    wanted = spec(gpus=(8, 9), max_sequences=5, usual={"--alpha-s": "0.001"})
    started = await deployer.start(wanted)
    client = SimulatedEngine(started.url)
    began_s = time.monotonic()
    while not await client.healthy():
        assert (await deployer.status(ENGINE) or started).life is EngineLife.ALIVE
        assert time.monotonic() < began_s + 60
        await asyncio.sleep(0.05)
    assert (await client.capabilities()).max_sequences == 5
    assert (await client.layout()).tp == 2
    await client.close()
    anew = LocalDeployer(launch, identity, {}, WallClock())
    assert await anew.list_engines() == (started,)
    os.kill(json.loads((tmp_path / "engines" / "e0.json").read_text())["leaders"][0][0], signal.SIGKILL)
    assert "was ended by SIGKILL" in (await end(anew)).detail
    await anew.stop(ENGINE)
    assert await anew.list_engines() == ()
