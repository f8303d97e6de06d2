"""Models of the JSON documents that `orchestrrl balance`, `plan solve` and `sync plan` read, and checks of these
documents."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from balancer.load_index import Worker
from orchestrrl.cli.output import fields
from orchestrrl.cli.problem import ProblemPart, ids_exist, unique, values_at
from orchestrrl.core.errors import path_of, shorten
from planner.model import EngineId, RequestId, RequestState, RequestView

if TYPE_CHECKING:
    from planner.solver.problem import MakespanProblem
    from planner.sync_tree.model import SyncProblem


MOST_GPUS = 2**20  # larger than any cluster; a larger number is a typing error and would exhaust memory


class GpusPart(ProblemPart):
    count: int = Field(ge=0, le=MOST_GPUS)
    per_node: int = Field(ge=1, le=MOST_GPUS)


class ConfigurationPart(ProblemPart):
    id: str
    gpus: int = Field(ge=1, le=MOST_GPUS)
    alpha_s: float = Field(ge=0)
    beta_s: float = Field(ge=0)
    gamma_s: float = Field(ge=0)
    kv_capacity_tokens: int = Field(ge=1, lt=2**53)
    max_sequences: int = Field(ge=1, lt=2**53)
    prefill_tokens_per_s: float = Field(gt=0)
    switch_s: float = Field(ge=0)


class TransferPart(ProblemPart):
    inter_node_gbps_per_gpu: float = Field(ge=0)
    intra_node_gbps_per_gpu: float = Field(ge=0)
    latency_s: float = Field(ge=0)


class InstancePart(ProblemPart):
    id: str
    configuration: str
    gpus: list[int]


class SolveRequestPart(ProblemPart):
    id: str
    context_tokens: int = Field(ge=0, lt=2**40)
    remaining_tokens: int = Field(ge=1, lt=2**40)
    instance: str | None
    state: Literal["running", "waiting", "new"]


class KvBalancePart(ProblemPart):
    mu: float = Field(ge=0)
    delta: float = Field(ge=0)


class SolveProblem(ProblemPart):
    gpus: GpusPart
    configurations: list[ConfigurationPart]
    kv_bytes_per_token: float = Field(ge=0)
    transfer: TransferPart
    current: list[InstancePart]
    requests: list[SolveRequestPart]
    kv_balance: KvBalancePart | None
    epsilon_s: float = Field(ge=0)
    work_budget: int | None = Field(default=None, ge=0)
    time_budget_s: float | None = Field(default=None, ge=0)


def _places(document: Any) -> Iterator[str]:
    """Check that new requests have no instance, and that running and waiting requests have one. Yield an error message
    for each request that fails the check."""
    for location, request in values_at(document, "requests[]", dict):
        if "instance" not in request:
            continue
        state, instance = request.get("state"), request["instance"]
        if state == "new" and instance is not None:
            yield f"{path_of((*location, 'instance'))}: must be null for a new request, got {shorten(instance)}"
        if state in ("running", "waiting") and instance is None:
            yield f"{path_of((*location, 'instance'))}: must name an instance for a {state} request, got None"


def _gpus(document: Any) -> Iterator[str]:
    """Check that the GPUs of each instance exist, are used only once, match the number of GPUs in the instance's
    configuration, and are inside one node or fill whole nodes."""
    count, per_node = (
        next((size for _, size in values_at(document, f"gpus.{name}", int) if size >= 0), None)
        for name in ("count", "per_node")
    )
    sizes = {
        part["id"]: part["gpus"]
        for _, part in values_at(document, "configurations[]", dict)
        if isinstance(part.get("id"), str) and type(part.get("gpus")) is int
    }
    first: dict[int, str] = {}
    for location, instance in values_at(document, "current[]", dict):
        gpus, path = instance.get("gpus"), path_of((*location, "gpus"))
        if not isinstance(gpus, list):
            continue
        for inner, gpu in values_at(instance, "gpus[]", int):
            at = path_of((*location, *inner))
            if gpu < 0 or (count is not None and gpu >= count):
                yield f"{at}: does not exist, got {gpu}"
            elif first.setdefault(gpu, at) != at:
                yield f"{at}: is already used by {first[gpu]}, got {gpu}"
        name = instance.get("configuration")
        size = sizes.get(name) if isinstance(name, str) else None
        if size is not None and len(gpus) != size:
            yield f"{path}: must be the {size} GPUs of {name}, got {shorten(gpus)}"
        elif per_node and size and all(type(gpu) is int for gpu in gpus):
            yield from _node_faults(path, gpus, per_node)


def _node_faults(path: str, gpus: list[int], per_node: int) -> Iterator[str]:
    nodes = {gpu // per_node for gpu in gpus}
    if len(gpus) <= per_node:
        if len(nodes) > 1:
            yield f"{path}: must lie inside one node of {per_node} GPUs, got {shorten(gpus)}"
    elif len(nodes) * per_node != len(gpus):
        yield f"{path}: must be whole nodes of {per_node} GPUs, got {shorten(gpus)}"


SOLVE_CHECKS = (
    unique("configurations[].id"),
    unique("current[].id"),
    unique("requests[].id"),
    ids_exist("current[].configuration", "configurations[].id"),
    ids_exist("requests[].instance", "current[].id"),
    _places,
    _gpus,
)


def makespan_problem_of(read: SolveProblem) -> "MakespanProblem":
    import numpy as np

    from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId
    from planner.solver.problem import (
        NEW,
        NOWHERE,
        RUNNING,
        WAITING,
        CurrentInstance,
        KvBalance,
        KvTransferCost,
        MakespanProblem,
        ProblemRequests,
    )

    places: dict[str | None, int] = {each.id: place for place, each in enumerate(read.current)}
    places[None] = NOWHERE
    states = {"running": RUNNING, "waiting": WAITING, "new": NEW}
    return MakespanProblem(
        gpus_count=read.gpus.count,
        per_node=read.gpus.per_node,
        **fields(read, "epsilon_s work_budget"),
        configurations=tuple(
            Configuration(**{**each.model_dump(), "id": ConfigurationId(each.id)}) for each in read.configurations
        ),
        transfer=KvTransferCost(**read.transfer.model_dump(), kv_bytes_per_token=read.kv_bytes_per_token),
        current=tuple(
            CurrentInstance(
                EngineId(each.id), ConfigurationId(each.configuration), tuple(GpuId(gpu) for gpu in sorted(each.gpus))
            )
            for each in read.current
        ),
        requests=ProblemRequests(
            ids=tuple(RequestId(each.id) for each in read.requests),
            context_tokens=np.array([each.context_tokens for each in read.requests], dtype=np.int64),
            remaining_tokens=np.array([each.remaining_tokens for each in read.requests], dtype=np.int64),
            instance=np.array([places[each.instance] for each in read.requests], dtype=np.int64),
            state=np.array([states[each.state] for each in read.requests], dtype=np.int8),
        ),
        kv_balance=None if read.kv_balance is None else KvBalance(read.kv_balance.mu, read.kv_balance.delta),
    )


SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 2**60  # values outside are typing errors
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
    links: list[LinkPart] | None = None  # None: circuits can join any two PoDs, at `link_gbps`


def _tors(document: Any) -> Iterator[str]:
    """Check that each ToR has an entry in `tor_circuits` and belongs to only one PoD."""
    circuits = document.get("tor_circuits") if isinstance(document, dict) else None
    pod_of: dict[str, Any] = {}
    for location, end in values_at(document, "endpoints[]", dict):
        tor = end.get("tor")
        if not isinstance(tor, str):
            continue
        path = path_of((*location, "tor"))
        if isinstance(circuits, dict) and tor not in circuits:
            yield f"{path}: must have an entry in tor_circuits, got {shorten(tor)}"
        if pod_of.setdefault(tor, end.get("pod")) != end.get("pod"):
            yield f"{path}: is already in PoD {shorten(pod_of[tor])}, got {shorten(tor)}"


def _check_holders(document: Any) -> Iterator[str]:
    for location, shard in values_at(document, "shards[]", dict):
        if shard.get("receivers") and shard.get("holders") == []:
            yield f"{path_of((*location, 'holders'))}: must not be empty if the shard has receivers, got []"
        for field in ("holders", "receivers"):
            named: set[str] = set()
            for inner, name in values_at(shard, f"{field}[]", str):
                if name in named:
                    yield f"{path_of((*location, *inner))}: must be named only once, got {shorten(name)} again"
                named.add(name)


def _links(document: Any) -> Iterator[str]:
    """Check that each link joins two different PoDs and that no two links join the same pair of PoDs."""
    joined: set[frozenset[str]] = set()
    for location, link in values_at(document, "links[]", dict):
        ends = [end for _, end in values_at(link, "a|b", str)]
        if len(ends) < 2:
            continue
        pods = frozenset(ends)
        if len(pods) == 1:
            yield f"{path_of((*location, 'b'))}: must differ from a, got {shorten(ends[1])}"
        elif pods in joined:
            yield f"{path_of(location)}: must join a pair that no other link joins, got {shorten(link)}"
        joined.add(pods)


SYNC_CHECKS = (
    unique("pods[].id"),
    unique("endpoints[].id"),
    unique("shards[].id"),
    ids_exist("endpoints[].pod", "pods[].id"),
    ids_exist("shards[].holders|receivers[]", "endpoints[].id"),
    ids_exist("links[].a|b", "pods[].id"),
    _tors,
    _check_holders,
    _links,
)


def sync_problem_of(read: SyncPlanProblem) -> "SyncProblem":
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
        pods=tuple(pods),
        boundary_circuits=np.array([pod.boundary_circuits for pod in read.pods], dtype=np.int64),
        tors=tuple(tors),
        tor_gbps=np.array([circuits * read.link_gbps for circuits in read.tor_circuits.values()], dtype=np.float64),
        endpoints=tuple(ends),
        pod=np.array([pods[end.pod] for end in read.endpoints], dtype=np.int64),
        tor=np.array([tors[end.tor] for end in read.endpoints], dtype=np.int64),
        nic_gbps=np.array([end.nic_gbps for end in read.endpoints], dtype=np.float64),
        shards=shards,
        **fields(read, "link_gbps chunk_bytes hop_latency_s"),
        pairs=None if links is None else pairs_of(pods, links),
    )


class BalanceRequestPart(ProblemPart):
    id: str
    context_tokens: int = Field(ge=0)


class WorkerPart(ProblemPart):
    id: str
    running: list[BalanceRequestPart]
    waiting: list[BalanceRequestPart]
    kv_capacity_tokens: int = Field(ge=0)
    kv_free_tokens: int = Field(ge=0)
    max_sequences: int = Field(ge=0)
    decode_tokens_per_s: float | None = Field(ge=0)


class BalanceDocument(ProblemPart):
    theta: float = Field(ge=0)
    workers: list[WorkerPart]


BALANCE_CHECKS = (unique("workers[].id"), unique("workers[].running[].id", "workers[].waiting[].id"))


def workers_of(read: BalanceDocument) -> list[Worker]:
    return [
        Worker(
            id=EngineId(worker.id),
            running=_requests(worker, RequestState.RUNNING),
            waiting=_requests(worker, RequestState.WAITING),
            **fields(worker, "kv_capacity_tokens kv_free_tokens max_sequences decode_tokens_per_s"),
        )
        for worker in read.workers
    ]


def _requests(worker: WorkerPart, state: RequestState) -> tuple[RequestView, ...]:
    parts = worker.running if state is RequestState.RUNNING else worker.waiting
    return tuple(RequestView(RequestId(part.id), EngineId(worker.id), state, part.context_tokens, 0) for part in parts)
