"""The conformance suite of deployers on Kubernetes: always against the API server and small cluster of these tests,
which run the stub as real processes; and against a real cluster if ORCHESTRRL_TEST_KUBECONFIG is a kubeconfig
(ORCHESTRRL_TEST_NAMESPACE: the namespace; ORCHESTRRL_TEST_IMAGE: any image with python3 and a shell)."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes_harness import Harness, harness

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fleet.deployers.base import Deployer, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch
from orchestrrl.fleet.deployers.conformance import STUB, DeployerConformance
from orchestrrl.fleet.deployers.kubernetes import KubernetesDeployer
from orchestrrl.fleet.deployers.kubernetes_api import KubernetesApi, ResourceNotFound

KUBECONFIG = os.environ.get("ORCHESTRRL_TEST_KUBECONFIG", "")
REAL_NAMESPACE = os.environ.get("ORCHESTRRL_TEST_NAMESPACE", "default")
REAL_IMAGE = os.environ.get("ORCHESTRRL_TEST_IMAGE", "python:3.12-slim")
STUB_MAP = "orchestrrl-conformance-stub"


class TestKubernetes(DeployerConformance):
    @pytest.fixture(autouse=True)
    async def in_harness(self, tmp_path: Path) -> AsyncIterator[None]:
        async with harness(tmp_path) as self.harness:
            yield

    harness: Harness

    async def make_deployer(self, fleet: str) -> Deployer:
        return self.harness.deployer(fleet)


class RealKubernetes(DeployerConformance):
    """A real cluster. Engines are reached through the API server, because their addresses may not be reachable."""

    api: KubernetesApi

    @pytest.fixture(autouse=True)
    async def with_stub(self) -> AsyncIterator[None]:
        self.api = KubernetesApi(KUBECONFIG, None, 30.0)
        maps = f"/api/v1/namespaces/{REAL_NAMESPACE}/configmaps"
        stub = f"#!/usr/bin/env -S python3 -IS\n{STUB}"
        body: dict[str, Any] = {"metadata": {"name": STUB_MAP}, "data": {"stub": stub}}
        try:
            await self.api.patch(f"{maps}/{STUB_MAP}", body)
        except ResourceNotFound:
            await self.api.create(maps, body)
        yield
        await self.api.close()

    async def make_deployer(self, fleet: str) -> Deployer:
        launch = EngineLaunch(python="/stub/stub", model="stub", device=EngineDevice.CPU, first_port=8100)
        options = {
            "image": REAL_IMAGE,
            "namespace": REAL_NAMESPACE,
            "kubeconfig": KUBECONFIG,
            "grace_s": 2,
            "volumes": [{"name": "stub", "configMap": {"name": STUB_MAP, "defaultMode": 0o755}}],
            "volume_mounts": [{"name": "stub", "mountPath": "/stub"}],
            "read_nodes": os.environ.get("ORCHESTRRL_TEST_READ_NODES", "yes") == "yes",
        }
        return KubernetesDeployer(launch, FleetIdentity(fleet, ""), options, WallClock())

    async def answers(self, url: str) -> bool:
        host, _, port = url.removeprefix("http://").rpartition(":")
        pods = f"/api/v1/namespaces/{REAL_NAMESPACE}/pods"
        try:
            everyone = (await self.api.get(pods, {"fieldSelector": f"status.podIP={host}"}))["items"]
            for pod in everyone:
                return bool(await self.api.text(f"{pods}/{pod['metadata']['name']}:{port}/proxy/health", {}))
        except (OrchestrRLError, aiohttp.ClientError):
            pass
        return False


if KUBECONFIG:

    class TestRealKubernetes(RealKubernetes):
        pass

else:

    @pytest.mark.skip(reason="no real cluster: ORCHESTRRL_TEST_KUBECONFIG is not set")
    def test_real_kubernetes() -> None:
        pass
