"""Tests of an engine's state, as derived from Kubernetes' documentation of pods:

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodStatus
"""

from typing import Any

import pytest

from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.deployers.kubernetes_objects import PODS
from orchestrrl.fleet.deployers.kubernetes_view import LogPlace, cannot_be_made, read_life

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
TERMINATED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "last words"}}


def workload(*uids: str, size: int = 1, **metadata: Any) -> dict[str, Any]:
    spec = {} if size == 1 else {"leaderWorkerTemplate": {"size": size}}
    return {"metadata": {"name": "orl", "annotations": {PODS: " ".join(uids)}, **metadata}, "spec": spec}


def container(state: dict[str, Any], restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": "engine", "state": state, "restartCount": restarts, "lastState": last or {}}


def pod(uid: str = "u", *containers: dict[str, Any], phase: str = "Running", **status: Any) -> dict[str, Any]:
    found = {"phase": phase, "podIP": f"ip-{uid}", "containerStatuses": list(containers), **status}
    return {"metadata": {"name": f"pod-{uid}", "uid": uid}, "spec": {"nodeName": f"node-{uid}"}, "status": found}


def waiting(reason: str) -> dict[str, Any]:
    return container({"waiting": {"reason": reason, "message": "why"}})


def test_engine_runs_once_all_containers_run() -> None:
    assert read_life(workload("u"), [pod("u", container(RUNNING))], {}).running
    two = [pod("u", container(RUNNING)), pod("v", waiting("ContainerCreating"), phase="Pending")]
    read = read_life(workload("u", "v", size=2), two, {})
    assert (read.life, read.running, read.address) == (EngineLife.ALIVE, False, "ip-u")
    assert "ContainerCreating" in read.detail


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", "ErrImagePull"])
def test_pending_states_keep_the_engine_alive(reason: str) -> None:
    read = read_life(workload("u"), [pod("u", waiting(reason), phase="Pending")], {})
    assert (read.life, read.running) == (EngineLife.ALIVE, False)
    assert reason in read.detail


@pytest.mark.parametrize(
    "reason", ["CrashLoopBackOff", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"]
)
def test_hopeless_waiting_reasons_end_the_engine(reason: str) -> None:
    read = read_life(workload("u"), [pod("u", waiting(reason), phase="Pending")], {})
    assert read.life is EngineLife.ENDED
    assert reason in read.detail


def test_exit_ends_the_engine_with_the_log_of_that_run() -> None:
    now = read_life(workload("u"), [pod("u", container(TERMINATED))], {})
    assert (now.life, now.log) == (EngineLife.ENDED, LogPlace("pod-u", "engine", False, "last words"))
    again = read_life(workload("u"), [pod("u", container(RUNNING, 1, TERMINATED))], {})
    assert (again.life, again.log) == (EngineLife.ENDED, LogPlace("pod-u", "engine", True, "last words"))
    assert "exit status 1" in again.detail


def test_only_a_failed_init_container_ends_the_engine() -> None:
    done = {"name": "fetch", "state": {"terminated": {"exitCode": 0}}, "restartCount": 0, "lastState": {}}
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 2}}, "restartCount": 0, "lastState": {}}
    assert read_life(workload("u"), [pod("u", container(RUNNING), initContainerStatuses=[done])], {}).running
    held = pod("u", waiting("PodInitializing"), phase="Pending", initContainerStatuses=[failed])
    assert read_life(workload("u"), [held], {}).life is EngineLife.ENDED


def test_evicted_pod_ends_the_engine() -> None:
    read = read_life(workload("u"), [pod("u", phase="Failed", reason="Evicted", message="low on memory")], {})
    assert read.life is EngineLife.ENDED
    assert "low on memory" in read.detail


def test_replacement_pod_is_not_the_engine() -> None:
    read = read_life(workload("u"), [pod("v", container(RUNNING))], {})
    assert (read.life, read.address, read.running) == (EngineLife.ENDED, "", False)


def test_unreachable_node_takes_precedence() -> None:
    ended = pod("u", container(TERMINATED))
    going = workload("u", deletionTimestamp="2026-01-01T00:00:00Z")
    for made in (workload("u"), going, None):
        read = read_life(made, [ended], {"node-u": False})
        assert read.life is EngineLife.UNKNOWN
        assert "node-u" in read.detail


def test_workload_being_deleted_is_ended() -> None:
    going = workload("u", deletionTimestamp="2026-01-01T00:00:00Z")
    assert read_life(going, [pod("u", container(RUNNING))], {}).life is EngineLife.ENDED
    assert read_life(None, [pod("u", container(RUNNING))], {}).life is EngineLife.ENDED


def test_engine_without_opened_gates_has_no_process() -> None:
    gated = pod("u", phase="Pending")
    del gated["spec"]["nodeName"]
    for pods in ([], [gated]):
        read = read_life(workload(), pods, {})
        assert (read.life, read.running, read.address) == (EngineLife.ALIVE, False, "")
        assert "interrupted" in read.detail


def test_unschedulable_pod_is_reported_as_no_room() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    read = read_life(workload("u"), [pod("u", phase="Pending", conditions=[condition])], {})
    assert (read.life, read.no_room) == (EngineLife.ALIVE, True)
    assert "0/3 nodes" in read.detail


def test_refused_pod_is_reported() -> None:
    made = workload()
    made["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}]}
    assert "violates PodSecurity" in cannot_be_made(made)
    assert "violates PodSecurity" in read_life(made, [], {}).detail
