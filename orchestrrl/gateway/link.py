"""The gateway's connections to the daemon, over which it receives routes and moves and reports every request. Clients'
calls to the pause barrier are forwarded to the daemon, because the daemon commands all gateways.

While the daemon is unreachable, the gateway continues with its last routes. Completion requests never wait for the
daemon.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

import grpc

from orchestrrl import __version__
from orchestrrl.core.addresses import host_id
from orchestrrl.core.nodes import GatewayEngine, NodeHello, NodeKind
from orchestrrl.core.operations import (
    CancelRequests,
    CloseBarrier,
    MoveRequests,
    OpenBarrier,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.bodies import RequestBody
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.pause import PauseBody
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.codecs.node import FROZEN, HELLO, PAUSE_MODE
from orchestrrl.rpc.codecs.telemetry import ACK, GATEWAY_ENGINE, GATEWAY_REPORT
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc, telemetry_pb2
from orchestrrl.rpc.plain_values import plain
from planner.model import EngineId, RequestId

# The interval between reads of the engines' server identities; shorter at first, while engines may be starting.
IDENTIFY_EVERY_S = 30.0
IDENTIFY_AT_FIRST_S = 1.0
MOVE_ANSWER_S = 30.0  # timeout of the daemon's call, which waits for the gateway that has the request


async def move_elsewhere(target: str, request: RequestId, to_engine: EngineId) -> OperationItemResult:
    """Ask the daemon at `target` to move a request that another gateway holds. If the call fails, the returned result
    contains the reason."""
    try:
        move = {"request_id": request, "to_engine_id": to_engine}
        answer = await _call(target, "MoveRequest", move, MOVE_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return OperationItemResult(request, done=False, detail=f"no such request here; daemon: {error.details()}")
    return OperationItemResult(request, answer.done, answer.detail)


class GatewayLink:
    """The connection of one gateway to the daemon. `run` keeps the gateway connected and sends a report every
    `report_interval_s` seconds."""

    def __init__(self, gateway: Gateway, target: str, *, report_interval_s: float) -> None:
        self._gateway = gateway
        self._clock = clock = gateway.clock
        gateway.fleet.keep_ids()
        self._sent_engines: tuple[GatewayEngine, ...] | None = None  # engines already sent on this stream
        self._hello = HELLO.to_pb(
            NodeHello(
                node=gateway.node,
                kind=NodeKind.GATEWAY,
                engines=tuple(gateway.fleet.own),
                version=__version__,
                url=gateway.url,
                incarnation=gateway.fleet.incarnation,
                addresses=tuple(gateway.fleet.own.values()),
                host=host_id(),
            )
        )
        self._node = NodeLink(target, self._hello, self.perform, clock=clock)
        self._reports = ReportStream(
            target,
            "ReportRequests",
            self._report,
            report_interval_s,
            clock=clock,
            on_ack=lambda message: gateway.acknowledge(ACK.from_pb(message).sequence),
            on_open=self._opened,
        )

    async def run(self) -> None:
        await asyncio.gather(self._node.run(), self._reports.run(), self._identify())

    async def perform(self, operation: Operation) -> OperationResult:
        """Carry out one operation from the daemon and return its result."""
        match operation.action:
            case SetRoutes(routes, expected, expected_until_s):
                faults = self._gateway.set_routes(routes, expected, expected_until_s)
                status = OperationStatus.PARTIAL if faults else OperationStatus.DONE
                return OperationResult(operation.id, self._gateway.node, status, "; ".join(faults))
            case MoveRequests(moves):
                items = await self._gateway.move(moves)
            case CloseBarrier() as order:
                items = await self._gateway.barrier.close(order)
            case OpenBarrier() as order:
                items = await self._gateway.barrier.open(order)
            case CancelRequests(requests, groups, reason):
                cancelled = self._gateway.cancel(requests, groups, reason)
                items = tuple(OperationItemResult(name, done=True) for name in cancelled)
            case action:
                assert_never(action)
        return OperationResult(operation.id, self._gateway.node, status_of(items), items=items)

    async def _identify(self) -> None:
        """Refresh the server identities of the engines that the gateway was started with, until cancelled."""
        wait_s = IDENTIFY_AT_FIRST_S
        while self._gateway.fleet.own:
            await self._gateway.identify_engines()
            await self._clock.sleep(wait_s)
            wait_s = min(IDENTIFY_EVERY_S, 2 * wait_s)

    def _opened(self) -> None:
        self._sent_engines = None

    async def _report(self) -> telemetry_pb2.GatewayReport:
        engines = tuple(self._gateway.fleet.own.values())
        if engines == self._sent_engines:
            return GATEWAY_REPORT.to_pb(self._gateway.report())
        self._sent_engines = engines
        # The next hello must contain them as well.
        del self._hello.engine_ids[:], self._hello.engines[:]
        self._hello.engine_ids.extend(self._gateway.fleet.id_of(engine.engine) for engine in engines)
        self._hello.engines.extend(map(GATEWAY_ENGINE.to_pb, engines))
        return GATEWAY_REPORT.to_pb(replace(self._gateway.report(), engines=engines))


ANSWER_S = 30.0  # timeout beyond the caller's own deadline

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


async def ask_daemon(target: str, method: str, body: RequestBody | None) -> Mapping[str, Any]:
    """Forward a pause barrier call to the daemon at `target`, which commands all gateways. `method` is the name of the
    daemon's RPC. Returns the response as plain values. Raises HttpRefusal if the daemon is unavailable or refuses the
    call."""
    patience_s = ANSWER_S
    fields = {} if body is None else body.model_dump(exclude_none=True)
    if isinstance(body, PauseBody):
        mode, frozen = PAUSE_MODE.to_pb(body.mode), FROZEN.to_pb(body.frozen)
        fields |= {"mode": mode, "frozen": frozen, "deadline_s": body.within_s}
        patience_s += body.within_s
    try:
        return plain(await _call(target, method, fields, patience_s))
    except grpc.aio.AioRpcError as error:
        status = _STATUSES.get(error.code(), 503)
        where = "" if error.code() in _STATUSES else "the daemon, which commands all gateways, is unavailable: "
        raise HttpRefusal(f"{where}{error.details()}", status=status) from error


async def _call(target: str, name: str, fields: Mapping[str, Any], timeout_s: float) -> Any:
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        method = getattr(control_pb2_grpc.ControlStub(channel), name)
        return await method(getattr(control_pb2, f"{name}Request")(**fields), timeout=timeout_s)
