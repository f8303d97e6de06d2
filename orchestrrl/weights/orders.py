"""Data types of the orders from the daemon to peers and of the reports from peers to the daemon.

A peer carries out an order with a given id only once, and answers a repeated order with the stored result. Each start
of the daemon begins a new generation. A peer rejects orders of a generation older than the newest that it has seen.
Every order is idempotent, so a restarted daemon sends new orders instead of querying the results of old orders. A
deadline is a time on the receiver's clock; `PeerOrder.by_clock` converts it from the daemon's clock to the peer's.
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
    """A transfer between two peers, as described in the orders to both peers. The receiver listens for the sender's
    connection."""

    id: str
    transport: str
    address: str  # on which the receiver listens


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """An order to open a version on the peer. The version is either read from parts that trainers staged on the peer's
    host, or received from other peers. Stored bytes are kept. `at_home` lists the shards that engines of this host need
    and whose bytes the host already has, so that no other peer sends them. If these bytes are only in staged parts,
    they are copied into the received file."""

    map: VersionMap
    parts: tuple[StagedPart, ...] = ()
    at_home: tuple[str, ...] = ()
    kind: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class SumShards:
    """An order to compute and return the checksums of shards that the peer stores completely."""

    version: int
    shards: tuple[str, ...]
    kind: Literal["sum"] = "sum"


@dataclass(frozen=True, slots=True)
class CarryEdges:
    """An order to start these edges, in addition to the running edges. A peer starts its edges of a wave after its
    edges of earlier waves have ended, and forwards bytes as soon as it has received them. The peer sends the result of
    the order at once, and later reports the edges' progress in `EdgeEvent`s."""

    version: int
    edges: tuple[CarryEdge, ...]
    chunk_bytes: int
    stall_s: float  # an edge breaks if no byte moves for this long although the sender has bytes to send
    kind: Literal["carry"] = "carry"


@dataclass(frozen=True, slots=True)
class EndEdges:
    """An order to end the edges with these ids. An empty list means all edges of the version."""

    version: int
    edges: tuple[str, ...] = ()
    kind: Literal["end_edges"] = "end_edges"


@dataclass(frozen=True, slots=True)
class CheckVersion:
    """An order to compare the stored bytes of a version with their checksums. Blocks that do not match their checksums
    are reported as missing."""

    version: int
    kind: Literal["check"] = "check"


@dataclass(frozen=True, slots=True)
class InstallVersion:
    """An order to load the version into the engine, unless `valid_until_s` has passed. The engine is paused for the
    installation and then returns to its previous state. If the engine already reports the version, the order has no
    effect, unless `anew` is set. It is set if another program may have changed the engine's weights."""

    version: int
    engine: EngineId
    valid_until_s: float
    anew: bool = False
    kind: Literal["install"] = "install"


@dataclass(frozen=True, slots=True)
class QueryVersion:
    """An order to query which version the engine has. If the version has changed, the peer reports the new version
    before it sends the result of the order."""

    engine: EngineId
    kind: Literal["query_version"] = "query_version"


@dataclass(frozen=True, slots=True)
class ProbeWeights:
    """An order to generate tokens greedily from a prompt on an engine that runs no requests. If the engine was paused,
    it is paused again afterwards."""

    engine: EngineId
    prompt_ids: tuple[int, ...]
    max_tokens: int
    valid_until_s: float
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True, slots=True)
class RestEngine:
    """An order to pause the engine and drop its KV cache, or to resume the engine. It is used for repairs, and for
    syncs without a gateway. Running requests may finish within `drain_s`; if they do not, the engine continues and the
    order fails. If `ends` is set, running requests are aborted at once."""

    engine: EngineId
    at_rest: bool
    drain_s: float = 0.0
    ends: bool = False
    kind: Literal["rest"] = "rest"


@dataclass(frozen=True, slots=True)
class KeepVersions:
    """An order to discard all stored versions that are not in `versions`."""

    versions: tuple[int, ...]
    kind: Literal["keep"] = "keep"


@dataclass(frozen=True, slots=True)
class BackendAct:
    """An order to perform an act of a direct backend (backends/base.py) at an engine, unless `valid_until_s` has
    passed. `body_json` has the arguments of the act. `changes` is set if the act may change the engine's weights."""

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
    """An order to serve these engines from now on, in addition to the engines on the peer's command line. `engines`
    maps engine ids to URLs. The assignment is stored and survives a restart of the peer. Engines that were assigned
    earlier and are not listed are dropped."""

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
    # `kind` selects the type, so that a large order is not validated against every type.
    order: Annotated[Order, Field(discriminator="kind")] = field()

    @property
    def valid_until_s(self) -> None:
        """Return None, because the delivery of an order has no deadline. If an order must be carried out by a deadline,
        the order contains the deadline as a field."""

    def by_clock(self, ahead_s: float) -> "PeerOrder":
        """Return the order with its deadline converted from the daemon's clock to a clock that is `ahead_s` ahead of
        it."""
        match self.order:
            case InstallVersion() | ProbeWeights() | BackendAct() as timed:
                return replace(self, order=replace(timed, valid_until_s=timed.valid_until_s + ahead_s))
        return self


class OrderOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # nothing has changed, or the previous state was restored
    UNKNOWN = "unknown"  # an engine may have part of the weights, or a peer part of the bytes


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The result of an order. `detail` is free text; the fields after it are the values that the order requested."""

    id: str
    outcome: OrderOutcome
    detail: str = ""
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # SumShards: checksums of each shard's blocks
    missing: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)  # OpenVersion, CheckVersion
    loaded_sum: str = ""  # InstallVersion: checksum of the weights that the engine received, or has
    is_read_back: bool = False  # InstallVersion: the checksum is of the weights in the engine
    tokens: Tokens = ()  # ProbeWeights
    result_json: str = ""  # BackendAct


class EdgeState(StrEnum):
    BEGAN = "began"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class EdgeEvent:
    """A report by one endpoint that an edge has begun, is done or has broken. Only the receiver's report determines
    which bytes have arrived."""

    version: Version
    edge: str
    state: EdgeState
    is_receiver: bool
    bytes: ByteCount  # that arrived at the receiver, or that the sender sent
    began_s: Seconds  # Unix time of its first byte
    ended_s: Seconds = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ArrivedBytes:
    """A report of the number of bytes of a version that have arrived at a peer. It is sent several times a second while
    edges run."""

    version: Version
    received_bytes: ByteCount


PeerNews = Peer | PeerResult | EdgeEvent | ArrivedBytes

ORDER: TypeAdapter[PeerOrder] = TypeAdapter(PeerOrder)
NEWS: TypeAdapter[PeerNews] = TypeAdapter(PeerNews)
