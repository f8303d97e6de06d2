"""Commits prepared ahead over gRPC: they meet the same contract, and nothing is done before the signal."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import pytest

from ocs_drivers.base import Arming, OcsDriver
from ocs_drivers.conformance import DriverConformance, refusal
from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverRetryable
from ocs_drivers.faults import DeviceFault
from ocs_drivers.model import CircuitChange, CircuitDiff, CommitResult, CrossConnect
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.rpc.ocs_client import GrpcSwitch
from orchestrrl.rpc.ocs_server import OcsDriverService, serve_driver
from orchestrrl.rpc.pb import ocs_pb2_grpc

ONE, OTHER = CrossConnect(1, 17), CrossConnect(2, 18)


class ArmedSwitch(GrpcSwitch):
    """A switch whose commits are all armed first."""

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        armed = await self.arm(diff, expect_revision, revert_in_s)
        try:
            return await armed.begin()
        finally:
            armed.disarm()


class TestArmed(DriverConformance):
    options: ClassVar[dict[str, Any]] = {
        "ports": 320,
        "reconfiguration_s": 0.002,
        "command_timeout_s": 2.0,
        "link_timeout_s": 0.2,
    }

    @pytest.fixture(autouse=True)
    async def _servers(self) -> AsyncIterator[None]:
        self.served: list[tuple[VirtualSwitch, grpc.aio.Server]] = []
        yield
        for switch, server in self.served:
            await server.stop(None)
            await switch.close()

    async def make_driver(self) -> OcsDriver:
        return await self._made({})

    async def make_big(self, ports: int) -> OcsDriver:
        return await self._made({"ports": 2 * ports})

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        self.served[-1][0].model.add(pairs)

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        return self.served[-1][0].model.setters

    async def _made(self, more: dict[str, Any]) -> OcsDriver:
        switch = VirtualSwitch("lab1", **{**self.options, **more})
        server, port = await serve_driver(switch, "127.0.0.1:0")
        self.served.append((switch, server))
        return ArmedSwitch("lab1", target=f"127.0.0.1:{port}")

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        self.served[-1][0].model.inject(fault)


class Switch(VirtualSwitch):
    """Counts commits."""

    commits = 0

    async def commit(self, *words: Any) -> CommitResult:
        self.commits += 1
        return await super().commit(*words)


@asynccontextmanager
async def served(switch: Switch) -> AsyncIterator[tuple[GrpcSwitch, grpc.aio.Server]]:
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = GrpcSwitch("lab1", target=f"127.0.0.1:{port}", command_timeout_s=30.0)
    yield driver, server
    await driver.close()
    await server.stop(None)


@pytest.fixture
def switch() -> Switch:
    return Switch("served", reconfiguration_s=0.002)


async def test_armed_commit_runs_only_when_begun(switch: Switch) -> None:
    async with served(switch) as (driver, _):
        assert isinstance(driver, Arming)
        diff = await driver.plan(CircuitChange((ONE,)))
        unwanted, wanted = await driver.arm(diff, diff.revision), await driver.arm(diff, diff.revision)
        assert not (await driver.cross_connects()).circuits
        unwanted.disarm()
        assert (await wanted.begin()).done
        assert switch.commits == 1
        assert (await driver.cross_connects()).cross_connects == {ONE}
        wanted.disarm()  # harmless


async def test_begin_refuses_changed_revision(switch: Switch) -> None:
    async with served(switch) as (driver, _):
        diff = await driver.plan(CircuitChange((ONE,)))
        armed = await driver.arm(diff, diff.revision)
        other = await driver.plan(CircuitChange((OTHER,)))
        await driver.commit(other, other.revision)
        async with refusal(CircuitConflict, "but the change was planned for revision"):
            await armed.begin()
        assert (await driver.cross_connects()).cross_connects == {OTHER}


async def test_begin_falls_back_to_commit_without_server_support(switch: Switch) -> None:
    class Plain(OcsDriverService):
        CommitArmed = ocs_pb2_grpc.OcsDriverServicer.CommitArmed  # as in a server that does not implement it

    server = grpc.aio.server()
    ocs_pb2_grpc.add_OcsDriverServicer_to_server(Plain(switch), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    driver = GrpcSwitch("lab1", target=f"127.0.0.1:{port}")
    diff = await driver.plan(CircuitChange((ONE,)))
    armed = await driver.arm(diff, diff.revision)
    assert (await armed.begin()).done
    await driver.close()
    await server.stop(None)


async def test_begin_falls_back_to_commit_after_server_restart(switch: Switch) -> None:
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = GrpcSwitch("lab1", target=f"127.0.0.1:{port}", command_timeout_s=30.0)
    diff = await driver.plan(CircuitChange((ONE,)))
    armed = await driver.arm(diff, diff.revision)
    await server.stop(None)
    server, _ = await serve_driver(switch, f"127.0.0.1:{port}")
    async with asyncio.timeout(30):
        # until then, a commit would go to the ended process, and its outcome would be unknown
        while not armed.call.done():
            await asyncio.sleep(0.01)
    assert (await armed.begin()).done
    assert switch.commits == 1
    await driver.close()
    await server.stop(None)


async def test_server_death_during_commit_is_outcome_unknown() -> None:
    switch = Switch("served", reconfiguration_s=0.5)
    async with served(switch) as (driver, server):
        diff = await driver.plan(CircuitChange((ONE,)))
        armed = await driver.arm(diff, diff.revision)
        heard = switch.model.listen()
        commit = asyncio.ensure_future(armed.begin())
        await asyncio.wait_for(heard.get(), 30)
        await server.stop(None)
        async with refusal(DriverOutcomeUnknown, "lab1"):
            await commit


async def test_disarm_does_not_stop_begun_commit(switch: Switch) -> None:
    async with served(switch) as (driver, _):
        diff = await driver.plan(CircuitChange((ONE,)))
        armed = await driver.arm(diff, diff.revision)
        heard = switch.model.listen()
        commit = asyncio.ensure_future(armed.begin())
        await asyncio.wait_for(heard.get(), 30)
        commit.cancel()
        armed.disarm()
        await asyncio.wait({commit})
        assert (await driver.cross_connects()).cross_connects == {ONE}


async def test_arm_without_server_is_retryable() -> None:
    driver = GrpcSwitch("lab1", target="127.0.0.1:1")
    async with refusal(DriverRetryable, "lab1"):
        await driver.arm(CircuitDiff("safe", 0, frozenset(), (), (ONE,)), 0)  # type: ignore[arg-type]
    await driver.close()
