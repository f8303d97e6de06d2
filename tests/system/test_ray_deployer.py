"""Engines as actors of a real Ray cluster on this machine: the conformance suite, and properties of Ray. GPUs are a
resource called `slot`, four on the head."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_list
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.fleet.deployers import ray as ray_deployer
from orchestrrl.fleet.deployers.base import DEPLOYERS, DeployedInstance, Deployer, EngineLife, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import (
    DEADLINE_S,
    ONE,
    TWO,
    DeployerConformance,
    naming,
    stub_launch,
    until,
)
from orchestrrl.fleet.deployers.ray import RayDeployer
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism
from tests.system.ray_cluster import RayNodes, connect, environment_of, ray_nodes, until_gone

SLOTS = {"per_gpu": {"slot": 1.0}, "grace_s": 1.0}
FLEET = "f"
NAMESPACE = "orchestrrl-f"
STUB = DeployerConformance()


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Start the cluster of an RL job, which is this process."""
    with ray_nodes() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        cluster.start_head('{"slot": 4}', gpus=2)
        patch.setenv("RAY_ADDRESS", cluster.address)
        connect(cluster.address)
        yield cluster
        ray.shutdown()


class TestConformance(DeployerConformance):
    @pytest.fixture(autouse=True)
    def in_folder(self, nodes: RayNodes, tmp_path: Path) -> None:
        self.folder = tmp_path

    async def make_deployer(self, fleet: str) -> Deployer:
        options = {**SLOTS, "log_folder": str(self.folder / "logs")}
        identity = FleetIdentity(fleet, str(self.folder / fleet))
        deployer: Deployer = DEPLOYERS.load("ray")(stub_launch(self.folder), identity, options, WallClock())
        return deployer


class Harness:
    """Creates the deployers of one fleet, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launch = stub_launch(folder)
        self._made: list[RayDeployer] = []

    def deployer(self, launch: EngineLaunch | None = None, **options: Any) -> RayDeployer:
        given = {**SLOTS, "start_within_s": 120.0, "log_folder": str(self.folder / "logs"), **options}
        identity = FleetIdentity(FLEET, str(self.folder / FLEET))
        self._made.append(RayDeployer(launch or self.launch, identity, given, WallClock()))
        return self._made[-1]

    async def clear(self) -> None:
        if left_in_ray():
            last = self.deployer()
            for found in await last.list_engines():
                await last.stop(found.engine)
        for deployer in self._made:
            await deployer.close()
        assert left_in_ray() == []


@pytest.fixture
async def harness(nodes: RayNodes, tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    await harness.clear()


def left_in_ray() -> list[str]:
    """Return the actors and groups of the fleet."""
    groups = [t["name"] for t in placement_group_table().values() if t["state"] != "REMOVED"]
    actors = [each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    records = [key.decode() for key in _internal_kv_list(f"{NAMESPACE}/", namespace=b"orchestrrl")]
    return [*(name for name in groups if name.startswith(NAMESPACE)), *actors, *records]


async def pid_at(url: str) -> int:
    """Return the process id that the stub reports."""
    async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
        return int(await response.text())


async def running(deployer: Deployer, spec: EngineSpec) -> tuple[DeployedInstance, int]:
    """Start an engine and return the process id that responds."""
    await deployer.start(spec)
    found = await STUB.until_it_answers(deployer, spec.engine)
    return found, await pid_at(found.url)


async def free_slots(wanted: float) -> bool:
    """Wait until Ray reports the free slots, which may lag."""
    for _ in range(100):
        if ray.available_resources().get("slot", 0.0) == wanted:
            return True
        await asyncio.sleep(0.1)
    return False


# --- ends of engines


async def test_killed_actor_ends_its_server(harness: Harness) -> None:
    deployer = harness.deployer()
    _, pid = await running(deployer, STUB.spec(ONE))
    ray.kill(ray.get_actor(f"{ONE}#0.0", namespace=NAMESPACE))
    assert until_gone(pid)
    found = await until(deployer, ONE, EngineLife.ENDED)
    assert f"Ray has ended its actor {ONE}#0.0" in found.detail
    assert found.spec == STUB.spec(ONE)
    await deployer.stop(ONE)
    assert left_in_ray() == []


async def test_killed_server_is_reported_with_the_end_of_its_log(harness: Harness) -> None:
    deployer = harness.deployer()
    _, pid = await running(deployer, STUB.spec(ONE))
    os.kill(pid, signal.SIGKILL)
    found = await until(deployer, ONE, EngineLife.ENDED)
    assert f"process {pid}" in found.detail
    assert "status 137" in found.detail
    assert f"the stub {pid} serves" in found.detail


async def test_killed_supervisor_ends_the_server(harness: Harness) -> None:
    deployer = harness.deployer()
    _, pid = await running(deployer, STUB.spec(ONE))
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert until_gone(pid)
    assert "was killed" in (await until(deployer, ONE, EngineLife.ENDED)).detail


async def test_children_of_a_server_end_with_it(harness: Harness) -> None:
    """Children with their own session end too."""
    program = harness.folder / "parent"
    program.write_text('#!/bin/sh\nsetsid sh -c "sleep 500; true" &\nexec "$(dirname "$0")/stub" "$@"\n')
    program.chmod(0o755)
    deployer = harness.deployer(replace(harness.launch, python=str(program)))
    _, pid = await running(deployer, STUB.spec(ONE))
    (child,) = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    os.kill(pid, signal.SIGKILL)
    await until(deployer, ONE, EngineLife.ENDED)
    assert until_gone(child)


# --- the next daemon

DAEMON = """\
import asyncio, os, sys
from orchestrrl.core.clock import WallClock
from orchestrrl.fleet.deployers.base import FleetIdentity
from orchestrrl.fleet.deployers.conformance import DEADLINE_S, ONE, DeployerConformance, stub_launch
from orchestrrl.fleet.deployers.ray import RayDeployer
from pathlib import Path

