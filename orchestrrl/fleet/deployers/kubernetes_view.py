"""What is there of a fleet in its cluster: its workloads with their pods, and whether nodes answer.

Everybody who asks at the same time is answered by the same listing: a redeployment looks at hundreds of engines twice a
second, and an API server serves others too.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence

from orchestrrl.core.clock import Clock
from orchestrrl.fleet.deployers.kubernetes_api import KubernetesApi, ResourceNotFound
from orchestrrl.fleet.deployers.kubernetes_objects import ENGINE, LWS, Object, selector

Found = tuple[Object | None, list[Object]]  # an engine's workload, and its pods


def workloads_path(namespace: str, over_nodes: bool) -> str:
    group, kind = (LWS, "leaderworkersets") if over_nodes else ("apps/v1", "deployments")
    return f"/apis/{group}/namespaces/{namespace}/{kind}"


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


class FleetView:
    """Of one fleet. `nodes_known_s`: how long what was heard of a node is believed, which should be far below the 40 s
    after which Kubernetes itself takes it for lost; None: nodes are not looked at."""

    def __init__(
        self, api: KubernetesApi, namespace: str, fleet: str, nodes_known_s: float | None, clock: Clock
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._fleet = fleet
        self._nodes_known_s = nodes_known_s
        self._clock = clock
        self._under_way: asyncio.Task[dict[str, Found]] | None = None
        self._next: asyncio.Task[dict[str, Found]] | None = None
        self._nodes: dict[str, tuple[float, bool]] = {}  # when it was asked for, whether it answers

    async def find(self, name: str) -> Found:
        """The engine whose objects have this name."""
        return (await self.all()).get(name, (None, []))

    async def all(self) -> dict[str, Found]:
        """By name, as they were at some moment since the call. A pod may be there without its workload."""
        if self._next is None:
            self._next = asyncio.create_task(self._list_after(self._under_way))
            self._next.add_done_callback(_retrieve_exception)
        return dict(await asyncio.shield(self._next))

    async def answering(self, pods: Sequence[Object]) -> dict[str, bool]:
        """The nodes of these pods, and whether each answers."""
        if self._nodes_known_s is None:
            return {}
        names = sorted({pod["spec"].get("nodeName", "") for pod in pods} - {""})
        since_s = self._clock.now_s() - self._nodes_known_s
        unknown = [name for name in names if name not in self._nodes or self._nodes[name][0] < since_s]
        asked_s = self._clock.now_s()
        answers = await asyncio.gather(*map(self._node_answers, unknown))
        self._nodes |= {name: (asked_s, answer) for name, answer in zip(unknown, answers, strict=True)}
        return {name: self._nodes[name][1] for name in names}

    async def close(self) -> None:
        tasks = [task for task in (self._under_way, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._under_way = self._next = None

    async def _list_after(self, before: asyncio.Task[dict[str, Found]] | None) -> dict[str, Found]:
        if before is not None:
            await asyncio.wait([before])
        # Who asks from here on needs another one: what this one sees may be older than their question.
        self._under_way, self._next = self._next, None
        return await self._list()

    async def _list(self) -> dict[str, Found]:
        """Workloads are read first: a pod that is made in between has its workload, one that is removed was none."""
        query = {"labelSelector": selector(self._fleet)}
        made: list[Object] = (await self._api.get(workloads_path(self._namespace, over_nodes=False), query))["items"]
        for each in made:
            each.setdefault("apiVersion", "apps/v1")  # items of a list leave it out
        with contextlib.suppress(ResourceNotFound):  # LeaderWorkerSet is not installed
            made += (await self._api.get(workloads_path(self._namespace, over_nodes=True), query))["items"]
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


def _retrieve_exception(task: asyncio.Task[dict[str, Found]]) -> None:
    """Everybody who waited for it may have been cancelled: then nobody is left to hear of its failure."""
    if not task.cancelled():
        task.exception()
