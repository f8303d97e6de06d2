"""The problem of `orchestrrl sync plan` as a document."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from orchestrrl.cli.problem import ProblemPart, ids_exist, unique, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.sync_tree.model import SyncProblem

SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 2**60  # what goes beyond is a slip
MOST_CIRCUITS = 2**20


class SyncPodPart(ProblemPart):
    id: str
    role: Annotated[str, Field(pattern="^(train|gen)$")]
    boundary_circuits: int = Field(ge=0, le=MOST_CIRCUITS)


class SyncEndpointPart(ProblemPart):
    id: str
    pod: str
    tor: str
    nic_gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)


class ShardPart(ProblemPart):
    id: str
    bytes: int = Field(ge=1, le=MOST_BYTES)
    holders: list[str]
    receivers: list[str]


class LinkPart(ProblemPart):
    a: str
    b: str
    circuits: int = Field(ge=1, le=MOST_CIRCUITS)
    gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)


class SyncPlanProblem(ProblemPart):
    link_gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)
    pods: list[SyncPodPart]
    endpoints: list[SyncEndpointPart]
    tor_circuits: dict[str, Annotated[int, Field(ge=0, le=MOST_CIRCUITS)]]
    shards: list[ShardPart]
    seeds_per_pod: int = Field(ge=1)
    chunk_bytes: int = Field(ge=1, le=MOST_BYTES)
    hop_latency_s: float = Field(ge=0, le=1e9)
    links: list[LinkPart] | None = None  # None: any two PoDs can be joined, at `link_gbps`


def _tors(document: Any) -> Iterator[str]:
    """Each has its circuits told, and is in one PoD."""
    told = document.get("tor_circuits") if isinstance(document, dict) else None
    pod_of: dict[str, Any] = {}
    for location, end in values_at(document, "endpoints[]"):
        tor = end.get("tor") if isinstance(end, dict) else None
        if not isinstance(tor, str):
            continue
        path = path_of((*location, "tor"))
        if isinstance(told, dict) and tor not in told:
            yield f"{path}: has no tor_circuits, got {shorten(tor)}"
        if pod_of.setdefault(tor, end.get("pod")) != end.get("pod"):
            yield f"{path}: is in PoD {shorten(pod_of[tor])} already, got {shorten(tor)}"


def _check_holders(document: Any) -> Iterator[str]:
    for location, shard in values_at(document, "shards[]"):
        if not isinstance(shard, dict):
            continue
        if shard.get("receivers") and shard.get("holders") == []:
            yield f"{path_of((*location, 'holders'))}: must not be empty where there are receivers, got []"
        for field in ("holders", "receivers"):
            named: set[str] = set()
            for place, name in enumerate(shard[field] if isinstance(shard.get(field), list) else ()):
                if isinstance(name, str) and name in named:
                    yield f"{path_of((*location, field, place))}: is named already, got {shorten(name)}"
                elif isinstance(name, str):
                    named.add(name)


def _links(document: Any) -> Iterator[str]:
    """Each joins two, which no other does."""
    joined: set[frozenset[str]] = set()
    for location, link in values_at(document, "links[]"):
        ends = [end for end in (link.get("a"), link.get("b")) if isinstance(end, str)] if isinstance(link, dict) else []
        if len(ends) < 2:
            continue
        pods = frozenset(ends)
        if len(pods) == 1:
            yield f"{path_of((*location, 'b'))}: must be another PoD than a, got {shorten(ends[1])}"
        elif pods in joined:
            yield f"{path_of(location)}: these two are joined already, got {shorten(link)}"
        joined.add(pods)


CHECKS = (
    unique("pods[].id"),
    unique("endpoints[].id"),
    unique("shards[].id"),
    ids_exist("endpoints[].pod", "pods[].id"),
    ids_exist("shards[].holders[]", "endpoints[].id"),
    ids_exist("shards[].receivers[]", "endpoints[].id"),
    ids_exist("links[].a", "pods[].id"),
    ids_exist("links[].b", "pods[].id"),
    _tors,
    _check_holders,
    _links,
)


def problem_of(read: SyncPlanProblem) -> "SyncProblem":
    import numpy as np

    from planner.sync_tree.model import Shard, SyncProblem, pairs_of

    pods = {pod.id: place for place, pod in enumerate(read.pods)}
    tors = {tor: place for place, tor in enumerate(read.tor_circuits)}
    ends = {end.id: place for place, end in enumerate(read.endpoints)}
    links = None if read.links is None else [(each.a, each.b, each.circuits, each.gbps) for each in read.links]
    shards = tuple(
        Shard(
            shard.id,
            shard.bytes,
            tuple(ends[holder] for holder in shard.holders),
            tuple(ends[receiver] for receiver in shard.receivers if receiver not in shard.holders),
        )
        for shard in read.shards
    )
    return SyncProblem(
        link_gbps=read.link_gbps,
        pods=tuple(pods),
        boundary_circuits=np.array([pod.boundary_circuits for pod in read.pods], dtype=np.int64),
        tors=tuple(tors),
        tor_gbps=np.array([circuits * read.link_gbps for circuits in read.tor_circuits.values()], dtype=np.float64),
        endpoints=tuple(ends),
        pod=np.array([pods[end.pod] for end in read.endpoints], dtype=np.int64),
        tor=np.array([tors[end.tor] for end in read.endpoints], dtype=np.int64),
        nic_gbps=np.array([end.nic_gbps for end in read.endpoints], dtype=np.float64),
        shards=shards,
        seeds_per_pod=read.seeds_per_pod,
        chunk_bytes=read.chunk_bytes,
        hop_latency_s=read.hop_latency_s,
        pairs=None if links is None else pairs_of(pods, links),
    )
