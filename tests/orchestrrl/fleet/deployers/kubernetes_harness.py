"""A cluster of three nodes with an API server, and deployers that use it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kubernetes_cluster import NAMESPACE, Cluster
from kubernetes_server import Server

from orchestrrl.core.clock import WallClock
from orchestrrl.fleet.deployers.base import FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch
from orchestrrl.fleet.deployers.conformance import stub_launch
from orchestrrl.fleet.deployers.kubernetes import KubernetesDeployer

# Shorter than on a real cluster.
OPTIONS: Mapping[str, Any] = {
    "image": "engine:1",
    "namespace": NAMESPACE,
    "grace_s": 1,
    "poll_s": 0.02,
    "schedule_within_s": 0.3,
    "stop_within_s": 1.0,
    "request_timeout_s": 1.0,
}


class Harness:
    """A cluster with deployers. `deployer` creates one for a fleet; all are closed at the end."""

    def __init__(self, cluster: Cluster, server: Server, folder: Path) -> None:
        self.cluster = cluster
        self.server = server
        self.folder = folder
        self.launch = stub_launch(folder, 8100)
        self._made: list[KubernetesDeployer] = []

    def deployer(self, fleet: str = "f", launch: EngineLaunch | None = None, **options: Any) -> KubernetesDeployer:
        given = {**OPTIONS, "kubeconfig": self.server.kubeconfig(self.folder), **options}
        made = KubernetesDeployer(launch or self.launch, FleetIdentity(fleet, str(self.folder)), given, WallClock())
        self._made.append(made)
        return made

    async def close(self) -> None:
        for made in self._made:
            await made.close()


def pods(place: Harness) -> list[dict[str, Any]]:
    return place.cluster.store.all("pods")


def empty(place: Harness) -> bool:
    return not any(place.cluster.store.all(kind) for kind in ("deployments", "replicasets", "leaderworkersets", "pods"))


@asynccontextmanager
async def harness(folder: Path, nodes: Mapping[str, int] | None = None) -> AsyncIterator[Harness]:
    cluster = Cluster(folder / "pods", nodes or {"node-a": 4, "node-b": 4, "node-c": 4})
    server = Server(cluster)
    await cluster.begin()
    await server.begin()
    made = Harness(cluster, server, folder)
    try:
        yield made
    finally:
        await made.close()
        await server.end()
        await cluster.end()
