"""One list of a Kubernetes fleet serves all that ask, also where it fails."""

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


async def test_all_that_ask_while_the_api_server_is_away_hear_of_it_together() -> None:
    clock = VirtualClock()
    api: Any = AwayApi(clock)
    view = FleetView(api, "default", "fleet", None, clock)
    asking = [asyncio.create_task(view.all()) for _ in range(8)]
    await clock.advance(21.0)
    assert all(isinstance(task.exception(), Retryable) for task in asking)
    assert api.calls == 2  # one that had begun, and one for all that asked meanwhile
    later = asyncio.create_task(view.all())
    await clock.advance(11.0)
    with pytest.raises(Retryable):
        await later
