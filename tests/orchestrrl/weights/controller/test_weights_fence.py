"""Calls of a weight sync to the pause barrier."""

from typing import Any, cast

import pytest

from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.daemon.wiring import BarrierFence
from orchestrrl.fleet.pause_barrier import PauseBarrier, PauseRequest
from orchestrrl.fleet.pause_lease import PauseLease, PauseState
from planner.model import EngineId

E0, E1 = EngineId("e0"), EngineId("e1")
LEASE = PauseLease("g1", "weight sync s1", PauseMode.KEEP, FrozenRequests.RECOMPUTE, 1.0, 31.0, 11.0, True)


class Barrier:
    """A fake barrier that records its calls."""

    def __init__(self) -> None:
        self.state = PauseState(LEASE, quiet=True)
        self.restarted: Any = None
        self.asked: list[tuple[object, ...]] = []

    async def pause(self, wish: PauseRequest) -> PauseState:
        self.asked.append(("pause", wish))
        return self.state

    async def renew(self, *asked: object) -> None:
        self.asked.append(("renew", *asked))

    async def resume(self, *asked: object) -> None:
        self.asked.append(("resume", *asked))

    def set_version(self, *asked: object) -> None:
        self.asked.append(("set_version", *asked))

    def forget(self, *asked: object) -> None:
        self.asked.append(("forget", *asked))


class Nodes:
    def __init__(self, *gateways: str) -> None:
        self._gateways = gateways

    def gateways(self) -> tuple[str, ...]:
        return self._gateways


def fence_over(barrier: Barrier, *gateways: str) -> BarrierFence:
    return BarrierFence(
        cast(PauseBarrier, barrier), cast(NodeRegistry, Nodes(*gateways)), lambda version: f"/weights/{version}"
    )


@pytest.mark.parametrize(("empty", "frozen"), [(True, FrozenRequests.TAKEN_BACK), (False, FrozenRequests.RECOMPUTE)])
async def test_pause_keeps_requests_unless_engines_must_be_empty(empty: bool, frozen: FrozenRequests) -> None:
    barrier = Barrier()
    fence = fence_over(barrier)
    assert await fence.pause("weight sync s1", empty=empty, lease_s=30.0, deadline_s=10.0) == "g1"
    wish = PauseRequest(PauseMode.KEEP, frozen, "weight sync s1", 30.0, 10.0, weights_change=True)
    assert barrier.asked == [("pause", wish)]
    assert fence.state is barrier.state


async def test_resume_reports_the_path_of_the_weights() -> None:
    barrier = Barrier()
    fence = fence_over(barrier)
    await fence.renew("g1", 30.0)
    await fence.resume("g1", 7, [E1], "version 7")
    await fence.resume("g1", None, [E1], "nothing was changed")
    fence.set_version([E0], 0, "repaired")
    fence.forget([E1], "was restarted")
    assert barrier.asked == [
        ("renew", "g1", 30.0),
        ("resume", "g1", 7, [E1], "version 7", "/weights/7"),
        ("resume", "g1", None, [E1], "nothing was changed", ""),
        ("set_version", [E0], 0, "repaired", "/weights/0"),
        ("forget", [E1], "was restarted"),
    ]


def test_barrier_is_manned_if_a_gateway_is_attached() -> None:
    barrier = Barrier()
    assert not fence_over(barrier).is_manned()
    assert fence_over(barrier, "gw0").is_manned()
