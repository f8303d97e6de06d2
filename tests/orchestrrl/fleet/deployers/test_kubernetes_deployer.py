"""Tests of failures in a cluster, against the API server and the small cluster of these tests, through the official
client."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from kubernetes_harness import OPTIONS, Harness, empty, harness
from kubernetes_server import Trouble

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import OrchestrRLError, Permanent, Retryable
from orchestrrl.fleet.deployers.base import DEPLOYERS, EngineLife, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.deployers.conformance import BEHAVIOUR, EngineBehaviour
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

ONE, TWO = EngineId("e-one"), EngineId("e-two")


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as made:
        yield made


def spec(
    engine: EngineId = ONE,
    gpus: tuple[int, ...] = (0, 1),
    parallelism: Parallelism | None = None,
    behaviour: EngineBehaviour = EngineBehaviour.SERVES,
) -> EngineSpec:
    return EngineSpec(
        engine=engine,
        configuration=ConfigurationId("some"),
        parallelism=parallelism or Parallelism(tp=len(gpus)),
        gpus=tuple(map(GpuId, gpus)),
        environment={BEHAVIOUR: behaviour.value},
    )


# Placement.


# Ends.


async def test_image_that_cannot_be_pulled_ends_the_engine(place: Harness) -> None:
    deployer = place.deployer(image="missing/image:1")
    started = await deployer.start(spec())
    assert started.life is EngineLife.ENDED
    assert "ImagePullBackOff" in started.detail
    assert "missing/image:1" in started.detail
    await deployer.stop(ONE)
    assert empty(place)


# Resources.


async def test_start_without_resources_leaves_nothing_and_is_retryable(place: Harness) -> None:
    launch = replace(place.launch, device=EngineDevice.CUDA, per_node=8)
    deployer = place.deployer(launch=launch)
    with pytest.raises(Retryable, match=r"not enough resources for engine e-one: .*Insufficient nvidia\.com/gpu"):
        await deployer.start(spec(ONE, tuple(range(5))))
    assert empty(place)
    assert await deployer.status(ONE) is None


# Server failures.


async def test_busy_server_changes_nothing_and_is_retryable(place: Harness) -> None:
    deployer = place.deployer()
    place.server.trouble("POST", "deployments", Trouble.BUSY)
    with pytest.raises(Retryable):
        await deployer.start(spec())
    assert empty(place)
    place.server.trouble("GET", "pods", Trouble.BUSY)
    assert await deployer.list_engines() == ()


async def test_unreachable_server_is_retryable(place: Harness) -> None:
    await place.server.end()
    lost = place.deployer()
    for call in (lost.start(spec()), lost.stop(ONE), lost.status(ONE), lost.list_engines()):
        with pytest.raises(Retryable, match="cannot be reached"):
            await call


# Permissions.


async def test_unknown_token_and_missing_kubeconfig_are_permanent(place: Harness) -> None:
    stranger = place.deployer(kubeconfig=place.server.kubeconfig(place.folder, "stranger"))
    with pytest.raises(Permanent, match="does not accept the credentials"):
        await stranger.list_engines()
    nowhere = place.deployer(kubeconfig=str(place.folder / "none"))
    with pytest.raises(Permanent, match="cannot configure access to Kubernetes"):
        await nowhere.list_engines()
    with pytest.raises(Permanent, match='namespaces "elsewhere" not found'):
        await place.deployer(namespace="elsewhere").start(spec())


async def test_kubernetes_deployer_is_loaded_by_name(place: Harness) -> None:
    options = {**OPTIONS, "kubeconfig": place.server.kubeconfig(place.folder)}
    deployer = DEPLOYERS.load("kubernetes")(place.launch, FleetIdentity("f", ""), options, WallClock())
    try:
        assert await deployer.list_engines() == ()
        with pytest.raises(OrchestrRLError):
            await deployer.lend(ONE, True)
    finally:
        await deployer.close()
