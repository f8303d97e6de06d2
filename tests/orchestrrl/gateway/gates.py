"""A gate that is closed and opened in the fake world."""

import asyncio
from typing import Any

from orchestrrl.core.operations import CloseGate, FrozenRequests, ItemResult, OpenGate, PauseMode
from orchestrrl.gateway.core import Job
from planner.model import EngineId
from tests.orchestrrl.gateway.fakes import World

LEASE_S = 60.0


def order(w: World, mode: PauseMode = PauseMode.KEEP, lease: str = "l", **fields: Any) -> CloseGate:
    now_s = w.clock.now_s()
    values: dict[str, Any] = {
        "holder": "trainer",
        "frozen": FrozenRequests.RECOMPUTE,
        "lease_until_s": now_s + LEASE_S,
        "quiet_by_s": now_s + LEASE_S,
    }
    return CloseGate(lease=lease, mode=mode, **(values | fields))


async def close(
    w: World, mode: PauseMode = PauseMode.KEEP, lease: str = "l", **fields: Any
) -> "asyncio.Task[tuple[ItemResult, ...]]":
    closing = asyncio.create_task(w.gateway.gate.close(order(w, mode, lease, **fields)))
    await w.settle()
    return closing


async def open_gate(w: World, version: int | None = None, without: tuple[str, ...] = (), lease: str = "l") -> None:
    await w.gateway.gate.open(OpenGate(lease, version, tuple(map(EngineId, without))))
    await w.settle()


def tokens_of(job: Job) -> int:
    return sum(len(record.generated_ids) for record in job.records)
