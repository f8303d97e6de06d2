"""Moves of requests -> one operation per gateway that holds them, with one outcome per move."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrrl.execute.runner import Runner
from orchestrrl.operations import ItemResult, MoveRequests, OperationResult, RequestMove
from planner.model import NodeId, RequestId


@dataclass(frozen=True, slots=True)
class MovesOutcome:
    """What became of each move, in the order in which they were asked for, and the operations behind them."""

    items: tuple[ItemResult, ...]
    operations: tuple[OperationResult, ...]


async def run_moves(
    runner: Runner,
    moves: Sequence[RequestMove],
    gateway_of: Callable[[RequestId], NodeId | None],
    valid_for_s: float,
) -> MovesOutcome:
    """Have every gateway move its own requests, all gateways at once. A request occurs at most once."""
    by_gateway: dict[NodeId, list[RequestMove]] = {}
    outcome: dict[RequestId, ItemResult] = {}
    for move in moves:
        gateway = gateway_of(move.request)
        if gateway is None:
            outcome[move.request] = ItemResult(move.request, done=False, detail="no gateway has it in flight")
        else:
            by_gateway.setdefault(gateway, []).append(move)
    results = await asyncio.gather(
        *(runner.run(gateway, MoveRequests(tuple(held)), valid_for_s) for gateway, held in by_gateway.items())
    )
    for held, result in zip(by_gateway.values(), results, strict=True):
        told = {item.id: item for item in result.items}
        for move in held:
            silent = ItemResult(move.request, done=False, detail=result.detail or f"{result.status}, without a reason")
            outcome[move.request] = told.get(move.request, silent)
    return MovesOutcome(tuple(outcome[move.request] for move in moves), tuple(results))