async def main():
    folder, options = Path(sys.argv[1]), eval(sys.argv[2])
    deployer = RayDeployer(stub_launch(folder), FleetIdentity("f", str(folder / "f")), options, WallClock())
    print((await deployer.start(DeployerConformance().spec(ONE, (0, 1)))).url, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_engines_of_a_killed_daemon_are_adopted(harness: Harness) -> None:
    given = repr({**SLOTS, "log_folder": str(harness.folder / "logs")})
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DAEMON, str(harness.folder), given, stdout=subprocess.PIPE
    )
    assert daemon.stdout is not None
    url = (await daemon.stdout.readline()).decode().strip()
    daemon.kill()
    await daemon.wait()
    deployer = harness.deployer()
    (found,) = await deployer.list_engines()
    assert (found.engine, found.url, found.life) == (ONE, url, EngineLife.ALIVE)
    spec = STUB.spec(ONE, (0, 1))
    assert found.spec == spec
    pid = await pid_at((await STUB.until_it_answers(deployer, ONE)).url)
    assert (await deployer.start(spec)).url == url
    assert await pid_at(url) == pid
    await deployer.stop(ONE)
    assert until_gone(pid, 1.0)
    assert left_in_ray() == []


DIES = """\
import os
from orchestrrl.fleet.deployers import ray_cluster
for owner in (ray_cluster.RayCluster, ray_cluster.EnginePlaces):
    if hasattr(owner, {before!r}):
        setattr(owner, {before!r}, lambda *_, **__: os._exit(9))
main()
"""


