"""How reports of agents and gateways are written as messages. What engines, clients and errors wrote is cut to what a
message holds."""

from orchestrrl.core.errors import cut
from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.engines.serving import ServingFacts
from orchestrrl.fleet.reports import (
    BarrierPhase,
    BarrierReport,
    EngineFailovers,
    EngineReport,
    FinishedRequest,
    GatewayReport,
    ReportAck,
)
from orchestrrl.rpc.codec import LOCAL, Codec, EnumCodec, Flat, Via, Whole
from orchestrrl.rpc.pb import telemetry_pb2 as pb
from orchestrrl.rpc.ranges import MOST_NAME_CHARACTERS
from planner.model import RequestState, RequestView

MOST_OUTSIDE_CHARACTERS = 2000
MOST_REASON_CHARACTERS = 200
MOST_MODELS = 256  # names that one engine serves


def outside_text(text: str, most: int = MOST_OUTSIDE_CHARACTERS) -> str:
    """What an engine, a client or an error wrote, as a message can hold it and the daemon takes it."""
    return cut(text.encode(errors="replace").decode(), most)


def _outside_name(text: str) -> str:
    """The same for a name, which the daemon takes where it is printable."""
    return "".join(each if each.isprintable() else "?" for each in outside_text(text, MOST_NAME_CHARACTERS))


def _state_of(message: pb.RequestProgress) -> RequestState:
    """A request without a state counts as waiting while it has no token."""
    if message.state == pb.REQUEST_STATE_UNSPECIFIED and message.generated_tokens > 0:
        return RequestState.RUNNING
    return _STATE.from_pb(message.state)


OUTSIDE = Via(to_pb=outside_text)
_REASON = Via(to_pb=lambda reason: outside_text(reason, MOST_REASON_CHARACTERS))
_MODELS = Whole(to_pb=lambda models: map(_outside_name, models[:MOST_MODELS]), from_pb=tuple)
_STATE = EnumCodec(RequestState, pb.RequestState.DESCRIPTOR, unspecified=RequestState.WAITING)

GATEWAY_ENGINE = Codec(GatewayEngine, pb.GatewayEngine, known_as="known_as")
CAPABILITIES = Codec(
    EngineCapabilities,
    pb.EngineCapabilities,
    version=OUTSIDE,
    models=_MODELS,
    serving=Codec(
        ServingFacts,
        pb.ServingFacts,
        tp="tensor_parallel",
        pp="pipeline_parallel",
        dp="data_parallel",
        ep="expert_parallel",
    ),
    routed_experts=LOCAL,
)
SAMPLE = Codec(EngineSample, pb.EngineSample, loaded_tokens_total=LOCAL, server=LOCAL)
ENGINE_REPORT = Codec(
    EngineReport, pb.EngineReport, health_detail=OUTSIDE, sample=SAMPLE, capabilities=CAPABILITIES, times=Flat()
)
REQUEST = Codec(RequestView, pb.RequestProgress, id="request_id", state=Via(to_pb=_STATE.to_pb, from_message=_state_of))
FINISHED = Codec(FinishedRequest, pb.FinishedRequest, id="request_id", finish_reason=_REASON)
BARRIER = Codec(
    BarrierReport,
    pb.BarrierReport,
    # Gateways that know of no barrier have none.
    phase=EnumCodec(BarrierPhase, pb.BarrierPhase.DESCRIPTOR, unspecified=BarrierPhase.OPEN),
)
GATEWAY_REPORT = Codec(
    GatewayReport,
    pb.GatewayReport,
    in_flight=REQUEST,
    finished=FINISHED,
    barrier=BARRIER,
    failovers=Codec(EngineFailovers, pb.EngineFailovers, counts=Flat()),
    times=Flat(),
    # A message of its own: an empty list differs from none.
    engines=Via(
        to_pb=lambda engines: pb.GatewayEngines(engines=map(GATEWAY_ENGINE.to_pb, engines)),
        from_pb=lambda message: tuple(map(GATEWAY_ENGINE.from_pb, message.engines)),
    ),
)
ACK = Codec(ReportAck, pb.ReportAck)
