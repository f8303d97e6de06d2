"""Tests that one listing of a Kubernetes fleet serves all concurrent callers, also if it fails."""

import asyncio
from typing import Any

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Retryable
from orchestrrl.fleet.deployers.kubernetes_view import FleetView


class AwayApi:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.calls = 0

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        self.calls += 1
        await self.clock.sleep(10.0)
        raise Retryable("the API server does not answer", 1.0)


async def test_concurrent_callers_share_one_failed_listing() -> None:
    clock = VirtualClock()
    api: Any = AwayApi(clock)
    view = FleetView(api, "default", "fleet", None, clock)
    asking = [asyncio.create_task(view.all()) for _ in range(8)]
    await clock.advance(21.0)
    assert all(isinstance(task.exception(), Retryable) for task in asking)
    assert api.calls == 2  # one listing that had begun, and one for all later callers
    later = asyncio.create_task(view.all())
    await clock.advance(11.0)
    with pytest.raises(Retryable):
        await later
