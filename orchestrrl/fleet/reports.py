"""What agents and gateways tell the daemon, as values. rpc/codecs/telemetry.py puts them on the wire; state.py folds
them."""

from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import add

from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestView


@dataclass(frozen=True, slots=True)
class SendTimes:
    """Timestamps of one report, from which its age is estimated (sender_clocks.py). 0: not given."""

    sent_s: float = 0.0  # by the sender's clock
    ack_sent_s: float = 0.0  # of the latest acknowledgement that the sender had, by the daemon's clock
    ack_received_s: float = 0.0  # when that arrived, by the sender's clock


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An agent's word on one engine. `sequence` grows within a stream; 0: it has not been sent."""

    agent: NodeId
    sequence: int
    engine: EngineId
    url: str
    health: EngineHealth
    health_detail: str = ""
    sample: EngineSample | None = None  # None: could not be read
    capabilities: EngineCapabilities | None = None  # with a stream's first report and when they change
    incarnation: str = ""  # one process of the agent, over all its streams; empty: not given
    times: SendTimes = SendTimes()
    server: str = ""  # identifies the process behind the URL, as read from it; empty: it gives nothing that does


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended, however it ended."""

    id: RequestId
    engine: EngineId | None  # None: ended before it reached one
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
    """Requests that went on after their engine failed. One that does so twice counts twice."""

    failovers: int = 0
    requests_recomputed: int = 0  # of these, that had been computed in part on the failed engine
    tokens_recomputed: int = 0  # of their contexts, prefilled again where they went on

    def __add__(self, other: "FailoverCounts") -> "FailoverCounts":
        return FailoverCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class EngineFailovers:
    """Failovers of one engine's requests between two reports of a gateway."""

    engine: EngineId
    sequence: int  # of the first report that had them
    last_s: float  # the newest of them, by the gateway's clock
    counts: FailoverCounts


class BarrierPhase(StrEnum):
    OPEN = "open"
    CLOSING = "closing"  # nothing new goes to engines, some still run
    QUIET = "quiet"  # they are at rest


@dataclass(frozen=True, slots=True)
class BarrierReport:
    """How one gateway's barrier stands."""

    phase: BarrierPhase = BarrierPhase.OPEN
    lease: str = ""
    lease_until_s: float = 0.0
    running: int = 0  # requests that still run on engines that are not paused
    frozen: int = 0  # that stand still on paused engines
    held: int = 0  # that the gateway holds
    policy_version: int | None = None  # newest that it was told of


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Every request that a gateway has in flight. `sequence` grows within a stream."""

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
    engines: tuple[GatewayEngine, ...] | None = None  # that it was started with; None: as it last reported


@dataclass(frozen=True, slots=True)
class ReportAck:
    """The daemon has folded everything of this stream up to `sequence`."""

    sequence: int
    generation: int  # of the daemon: grows at each of its starts
    sent_s: float = 0.0  # by the daemon's clock
