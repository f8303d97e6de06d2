"""The reports that agents and gateways send to the daemon, as values. rpc/codecs/telemetry.py encodes them; state.py
combines them into the state of the fleet."""

from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import add

from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestView


@dataclass(frozen=True, slots=True)
class SendTimes:
    """Timestamps of one report, from which its age is estimated (sender_clocks.py). 0 means that a timestamp was not
    given."""

    sent_s: float = 0.0  # by the sender's clock
    ack_sent_s: float = 0.0  # when the sender's latest acknowledgement was sent, by the daemon's clock
    ack_received_s: float = 0.0  # when that acknowledgement arrived, by the sender's clock


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An agent's report on one engine. `sequence` grows within a stream and is 0 until the report is sent."""

    agent: NodeId
    sequence: int
    engine: EngineId
    url: str
    health: EngineHealth
    health_detail: str = ""
    sample: EngineSample | None = None  # None: the engine could not be read
    capabilities: EngineCapabilities | None = None  # in a stream's first report and after a change
    incarnation: str = ""  # identifies the agent's process, over all its streams; empty: not given
    times: SendTimes = SendTimes()
    server: str = ""  # the server's own process identity; empty: it has none


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended, for any reason."""

    id: RequestId
    engine: EngineId | None  # None: ended before it reached an engine
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    moves: int = 0
    tag: str = ""
    duration_s: float = 0.0
    group: str = ""
    group_enough: int = 0  # as RequestView has it


@dataclass(frozen=True, slots=True)
class FailoverCounts:
    """Counts of requests that continued after their engine failed. A request whose engine fails twice counts twice."""

    failovers: int = 0
    requests_recomputed: int = 0  # those partly computed on the failed engine
    tokens_recomputed: int = 0  # their contexts, prefilled again on the new engine

    def __add__(self, other: "FailoverCounts") -> "FailoverCounts":
        return FailoverCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class EngineFailovers:
    """The failovers of one engine's requests between two reports of a gateway."""

    engine: EngineId
    sequence: int  # of the first report that contained them
    last_s: float  # the newest failover, by the gateway's clock
    counts: FailoverCounts


class BarrierPhase(StrEnum):
    OPEN = "open"
    CLOSING = "closing"  # no new requests go to engines; some still run
    QUIET = "quiet"  # all engines are at rest


@dataclass(frozen=True, slots=True)
class BarrierReport:
    """The state of one gateway's pause barrier."""

    phase: BarrierPhase = BarrierPhase.OPEN
    lease: str = ""
    lease_until_s: float = 0.0
    running: int = 0  # requests that still run on engines that are not paused
    frozen: int = 0  # requests that are frozen on paused engines
    held: int = 0  # requests that the gateway holds back
    policy_version: int | None = None  # the newest that the gateway has received


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """A gateway's report of every request that it has in flight. `sequence` grows within a stream."""

    gateway: NodeId
    sequence: int
    sampled_s: float  # by the gateway's clock
    url: str
    in_flight: tuple[RequestView, ...]
    finished: tuple[FinishedRequest, ...] = ()  # since the last report that was acknowledged
    barrier: BarrierReport = BarrierReport()
    failovers: tuple[EngineFailovers, ...] = ()  # since the last report that was acknowledged
    incarnation: str = ""
    times: SendTimes = SendTimes()
    engines: tuple[GatewayEngine, ...] | None = None  # engines of its command line; None: as last reported


@dataclass(frozen=True, slots=True)
class ReportAck:
    """An acknowledgement that the daemon has processed every report of a stream up to `sequence`."""

    sequence: int
    generation: int  # of the daemon: grows at each of its starts
    sent_s: float = 0.0  # by the daemon's clock
