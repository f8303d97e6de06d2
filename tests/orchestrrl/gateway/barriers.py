"""Helpers that close and open the pause barrier of a fake world."""

import asyncio
from typing import Any

from orchestrrl.core.operations import CloseBarrier, FrozenRequests, OpenBarrier, OperationItemResult, PauseMode
from planner.model import EngineId
from tests.orchestrrl.gateway.fakes import RunningGroup, World

LEASE_S = 60.0


def order(w: World, mode: PauseMode = PauseMode.KEEP, lease: str = "l", **fields: Any) -> CloseBarrier:
    now_s = w.clock.now_s()
    values: dict[str, Any] = {
        "holder": "trainer",
        "frozen": FrozenRequests.RECOMPUTE,
        "lease_until_s": now_s + LEASE_S,
        "quiet_by_s": now_s + LEASE_S,
    }
    return CloseBarrier(lease=lease, mode=mode, **(values | fields))


async def close(
    w: World, mode: PauseMode = PauseMode.KEEP, lease: str = "l", **fields: Any
) -> "asyncio.Task[tuple[OperationItemResult, ...]]":
    closing = asyncio.create_task(w.gateway.barrier.close(order(w, mode, lease, **fields)))
    await w.settle()
    return closing


async def open_barrier(w: World, version: int | None = None, without: tuple[str, ...] = (), lease: str = "l") -> None:
    await w.gateway.barrier.open(OpenBarrier(lease, version, tuple(map(EngineId, without))))
    await w.settle()


def tokens_of(job: RunningGroup) -> int:
    return sum(len(record.generated_ids) for record in job.records)
