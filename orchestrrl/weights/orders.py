"""Orders of the daemon to peers, and news of peers, as values.

A peer carries an order out once per id, and answers a repeated one with the same result. Orders of an older generation
than the newest seen are refused. Each is harmless when it is done twice, so a daemon that comes back gives its orders
anew instead of asking what became of the old ones. Deadlines are in the clock of whoever reads them:
`PeerOrder.by_clock` moves them from the daemon's to the peer's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from orchestrrl.weights.model import ByteCount, Peer, Range, Seconds, StagedPart, Tokens, Version, VersionMap
from planner.model import EngineId
from planner.sync_tree.ranges import PeerFlow


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryEdge(PeerFlow):
    """A flow as both of its peers are ordered to carry it. The receiver listens."""

    id: str
    transport: str
    address: str  # the receiver's


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """Hold this version: from parts that trainers staged here, or by receiving it. What is there of it stays.
    `at_home`: shards that are in parts here, or in the file already, and that engines here need: nobody sends them, and
    what parts have of them is copied into the file."""

    map: VersionMap
    parts: tuple[StagedPart, ...] = ()
    at_home: tuple[str, ...] = ()
    kind: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class SumShards:
    """Tell the sums of shards that are here whole."""

    version: int
    shards: tuple[str, ...]
    kind: Literal["sum"] = "sum"


@dataclass(frozen=True, slots=True)
class CarryEdges:
    """Send and receive these edges, beside those that run. Of its own edges a peer begins those of a wave when it has
    ended those of the waves before; it forwards what it has of a range as soon as it has it. The result comes at once;
    `EdgeEvent`s tell the rest."""

    version: int
    edges: tuple[CarryEdge, ...]
    chunk_bytes: int
    stall_s: float  # an edge on which nothing has moved for so long, though there is something to send, is broken
    kind: Literal["carry"] = "carry"


@dataclass(frozen=True, slots=True)
class EndEdges:
    """Let go of these; empty: of all of the version's."""

    version: int
    edges: tuple[str, ...] = ()
    kind: Literal["end_edges"] = "end_edges"


@dataclass(frozen=True, slots=True)
class CheckVersion:
    """Compare what is here with the sums; what does not agree counts as missing from then on."""

    version: int
    kind: Literal["check"] = "check"


@dataclass(frozen=True, slots=True)
class InstallVersion:
    """Have the engine load the version, unless `valid_until_s` is over. It is at rest meanwhile, and afterwards as it
    was before. Where it says that it has the version already nothing is done, unless `anew`: somebody else may have
    given it others since."""

    version: int
    engine: EngineId
    valid_until_s: float
    anew: bool = False
    kind: Literal["install"] = "install"


@dataclass(frozen=True, slots=True)
class QueryVersion:
    """Ask the engine now which version it has: the peer says so of it before it answers, as it does of all changes."""

    engine: EngineId
    kind: Literal["query_version"] = "query_version"


@dataclass(frozen=True, slots=True)
class ProbeWeights:
    """Ask the engine, which has no requests, to go on from a prompt, greedily. Paused before, it is so afterwards."""

    engine: EngineId
    prompt_ids: tuple[int, ...]
    max_tokens: int
    valid_until_s: float
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True, slots=True)
class RestEngine:
    """Pause the engine, its KV dropped, or let it run again: where no gateway does. What runs may come to its end
    first, within `drain_s`; if it does not the engine goes on as it was. `ends`: what runs is ended at once."""

    engine: EngineId
    at_rest: bool
    drain_s: float = 0.0
    ends: bool = False
    kind: Literal["rest"] = "rest"


@dataclass(frozen=True, slots=True)
class KeepVersions:
    """Discard all versions but these."""

    versions: tuple[int, ...]
    kind: Literal["keep"] = "keep"


@dataclass(frozen=True, slots=True)
class BackendAct:
    """Have a backend whose trainer sends (backends/base.py) do something at an engine, unless `valid_until_s` is over.
    `changes`: it may have other weights afterwards."""

    backend: str
    engine: EngineId
    act: str
    version: int
    body_json: str
    changes: bool
    valid_until_s: float
    kind: Literal["backend"] = "backend"


@dataclass(frozen=True, slots=True)
class ServeEngines:
    """Install into these engines from now on, by where they listen, and into those that it was started with; to be
    there again after a restart. The others are nobody's business here any more."""

    engines: Mapping[EngineId, str]
    kind: Literal["serve"] = "serve"


Order = (
    OpenVersion
    | SumShards
    | CarryEdges
    | EndEdges
    | CheckVersion
    | InstallVersion
    | QueryVersion
    | ProbeWeights
    | RestEngine
    | KeepVersions
    | BackendAct
    | ServeEngines
)


@dataclass(frozen=True, slots=True)
class PeerOrder:
    id: str
    generation: int
    # By its kind alone: a large one is not tried as each of them.
    order: Annotated[Order, Field(discriminator="kind")] = field()

    @property
    def valid_until_s(self) -> None:
        """No deadline of the delivery's: where an order has one, it is in the order."""

    def by_clock(self, ahead_s: float) -> "PeerOrder":
        """Return the same for a receiver whose clock is so much ahead."""
        match self.order:
            case InstallVersion() | ProbeWeights() | BackendAct() as timed:
                return replace(self, order=replace(timed, valid_until_s=timed.valid_until_s + ahead_s))
        return self


class OrderOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # nothing has changed, or what was there before is there again
    UNKNOWN = "unknown"  # an engine may hold half of the weights, or a peer half of the bytes


@dataclass(frozen=True, slots=True)
class PeerResult:
    """`detail` is for people. The fields behind it are what the order asked for."""

    id: str
    outcome: OrderOutcome
    detail: str = ""
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # SumShards: of each shard's blocks
    missing: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)  # OpenVersion, Check
    loaded_sum: str = ""  # Install: of what the engine was given, or holds
    is_read_back: bool = False  # Install: the sum is of what the engine holds
    tokens: Tokens = ()  # Probe
    result_json: str = ""  # BackendAct


class EdgeState(StrEnum):
    BEGAN = "began"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class EdgeEvent:
    """An edge began, is done or broke, by one of its ends; the receiver's event counts for what has arrived."""

    version: Version
    edge: str
    state: EdgeState
    is_receiver: bool
    bytes: ByteCount  # that have arrived, or were sent
    began_s: Seconds  # Unix time of its first byte
    ended_s: Seconds = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ArrivedBytes:
    """The bytes that a peer has received, a few times a second while edges run."""

    version: Version
    received_bytes: ByteCount


PeerNews = Peer | PeerResult | EdgeEvent | ArrivedBytes

ORDER: TypeAdapter[PeerOrder] = TypeAdapter(PeerOrder)
NEWS: TypeAdapter[PeerNews] = TypeAdapter(PeerNews)
