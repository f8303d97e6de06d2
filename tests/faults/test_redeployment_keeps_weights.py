"""Tests of redeployments on real processes while the fleet has a published version: started engines have it before they
get a request, even if the daemon dies meanwhile, and the next version reaches all engines."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from front import until
from redeploying_fleet import NARROW, WIDE
from redeploying_fleet import Harness as Redeploying
from syncing_fleet import Marked, Trainer
from versioned_requests import Clients

from orchestrrl.rpc.codecs.weights import STATUS
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, weights_pb2
from orchestrrl.weights.controller.reports import WeightsStatus

DONE = ("done", "done", "")


class Harness(Redeploying):
    """A fleet with a trainer, its host's peer, and one peer for all engines that the daemon starts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peers = [self._peer("train0"), self._peer("gen0", "--engines-here", "--poll-engines-s", "0.5")]
        self.trainer = Trainer(self.daemon_address, folder, folder / "weights-train0")
        self.version = 0

    def _peer(self, name: str, *more: str) -> Marked:
        words = ["sync", "peer", "--id", name, "--daemon", self.daemon_address, "--transport", "tcp"]
        words += ["--folder", str(self.folder / f"weights-{name}"), "--engine-kind", "simulated", "--host", "127.0.0.1"]
        return Marked(name, [*words, *more], self.folder, serves=False)

    async def open(self) -> None:
        await super().open()
        await asyncio.gather(*(peer.start() for peer in self.peers), self.trainer.start())
        self.clients = Clients(self.gateway.url, self.folder)

    async def close(self) -> None:
        self.trainer.kill()
        for peer in self.peers:
            peer.end()
        await super().close()

    async def publish(self) -> None:
        """Publish the next version and wait until all engines have it."""
        self.version += 1
        self.trainer.publish(self.version)
        assert await self.trainer.over(self.version) == DONE
        await self.all_have_it()

    async def all_have_it(self) -> None:
        """Check that all engines have it, by their own reports, the peer, and the pause barrier."""
        wanted = dict.fromkeys(await self.engines(), self.version)

        async def so() -> bool:
            status, barrier = (
                await self.weights(),
                await self.ask("GetPauseBarrier", control_pb2.GetPauseBarrierRequest()),
            )
            served = {engine for peer in status.peers for engine in peer.engines}
            reported = {each.engine_id: each.policy_version for each in barrier.engines}
            return (status.committed, set(served), reported) == (self.version, wanted.keys(), wanted)

        await until(so, 0.1)
        assert (await self.weights()).quarantined == ()

    async def weights(self) -> WeightsStatus:
        async with ControlClient(self.daemon_address) as client:
            return STATUS.from_pb(await client.call(client.weights.GetWeights, weights_pb2.GetWeightsRequest()))


@pytest.fixture(scope="module")
def whole_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("redeploying"))
    try:
        asyncio.run(harness.open())
        yield harness
    finally:
        asyncio.run(harness.close())


@pytest.fixture
async def harness(whole_harness: Harness) -> Harness:
    """Provide a narrow fleet with a version."""
    whole_harness.unmark()
    await whole_harness.become(NARROW)
    await whole_harness.publish()
    return whole_harness


async def test_new_engines_start_with_the_fleets_version(harness: Harness) -> None:
    async with harness.clients.requests():
        report = await harness.until_over(await harness.begin(WIDE))
        assert report.state == "done", report.detail
        await harness.routed(harness.gateway)
        await harness.all_have_it()
        await harness.publish()


@pytest.mark.slow
async def test_daemon_killed_during_the_redeployment_keeps_the_version(harness: Harness) -> None:
    async with harness.clients.requests():
        harness.mark(kind="start", state="done")
        redeployment = await harness.begin_and_die(WIDE)
        assert harness.daemon.process.returncode == -signal.SIGKILL
        await harness.daemon.start()
        report = await harness.until_over(redeployment)
        assert report.state in ("done", "rolled_back"), report.detail
        await harness.routed(harness.gateway)
        await harness.all_have_it()
        await harness.publish()