@pytest.mark.parametrize("before", ["own", "_seated", "launch"])  # the placement group, the actors, the process
async def test_interrupted_start_is_found_and_stopped_or_restarted(
    harness: Harness, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = STUB.spec(ONE, (0, 1))
    for then in ("stop", "start"):
        with monkeypatch.context() as patch:
            patch.setattr(ray_deployer, "RUN", ray_deployer.RUN.replace("main()\n", DIES.format(before=before)))
            with pytest.raises(OutcomeUnknown, match=naming("status 9")):
                await harness.deployer().start(spec)
        deployer = harness.deployer()
        (found,) = await deployer.list_engines()
        assert (found.engine, found.gpus, found.life, found.spec) == (ONE, (0, 1), EngineLife.ENDED, spec)
        with pytest.raises(Permanent, match=naming(ONE)):
            await deployer.start(STUB.spec(TWO, (1,)))
        if then == "start":
            await running(deployer, spec)
        await deployer.stop(ONE)
        assert left_in_ray() == []


async def test_groups_and_actors_without_a_record_are_found_and_removed(harness: Harness) -> None:
    placement_group([{"slot": 1}], name=f"{NAMESPACE}/stray", lifetime="detached")
    deployer = harness.deployer()
    (found,) = await deployer.list_engines()
    assert (found.engine, found.life, found.spec) == ("stray", EngineLife.ENDED, None)
    await deployer.stop(EngineId("stray"))
    assert left_in_ray() == []


# --- placement


async def test_missing_capacity_is_reported_and_nothing_remains(harness: Harness) -> None:
    taken = placement_group([{"slot": 3}])
    assert taken.wait(60)
    deployer = harness.deployer()
    with pytest.raises(Retryable, match=naming("1 of its 4 slot free, 2 needed")):
        await deployer.start(STUB.spec(ONE, (0, 1)))
    assert left_in_ray() == []
    remove_placement_group(taken)
    assert await free_slots(4)
    await running(deployer, STUB.spec(ONE, (0, 1)))


async def test_port_in_use_is_skipped(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found, _ = await running(harness.deployer(), replace(STUB.spec(ONE), port=port))
        assert not found.url.endswith(f":{port}")
    assert found.spec == replace(STUB.spec(ONE), port=port)


async def test_ray_selects_the_gpus_of_the_node(harness: Harness) -> None:
    deployer = harness.deployer(per_gpu={"GPU": 1.0})
    holder = placement_group([{"GPU": 1}])
    assert holder.wait(60)
    _, pid = await running(deployer, STUB.spec(ONE, (7,)))
    assert environment_of(pid)["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert environment_of(pid).keys().isdisjoint({"RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV"})
    remove_placement_group(holder)


async def test_engines_inside_a_placement_group_of_the_job(harness: Harness) -> None:
    """The group has three of four slots in two bundles. No more slots are used, and engines end with the group."""
    offer = placement_group([{"slot": 1}, {"slot": 2}], name="rollout_pool:0")
    assert offer.wait(60)
    deployer = harness.deployer(placement_groups=["rollout*"])
    impatient = harness.deployer(placement_groups=["rollout*"], start_within_s=2.0)
    _, narrow = await running(deployer, STUB.spec(ONE, (0,)))
    assert await free_slots(1)
    await deployer.start(STUB.spec(TWO, (1, 2)))
    with pytest.raises(Retryable, match=naming("offer 3 GPUs", "[3]")):
        await impatient.start(STUB.spec(EngineId("e-three"), (3,)))
    assert [each.engine for each in await deployer.list_engines()] == [ONE, TWO]
    await deployer.stop(ONE)
    await deployer.stop(TWO)
    _, wide = await running(deployer, STUB.spec(ONE, (0, 1)))  # over both bundles, one slot in each
    assert await free_slots(1)
    assert until_gone(narrow, 0.2)
    remove_placement_group(offer)
    assert until_gone(wide)
    await until(deployer, ONE, EngineLife.ENDED)
    with pytest.raises(Retryable, match=naming("no placement group that matches rollout*")):
        await impatient.start(STUB.spec(TWO, (2,)))
    await deployer.stop(ONE)
    assert left_in_ray() == []


async def test_start_in_a_used_placement_group_times_out(harness: Harness) -> None:
    offer = placement_group([{"slot": 1}], name="rollout")
    sleeper = ray.remote(num_cpus=0, resources={"slot": 1})(lambda: time.sleep(60))
    call = sleeper.options(scheduling_strategy=PlacementGroupSchedulingStrategy(offer)).remote()
    deployer = harness.deployer(placement_groups=["rollout"], start_within_s=3.0)
    with pytest.raises(Retryable, match=naming("bundle 0")):
        await deployer.start(STUB.spec(ONE))
    assert left_in_ray() == []
    ray.cancel(call, force=True)
    remove_placement_group(offer)


@pytest.fixture
def second(nodes: RayNodes) -> Iterator[int]:
    """Start a second node."""
    node = nodes.start_node("127.0.0.2", '{"slot": 2}')
    yield node
    nodes.kill(node)
    while any(each["Alive"] and each["NodeManagerAddress"] == "127.0.0.2" for each in ray.nodes()):
        time.sleep(0.1)


async def test_an_engine_over_two_nodes_and_one_of_them_is_lost(harness: Harness, nodes: RayNodes, second: int) -> None:
    launch = replace(harness.launch, nodes=(nodes.head_ip, "127.0.0.2"), per_node=2, host="0.0.0.0")
    launch = replace(launch, device=EngineDevice.CUDA)
    deployer = harness.deployer(launch, answer_within_s=5.0)
    spec = EngineSpec(ONE, ConfigurationId("wide"), Parallelism(tp=2, pp=2), tuple(map(GpuId, range(4))))
    _, pid = await running(deployer, spec)
    assert environment_of(pid)["CUDA_VISIBLE_DEVICES"] == "0,1"  # without Ray's GPU resource: as in the plan
    table = next(
        t for t in placement_group_table().values() if t["name"] == f"{NAMESPACE}/{ONE}" and t["state"] == "CREATED"
    )
    assert table["strategy"] == "STRICT_SPREAD"
    assert [sorted(bundle) for bundle in table["bundles"].values()] == [
        [f"node:{ip}", "slot"] for ip in (nodes.head_ip, "127.0.0.2")
    ]
    far = STUB.spec(TWO, (2,))
    with pytest.raises(Permanent, match=naming(ONE)):
        await deployer.start(far)
    nodes.kill(second)
    lost = await until(deployer, ONE, EngineLife.UNKNOWN)
    # The actor does not respond for some time before Ray declares the node dead.
    async with asyncio.timeout(DEADLINE_S):
        while "Ray has lost node 127.0.0.2" not in lost.detail:
            assert lost.life is EngineLife.UNKNOWN, lost.detail
            await asyncio.sleep(0.1)
            lost = await until(deployer, ONE, EngineLife.UNKNOWN)
    await deployer.stop(ONE)
    assert until_gone(pid, 1.0)
    with pytest.raises(Retryable, match=naming("no node 127.0.0.2")):
        await deployer.start(far)
    assert left_in_ray() == []


# --- Ray


async def test_hanging_driver_is_replaced(harness: Harness) -> None:
    deployer = harness.deployer(answer_within_s=1.0)
    _, pid = await running(deployer, STUB.spec(ONE))
    process = deployer._driver._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    found = await deployer.status(ONE)
    assert found is not None
    assert found.life is EngineLife.UNKNOWN
    assert (await deployer.list_engines())[0].life is EngineLife.ALIVE
    assert await pid_at(found.url) == pid


async def test_missing_cluster_is_not_started(harness: Harness) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    deployer = harness.deployer(address=address, connect_within_s=3.0)
    began_s = time.monotonic()
    with pytest.raises(Retryable, match=naming("Ray")):
        await deployer.start(STUB.spec(ONE))
    assert time.monotonic() - began_s < 30


def test_all_errors_of_options_are_reported_at_once(tmp_path: Path) -> None:
    options = {"per_gpu": {"GPU": 0.5}, "grace_s": -1, "wrong": 1}
    with pytest.raises(ProblemFaults) as caught:
        RayDeployer(stub_launch(tmp_path), FleetIdentity("f", str(tmp_path)), options, WallClock())
    assert sorted(fault.partition(":")[0] for fault in caught.value.faults) == [
        "options.grace_s",
        "options.per_gpu",
        "options.wrong",
    ]


async def test_node_without_address_is_rejected(harness: Harness) -> None:
    deployer = harness.deployer(nodes=["10.0.0.1"])
    deployer.check(STUB.spec(ONE, (7,)))
    with pytest.raises(Permanent, match=naming("node 1", "10.0.0.1")):
        deployer.check(STUB.spec(ONE, (8,)))


async def test_missing_python_is_reported(harness: Harness) -> None:
    with pytest.raises(Permanent, match=naming("/nowhere/python")):
        await harness.deployer(python="/nowhere/python").start(STUB.spec(ONE))
