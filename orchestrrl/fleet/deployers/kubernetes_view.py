"""Read a fleet's objects in its cluster, and derive an engine's state from its workload, its pods and their nodes.

A failure that Kubernetes would repair is treated as the end of the engine. The requests and weights of the old process
are lost, and only the daemon can determine which weights a new process needs. States and reasons are those of the pod
lifecycle (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/).
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.deployers.kubernetes_api import KubernetesApi, ResourceNotFound
from orchestrrl.fleet.deployers.kubernetes_objects import ENGINE, LWS, PODS, Object, annotation, selector

# A container that waits for one of these reasons is not expected to start without help.
_HOPELESS = {
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The location of a container's last log lines."""

    pod: str
    container: str
    previous: bool  # of the previous run: Kubernetes has restarted the container
    message: str  # the part that its status keeps


@dataclass(frozen=True, slots=True)
class WorkloadReading:
    """The state of one engine. `running` is True if all of its containers run; otherwise, `detail` gives the reason.
    `no_room` is True if no node has enough resources for one of its pods."""

    life: EngineLife
    detail: str = ""
    running: bool = False
    no_room: bool = False
    address: str = ""  # of the pod that serves requests
    log: LogPlace | None = None


def read_life(made: Object | None, pods: Sequence[Object], answering: Mapping[str, bool]) -> WorkloadReading:
    """Return the state of an engine. `made` is its workload, or None if the workload is gone. `answering` maps the name
    of each pod's node to whether the node answers."""
    mine = list(pods) if made is None else let_through(made, pods)
    # The pod with the first name is a group's leader.
    leader = min(mine, key=lambda pod: (len(pod["metadata"]["name"]), pod["metadata"]["name"]), default={})
    address = leader.get("status", {}).get("podIP", "")
    if (end := next(_ends(made, pods, mine, answering), None)) is not None:
        return replace(end, address=address)
    if made is not None and not mine:
        return WorkloadReading(
            EngineLife.ALIVE, cannot_be_made(made) or "its start was interrupted: none of its processes runs"
        )
    waits = next(_waiting(mine), "" if address else "has no address yet")
    return WorkloadReading(EngineLife.ALIVE, waits, running=not waits, no_room=_without_room(mine), address=address)


def uids(made: Object) -> list[str]:
    """Return the uids of the pods whose scheduling gates were opened."""
    return annotation(made, PODS).split()


def let_through(made: Object, pods: Iterable[Object]) -> list[Object]:
    admitted = uids(made)
    return [pod for pod in pods if pod["metadata"]["uid"] in admitted]


def deleting(made: Object) -> bool:
    return "deletionTimestamp" in made["metadata"]


def gates(pod: Object) -> list[Object]:
    return list(pod["spec"].get("schedulingGates") or [])


