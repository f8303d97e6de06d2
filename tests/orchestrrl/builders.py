"""Builders for reports of agents and gateways."""

from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.engines.base import EngineSample
from orchestrrl.fleet.reports import BarrierReport, EngineFailovers, EngineReport, FinishedRequest, GatewayReport
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestState, RequestView

GATEWAY = NodeId("gw")
OPEN = BarrierReport()


def sample(at_s: float = 0.0, running: int = 1, waiting: int = 0, total: int = 0, **more: float) -> EngineSample:
    fields = {"kv_usage_fraction": 0.25, "kv_capacity_tokens": 10_000, **more}
    return EngineSample(
        sampled_s=at_s,
        running=running,
        waiting=waiting,
        generation_tokens_total=total,
        prompt_tokens_total=0,
        preemptions_total=0,
        **fields,  # type: ignore[arg-type]
    )


def engine_report(
    engine: str,
    sequence: int = 1,
    sample: EngineSample | None = None,
    health: EngineHealth = EngineHealth.OK,
    agent: str = "agent",
) -> EngineReport:
    return EngineReport(NodeId(agent), sequence, EngineId(engine), f"http://{engine}", health, "", sample)


def request(
    id: str, engine: str | None = "e0", generated: int = 10, prompt: int = 100, movable: bool = True, moves: int = 0
) -> RequestView:
    return RequestView(
        id=RequestId(id),
        engine=EngineId(engine) if engine else None,
        state=RequestState.RUNNING if generated else RequestState.WAITING,
        prompt_tokens=prompt,
        generated_tokens=generated,
        movable=movable,
        moves=moves,
    )


def finished(id: str, generated: int = 50, reason: str = "stop") -> FinishedRequest:
    return FinishedRequest(RequestId(id), EngineId("e0"), 100, generated, reason)


def gateway_report(
    *in_flight: RequestView,
    sequence: int = 1,
    done: tuple[FinishedRequest, ...] = (),
    gateway: NodeId = GATEWAY,
    at_s: float = 0.0,
    barrier: BarrierReport = OPEN,
    failovers: tuple[EngineFailovers, ...] = (),
) -> GatewayReport:
    return GatewayReport(gateway, sequence, at_s, f"http://{gateway}", in_flight, done, barrier, failovers)


def gateway_hello(*engines: str, gateway: NodeId = GATEWAY) -> NodeHello:
    return NodeHello(gateway, NodeKind.GATEWAY, tuple(EngineId(e) for e in engines), "test", f"http://{gateway}")
