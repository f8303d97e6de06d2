"""Convert reports of agents and gateways to messages and back. Texts from engines, clients and errors are shortened to
fit into a message."""

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
    """Return a text from an engine, a client or an error in a form that fits into a message and that the daemon
    accepts. The result has at most `most` characters."""
    return cut(text.encode(errors="replace").decode(), most)


def _outside_name(text: str) -> str:
    """Return the result of `outside_text` for a name, with `?` in place of unprintable characters, which the daemon
    refuses."""
    return "".join(each if each.isprintable() else "?" for each in outside_text(text, MOST_NAME_CHARACTERS))


def _state_of(message: pb.RequestProgress) -> RequestState:
    """Return the state of a request. A request without a reported state is running if it has generated a token, and
    waiting otherwise."""
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
    paths=LOCAL,
    parses_chats=LOCAL,
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
    # Gateways without a barrier do not send it.
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
    # A separate message, because an empty list differs from an absent one.
    engines=Via(
        to_pb=lambda engines: pb.GatewayEngines(engines=map(GATEWAY_ENGINE.to_pb, engines)),
        from_pb=lambda message: tuple(map(GATEWAY_ENGINE.from_pb, message.engines)),
    ),
)
ACK = Codec(ReportAck, pb.ReportAck)
