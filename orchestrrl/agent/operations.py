"""Carry out the daemon's operations on the engines of one agent. Called once per operation id: see core/delivery.py."""

from collections.abc import Mapping
from typing import assert_never

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import (
    AbortRequests,
    Action,
    CancelRequests,
    CloseBarrier,
    MoveRequests,
    OpenBarrier,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    PauseEngine,
    ProbeEngine,
    ResumeEngine,
    SetRoutes,
)
from orchestrrl.engines.base import Engine
from planner.model import EngineId, NodeId


class EngineOperations:
    """Runs operations on the engines it is given; raises the engines' own errors."""

    def __init__(self, node_id: NodeId, engines: Mapping[EngineId, Engine]) -> None:
        self._node_id = node_id
        self._engines = engines

    async def run(self, operation: Operation) -> OperationResult:
        detail, items = await self._act(operation.action)
        return OperationResult(operation.id, self._node_id, OperationStatus.DONE, detail, items=items)

    async def _act(self, action: Action) -> tuple[str, tuple[OperationItemResult, ...]]:
        match action:
            case PauseEngine(engine, mode):
                await self._engine(engine).pause(mode)
                return f"{engine} is paused ({mode})", ()
            case ResumeEngine(engine):
                await self._engine(engine).resume()
                return f"{engine} runs again", ()
            case AbortRequests(engine, requests):
                await self._engine(engine).abort(requests)
                return f"asked {engine} to stop {len(requests)}", tuple(
                    OperationItemResult(name, done=True) for name in requests
                )
            case ProbeEngine(engine):
                probe_s = await self._engine(engine).probe()
                return f"{engine} generated a token in {probe_s:.3g} s", ()
            case SetRoutes() | MoveRequests() | CloseBarrier() | OpenBarrier() | CancelRequests():
                raise Permanent(f"{self._node_id} is an agent: {action.kind} is for gateways")
            case _:
                assert_never(action)

    def _engine(self, engine_id: EngineId) -> Engine:
        if engine_id not in self._engines:
            raise Permanent(f"no engine {engine_id!r} at {self._node_id}; known: {', '.join(sorted(self._engines))}")
        return self._engines[engine_id]
