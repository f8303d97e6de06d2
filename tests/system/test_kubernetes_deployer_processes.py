"""Failures in a cluster and the deployer's handling of them, against the API server and the small cluster of these
tests, through the official client."""

import asyncio
import copy
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes_harness import Harness, empty, pods
from kubernetes_server import Trouble

from orchestrrl.core.config.launch import EngineDevice, EngineProduct
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import connect_managed
from orchestrrl.fleet.deployers import kubernetes_api
from orchestrrl.fleet.deployers.base import DeployedInstance, Deployer, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.conformance import LAST_WORDS, EngineBehaviour, until
from orchestrrl.fleet.deployers.kubernetes_objects import GATE
from planner.model import EngineId, Parallelism
from tests.orchestrrl.fleet.deployers.test_kubernetes_deployer import ONE, TWO, place, spec


async def pid_at(url: str) -> int:
    """Return the process id that the stub reports when it responds."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    return int(await response.text())
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)


async def nobody_at(url: str) -> bool:
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url):
                return False
        except aiohttp.ClientError:
            return True


async def test_pods_get_their_gpus_on_the_planned_node(place: Harness) -> None:
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=4)
    deployer = place.deployer(launch=launch, nodes=["node-c", "node-a", "node-b"])
    first = await deployer.start(spec(ONE, (0, 1, 2, 3)))
    second = await deployer.start(spec(TWO, (5, 6)))
    where = {pod["metadata"]["annotations"]["orchestrrl/engine-id"]: pod["spec"]["nodeName"] for pod in pods(place)}
    assert where == {ONE: "node-c", TWO: "node-a"}
    assert [each.gpus for each in (first, second)] == [(0, 1, 2, 3), (5, 6)]
    for pod in pods(place):
        (container,) = pod["spec"]["containers"]
        assert "CUDA_VISIBLE_DEVICES" not in {each["name"] for each in container["env"]}


async def test_multi_node_engine_is_a_group_with_a_serving_leader(place: Harness) -> None:
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=2, nodes=("unused",) * 3)
    deployer = place.deployer(launch=launch, nodes=["node-a", "node-b", "node-c"])
    wanted = spec(ONE, (0, 1, 2, 3, 4, 5), Parallelism(tp=2, pp=3))
    started = await deployer.start(wanted)
    assert started.life is EngineLife.ALIVE
    leader, *workers = pods(place)
    assert started.url == f"http://{leader['status']['podIP']}:8100"
    await pid_at(started.url)
    assert sorted(pod["spec"]["nodeName"] for pod in (leader, *workers)) == ["node-a", "node-b", "node-c"]
    assert leader["spec"]["nodeName"] == "node-a"
    for rank, pod in enumerate((leader, *workers)):
        process = await argv_of(place, pod)
        at = {flag: process[process.index(flag) + 1] for flag in ("--node-rank", "--nnodes", "--master-addr")}
        assert at == {"--node-rank": str(rank), "--nnodes": "3", "--master-addr": leader["status"]["podIP"]}
        assert ("--headless" in process) == (rank > 0)
    assert (await place.deployer(launch=launch).list_engines()) == (started,)
    await deployer.stop(ONE)
    assert empty(place)


async def argv_of(place: Harness, pod: dict[str, Any]) -> list[str]:
    """Return the command line of the process after the shell has executed the engine."""
    status = pod["status"]["containerStatuses"][0]
    async with asyncio.timeout(60):
        while True:
            words = place.cluster.log(pod, status["name"], previous=False).split()
            if words:
                return Path(f"/proc/{words[2]}/cmdline").read_text().split("\0")
            await asyncio.sleep(0.02)


async def test_engine_ends_when_one_process_of_its_group_ends(place: Harness) -> None:
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=2, nodes=("unused",) * 2)
    deployer = place.deployer(launch=launch)
    started = await deployer.start(spec(ONE, (0, 1, 2, 3), Parallelism(tp=2, pp=2)))
    worker = pods(place)[1]
    process = await argv_pid(place, worker)
    os.kill(process, signal.SIGKILL)
    ended = await until(deployer, ONE, EngineLife.ENDED)
    assert worker["metadata"]["name"] in ended.detail
    assert ended.url == started.url
    await deployer.stop(ONE)
    assert empty(place)


async def argv_pid(place: Harness, pod: dict[str, Any]) -> int:
    await argv_of(place, pod)
    return int(place.cluster.log(pod, "engine", previous=False).split()[2])


async def test_missing_leader_worker_set_is_reported_with_advice(place: Harness) -> None:
    place.cluster.groups_installed = False
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=2, nodes=("unused",) * 2)
    deployer = place.deployer(launch=launch)
    with pytest.raises(Permanent, match=r"needs LeaderWorkerSet.*installation"):
        await deployer.start(spec(ONE, (0, 1, 2, 3), Parallelism(tp=2, pp=2)))
    assert await deployer.list_engines() == ()
    await deployer.start(spec(TWO, (0, 1)))
    assert [each.engine for each in await deployer.list_engines()] == [TWO]


async def test_afd_engine_is_one_pod_with_two_containers(place: Harness) -> None:
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=4)
    deployer = place.deployer(launch=launch)
    layout = Parallelism(tp=1, attention_gpus=2, ffn_gpus=2)
    started = await deployer.start(spec(ONE, (0, 1, 2, 3), layout))
    (pod,) = pods(place)
    limits = [each["resources"]["limits"] for each in pod["spec"]["containers"]]
    assert limits == [{"nvidia.com/gpu": "2"}, {"nvidia.com/gpu": "2"}]
    await pid_at(started.url)
    await deployer.stop(ONE)


async def test_engine_in_a_pod_generates_tokens_and_reports_its_layout(place: Harness) -> None:
    launch = EngineLaunch(python=sys.executable, engine=EngineProduct.SIMULATED, model="tiny", per_node=4)
    deployer = place.deployer(launch=launch)
    started = await deployer.start(replace(spec(), environment={}))
    client = connect_managed("simulated", started.url)
    try:
        async with asyncio.timeout(60):
            while not await client.healthy():
                await asyncio.sleep(0.05)
            await client.probe()
            assert (await client.layout()).tp == 2
    finally:
        await client.close()
    await deployer.stop(ONE)
    assert empty(place)


async def test_concurrent_status_calls_share_one_listing(place: Harness) -> None:
    deployer = place.deployer()
    await asyncio.gather(*(deployer.start(spec(EngineId(f"e{n}"), (n,))) for n in range(4)))
    begun = len(place.server.asked)
    found = await asyncio.gather(*(deployer.status(EngineId(f"e{n % 4}")) for n in range(100)))
    assert [each is not None and each.engine for each in found] == [f"e{n % 4}" for n in range(100)]
    # Three list requests, and one or two for nodes.
    assert len(place.server.asked) - begun <= 3 + 3
    await asyncio.gather(*(deployer.stop(EngineId(f"e{n}")) for n in range(4)))
    assert empty(place)


async def test_killed_engine_is_not_restarted(place: Harness) -> None:
    deployer = place.deployer()
    started = await deployer.start(spec())
    os.kill(await pid_at(started.url), signal.SIGKILL)
    ended = await until(deployer, ONE, EngineLife.ENDED)
    assert "exit status 137" in ended.detail
    async with asyncio.timeout(60):
        while "is not started again" not in place.cluster.log(pods(place)[0], "engine", previous=False):
            await asyncio.sleep(0.02)
    # Kubernetes has restarted the container; no engine runs in it, and the log is still that of the engine.
    (status,) = pods(place)[0]["status"]["containerStatuses"]
    assert status["restartCount"] == 1
    assert "running" in status["state"]
    assert await nobody_at(started.url)
    ended = await until(deployer, ONE, EngineLife.ENDED)
    assert "the stub" in ended.detail
    await deployer.stop(ONE)
    assert empty(place)


async def test_replacement_of_an_evicted_pod_never_runs(place: Harness) -> None:
    deployer = place.deployer()
    started = await deployer.start(spec())
    await pid_at(started.url)
    (first,) = pods(place)
    place.cluster.evict(first["metadata"]["name"])
    ended = await until(deployer, ONE, EngineLife.ENDED)
    assert "evicted" in ended.detail
    async with asyncio.timeout(60):
        while place.cluster.store.there("pods", first):
            await asyncio.sleep(0.02)
    (second,) = pods(place)
    await deployer.start(spec())
    assert second["spec"]["schedulingGates"] == [{"name": GATE}]
    assert "nodeName" not in second["spec"]
    assert (await until(deployer, ONE, EngineLife.ENDED)).gpus == (0, 1)
    await deployer.stop(ONE)
    assert empty(place)


async def test_stop_on_a_lost_node_is_unknown_until_it_returns(place: Harness) -> None:
    deployer = place.deployer(launch=replace(place.launch, per_node=4), nodes=["node-b"])
    started = await deployer.start(spec())
    await pid_at(started.url)
    place.cluster.lose_node("node-b")
    found = await until(deployer, ONE, EngineLife.UNKNOWN)
    assert "node-b does not answer" in found.detail
    assert found.gpus == (0, 1)
    with pytest.raises(OutcomeUnknown, match="node-b does not answer"):
        await deployer.stop(ONE)
    with pytest.raises(Permanent, match=ONE):
        await deployer.start(spec(TWO, (1,)))
    with pytest.raises(Retryable, match="still being removed"):
        await deployer.start(spec())
    place.cluster.find_node("node-b")
    await deployer.stop(ONE)
    assert empty(place)
    assert await nobody_at(started.url)


async def test_missing_program_ends_the_engine_with_the_shell_error(place: Harness) -> None:
    deployer = place.deployer(launch=replace(place.launch, python="/no/such/python"))
    await deployer.start(spec())
    assert "/no/such/python" in (await until(deployer, ONE, EngineLife.ENDED)).detail


async def test_exceeded_quota_is_retryable(place: Harness) -> None:
    place.cluster.pod_quota = 0
    deployer = place.deployer()
    with pytest.raises(Retryable, match="exceeded quota"):
        await deployer.start(spec())
    assert empty(place)
    place.cluster.pod_quota = None
    assert (await deployer.start(spec())).life is EngineLife.ALIVE


async def test_two_daemons_never_share_a_gpu(place: Harness) -> None:
    """Two daemons must not manage one fleet; if they do, no GPU serves two engines."""
    deployers = [place.deployer(), place.deployer()]

    async def start(number: int, after_s: float) -> DeployedInstance:
        await asyncio.sleep(after_s)
        return await deployers[number].start((spec(ONE, (0, 1)), spec(TWO, (1, 2)))[number])

    for ahead_ms in (0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16):
        starts = (start(0, max(0, ahead_ms) / 1000), start(1, max(0, -ahead_ms) / 1000))
        results = await asyncio.gather(*starts, return_exceptions=True)
        started = [each for each in results if isinstance(each, DeployedInstance)]
        assert len(started) <= 1
        assert all(isinstance(each, DeployedInstance | Permanent) for each in results), results
        assert [each.engine for each in await deployers[0].list_engines()] == [each.engine for each in started]
        for each in started:
            await deployers[0].stop(each.engine)
        assert empty(place)


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.STALLED, Trouble.BROKEN])
async def test_write_without_response_is_unknown_until_status_is_read(place: Harness, trouble: Trouble) -> None:
    deployer = place.deployer()
    place.server.trouble("POST", "deployments", trouble)
    with pytest.raises(OutcomeUnknown):
        await deployer.start(spec())
    found = await deployer.status(ONE)
    assert found is not None
    assert found.spec == spec()
    assert (await deployer.start(spec())).life is EngineLife.ALIVE
    place.server.trouble("DELETE", "deployments", trouble)
    if trouble is Trouble.LOST:  # aiohttp repeats idempotent requests if a reused connection breaks
        await deployer.stop(ONE)
    else:
        with pytest.raises(OutcomeUnknown):
            await deployer.stop(ONE)
    await deployer.stop(ONE)
    assert empty(place)


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.BROKEN, Trouble.BUSY])
async def test_start_can_be_repeated_and_undone_after_any_failed_request(
    place: Harness, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "READ_AGAIN_S", (0.01, 0.01))
    begun = len(place.server.asked)
    await place.deployer().start(spec())
    asked = place.server.asked[begun:]
    await place.deployer().stop(ONE)
    # Read requests are many and similar: each fails in one of the three ways.
    turn = [Trouble.LOST, Trouble.BROKEN, Trouble.BUSY].index(trouble)
    for broken in [n for n, request in enumerate(asked) if request.method != "GET" or n % 3 == turn]:
        place.server.trouble_after(broken, trouble)
        (result,) = await asyncio.gather(place.deployer().start(spec()), return_exceptions=True)
        assert isinstance(result, DeployedInstance | Retryable | OutcomeUnknown)
        assert empty(place) or not isinstance(result, Retryable), (
            f"request {broken}: no change, but the result was {result}"
        )
        anew = place.deployer()
        listed = await anew.list_engines()
        assert [each.engine for each in listed] in ([], [ONE])
        if broken % 2:
            assert (await anew.start(spec())).life is EngineLife.ALIVE
            assert len(pods(place)) == 1
        await anew.stop(ONE)
        assert empty(place)


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.BROKEN, Trouble.BUSY])
async def test_stop_can_be_repeated_after_any_failed_request(
    place: Harness, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "READ_AGAIN_S", ())
    deployer = place.deployer()
    await deployer.start(spec())
    for broken in range(6):
        place.server.trouble_after(broken, trouble)
        (result,) = await asyncio.gather(deployer.stop(ONE), return_exceptions=True)
        assert result is None or isinstance(result, Retryable | OutcomeUnknown)
        # Nothing happened: the engine exists, and no deletion was requested.
        (found,) = await deployer.list_engines() if isinstance(result, Retryable) else (None,)
        assert found is None or found.life is EngineLife.ALIVE
        await deployer.stop(ONE)
        assert empty(place)
        await deployer.start(spec())


async def test_interrupted_start_is_found_and_completed_or_stopped(place: Harness) -> None:
    for goes_on in (True, False):
        place.server.trouble("PATCH", "deployments", Trouble.BROKEN)
        with pytest.raises(OutcomeUnknown):
            await place.deployer().start(spec())
        anew = place.deployer()
        (found,) = await anew.list_engines()
        assert (found.engine, found.gpus, found.spec) == (ONE, (0, 1), spec())
        with pytest.raises(Permanent, match=ONE):
            await anew.start(spec(TWO, (1,)))
        if goes_on:
            await pid_at((await anew.start(spec())).url)
        await anew.stop(ONE)
        assert empty(place)


async def test_orphaned_pods_are_found_and_removed(place: Harness) -> None:
    deployer = place.deployer()
    await deployer.start(spec())
    (pod,) = pods(place)
    # The state after `kubectl delete --cascade=orphan` of the deployment and of its ReplicaSet.
    for kind in ("deployments", "replicasets"):
        (made,) = place.cluster.store.all(kind)
        place.cluster.store.remove(kind, made["metadata"]["name"])
    pod["metadata"]["ownerReferences"][0]["uid"] = place.cluster.store.get("nodes", "node-a")["metadata"]["uid"]
    (found,) = await place.deployer().list_engines()
    assert (found.engine, found.life, found.gpus, found.spec) == (ONE, EngineLife.ENDED, (0, 1), None)
    with pytest.raises(Permanent, match=ONE):
        await deployer.start(spec(TWO, (1,)))
    await deployer.stop(ONE)
    assert empty(place)


async def life_of_an_engine(deployer: Deployer, wanted: EngineSpec) -> None:
    await deployer.start(wanted)
    await deployer.status(wanted.engine)
    await deployer.list_engines()
    await deployer.stop(wanted.engine)


# Reading an engine of this name that appears during a start; removing pods without their workload.
ONLY_IN_TROUBLE = (("deployments", "get"), ("leaderworkersets", "get"), ("pods", "delete"))


async def test_each_missing_permission_of_the_manifest_is_reported(place: Harness) -> None:
    launch = replace(place.launch, per_node=2, device=EngineDevice.CUDA, nodes=("unused",) * 2)
    lives = [
        spec(ONE, (0, 1), behaviour=EngineBehaviour.EXITS),
        spec(TWO, (0, 1, 2, 3), Parallelism(tp=2, pp=2)),
    ]
    rules = copy.deepcopy(place.server.rules)
    for number, rule in enumerate(rules):
        for verb in rule["verbs"]:
            place.server.rules = copy.deepcopy(rules)
            place.server.rules[number]["verbs"].remove(verb)
            if (rule["resources"][0], verb) in ONLY_IN_TROUBLE:
                continue
            deployer = place.deployer(launch=launch)
            printed = ""
            for wanted in lives:
                try:
                    await life_of_an_engine(deployer, wanted)
                except Permanent as error:
                    printed += str(error)
            (resource,) = rule["resources"]
            if resource != "pods/log":
                assert f'cannot {verb} resource "{resource}"' in printed, (resource, verb)
                assert "deploy/kubernetes/rbac.yaml" in printed
            place.server.rules = rules
            for wanted in lives:
                await deployer.stop(wanted.engine)


async def test_end_without_permission_for_logs_uses_the_pod_status(place: Harness) -> None:
    for rule in place.server.rules:
        if rule["resources"] == ["pods/log"]:
            rule["verbs"] = []
    deployer = place.deployer()
    await deployer.start(spec(behaviour=EngineBehaviour.EXITS))
    ended = await until(deployer, ONE, EngineLife.ENDED)
    assert LAST_WORDS in ended.detail
    assert "its log cannot be read" in ended.detail


async def test_permission_for_nodes_is_optional(place: Harness) -> None:
    place.server.rules = [rule for rule in place.server.rules if rule["resources"] != ["nodes"]]
    await life_of_an_engine(place.deployer(read_nodes=False), spec())
    assert empty(place)