def cannot_be_made(made: Object) -> str:
    """Return the reason why Kubernetes refuses to create the pods of a workload, e.g. a quota or a policy. Return an
    empty string if Kubernetes does not refuse."""
    for condition in made.get("status", {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return f"its pod is refused: {condition.get('message', condition.get('reason', ''))}"
    return ""


def _node(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _ends(
    made: Object | None, pods: Sequence[Object], mine: Sequence[Object], answering: Mapping[str, bool]
) -> Iterator[WorkloadReading]:
    """Yield a reading for each reason why the engine can no longer serve, the most important reason first."""
    lost = sorted(node for pod in pods if (node := _node(pod)) and not answering.get(node, True))
    if lost:
        yield WorkloadReading(EngineLife.UNKNOWN, f"node {', '.join(lost)} does not answer")
    if made is None:
        yield WorkloadReading(EngineLife.ENDED, "its workload was deleted, its pods still exist")
    elif deleting(made):
        yield WorkloadReading(EngineLife.ENDED, "is being removed")
    elif len(mine) < len(uids(made)):
        why = "Kubernetes removed its pod: evicted, preempted, drained, or deleted by a user"
        yield WorkloadReading(EngineLife.ENDED, why)
    for pod in mine:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for container in _containers(status):
            what = f"container {container['name']} of pod {name}"
            state, before = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
            terminated, waiting = before or state.get("terminated"), state.get("waiting") or {}
            if terminated is not None or container.get("restartCount", 0) > 0:
                facts = terminated or {}
                how = f"{facts.get('reason', 'ended')}, exit status {facts.get('exitCode', 'unknown')}"
                log = LogPlace(name, container["name"], before is not None, facts.get("message", ""))
                yield WorkloadReading(EngineLife.ENDED, f"{what} has ended: {how}", log=log)
            if waiting.get("reason") in _HOPELESS:
                why = f"{waiting['reason']}: {waiting.get('message', '')}"
                yield WorkloadReading(EngineLife.ENDED, f"{what} cannot start: {why}")
        if status.get("phase") in ("Failed", "Succeeded"):
            why = status.get("message") or status.get("reason") or "no reason given"
            yield WorkloadReading(EngineLife.ENDED, f"pod {name} has {status['phase'].lower()}: {why}")
        if deleting(pod):
            why = "evicted, preempted, drained, or deleted by a user"
            yield WorkloadReading(EngineLife.ENDED, f"pod {name} is being removed: {why}")


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the status of each container and of each init container that has not succeeded. Init containers that have
    succeeded are left out, because they are expected to end."""
    first = [
        each
        for each in status.get("initContainerStatuses") or []
        if ((each.get("state") or {}).get("terminated") or {"exitCode": 1})["exitCode"] != 0
    ]
    return [*first, *(status.get("containerStatuses") or [])]


def _waiting(pods: Iterable[Object]) -> Iterator[str]:
    """Yield the reasons why the containers of the pods do not run yet."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for condition in status.get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                yield f"pod {name} is not scheduled: {condition.get('message') or condition.get('reason', '')}"
        found = status.get("containerStatuses") or []
        for container in found:
            waiting = (container.get("state") or {}).get("waiting")
            if waiting is not None:
                why = f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
                yield f"container {container['name']} of pod {name} waits: {why}"
        if not found:
            yield f"pod {name} is {status.get('phase', 'Pending').lower()}"


def _without_room(pods: Iterable[Object]) -> bool:
    return any(
        condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for pod in pods
        for condition in pod.get("status", {}).get("conditions") or []
    )


Found = tuple[Object | None, list[Object]]  # an engine's workload, and its pods


def workloads_path(namespace: str, api_version: str) -> str:
    kind = "leaderworkersets" if api_version == LWS else "deployments"
    return f"/apis/{api_version}/namespaces/{namespace}/{kind}"


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@dataclass(slots=True, eq=False)
class FleetView:
    """Reads the objects of one fleet. `nodes_known_s` is the time, in seconds, for which the state of a node is cached.
    It should be far below the 40 s after which Kubernetes marks a node as lost. If it is None, nodes are not read."""

    _api: KubernetesApi
    _namespace: str
    _fleet: str
    _nodes_known_s: float | None
    _clock: Clock
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lists_begun: int = 0
    # The number of the latest listing, and its result or error.
    _listed: tuple[int, dict[str, Found] | OrchestrRLError] = (0, {})
    _nodes: dict[str, tuple[float, bool]] = field(default_factory=dict)  # when each was read, and whether it answers

    async def find(self, name: str) -> Found:
        """Return the workload with this name and its pods. The workload is None if it does not exist."""
        return (await self.all()).get(name, (None, []))

    async def all(self) -> dict[str, Found]:
        """Return each workload and its pods, keyed by the workload's name, from a listing that began after this call.
        Pods may exist without their workload."""
        begun = self._lists_begun
        async with self._listing:
            if self._listed[0] <= begun:  # otherwise another caller has listed them since this call
                number = self._lists_begun = self._lists_begun + 1
                try:
                    self._listed = number, await self._list()
                except OrchestrRLError as error:
                    self._listed = number, error
            found = self._listed[1]
        if isinstance(found, OrchestrRLError):
            raise found
        return dict(found)

    async def answering(self, pods: Sequence[Object]) -> dict[str, bool]:
        """Return a mapping from the name of each pod's node to whether the node answers. It is empty if nodes are not
        read."""
        if self._nodes_known_s is None:
            return {}
        names = sorted(set(map(_node, pods)) - {""})
        since_s = self._clock.now_s() - self._nodes_known_s
        unknown = [name for name in names if name not in self._nodes or self._nodes[name][0] < since_s]
        asked_s = self._clock.now_s()
        answers = await asyncio.gather(*map(self._node_answers, unknown))
        self._nodes |= {name: (asked_s, answer) for name, answer in zip(unknown, answers, strict=True)}
        return {name: self._nodes[name][1] for name in names}

    async def _list(self) -> dict[str, Found]:
        """List workloads, then pods, so that the result includes pods that a listed workload creates in between."""
        query = {"labelSelector": selector(self._fleet)}
        made: list[Object] = (await self._api.get(workloads_path(self._namespace, "apps/v1"), query))["items"]
        for each in made:
            each.setdefault("apiVersion", "apps/v1")  # items of a list leave it out
        with contextlib.suppress(ResourceNotFound):  # LeaderWorkerSet is not installed
            made += (await self._api.get(workloads_path(self._namespace, LWS), query))["items"]
        pods: dict[str, list[Object]] = defaultdict(list)
        for pod in (await self._api.get(pods_path(self._namespace), query))["items"]:
            pods[pod["metadata"]["labels"][ENGINE]].append(pod)
        by_name: dict[str, Object] = {each["metadata"]["labels"][ENGINE]: each for each in made}
        return {name: (by_name.get(name), pods.get(name, [])) for name in {**by_name, **pods}}

    async def _node_answers(self, name: str) -> bool:
        try:
            node = await self._api.get(f"/api/v1/nodes/{name}")
        except ResourceNotFound:
            return False
        conditions = node.get("status", {}).get("conditions") or []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
