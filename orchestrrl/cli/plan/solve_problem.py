"""The problem of `orchestrrl plan solve` as a document."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from orchestrrl.cli.problem import ProblemPart, ids_exist, unique, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.solver.problem import MakespanProblem

MOST_GPUS = 2**20  # beyond any cluster; what is more is a slip, and would take all memory


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
    """A request that is new is nowhere; any other is somewhere."""
    for location, request in values_at(document, "requests[]"):
        if not isinstance(request, dict) or "instance" not in request:
            continue
        state, instance = request.get("state"), request["instance"]
        if state == "new" and instance is not None:
            yield f"{path_of((*location, 'instance'))}: must be null for a new request, got {shorten(instance)}"
        if state in ("running", "waiting") and instance is None:
            yield f"{path_of((*location, 'instance'))}: must name an instance for a {state} request, got None"


def _gpus(document: Any) -> Iterator[str]:
    """Instances hold as many GPUs as their configuration takes, that exist, once each, in nodes as they may lie."""
    count, per_node = (_whole(document, f"gpus.{name}") for name in ("count", "per_node"))
    sizes = {
        part["id"]: part["gpus"]
        for _, part in values_at(document, "configurations[]")
        if isinstance(part, dict) and isinstance(part.get("id"), str) and type(part.get("gpus")) is int
    }
    first: dict[int, str] = {}
    for location, instance in values_at(document, "current[]"):
        gpus = instance.get("gpus") if isinstance(instance, dict) else None
        if not isinstance(gpus, list):
            continue
        path = path_of((*location, "gpus"))
        for place, gpu in enumerate(gpus):
            if type(gpu) is not int:
                continue
            if gpu < 0 or (count is not None and gpu >= count):
                yield f"{path}[{place}]: does not exist, got {gpu}"
            elif first.setdefault(gpu, f"{path}[{place}]") != f"{path}[{place}]":
                yield f"{path}[{place}]: is used already by {first[gpu]}, got {gpu}"
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


def _whole(document: Any, pattern: str) -> int | None:
    return next((value for _, value in values_at(document, pattern) if type(value) is int and value >= 0), None)


CHECKS = (
    unique("configurations[].id"),
    unique("current[].id"),
    unique("requests[].id"),
    ids_exist("current[].configuration", "configurations[].id"),
    ids_exist("requests[].instance", "current[].id"),
    _places,
    _gpus,
)


def problem_of(read: SolveProblem) -> "MakespanProblem":
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
        configurations=tuple(
            Configuration(**{**each.model_dump(), "id": ConfigurationId(each.id)}) for each in read.configurations
        ),
        kv_bytes_per_token=read.kv_bytes_per_token,
        transfer=KvTransferCost(**read.transfer.model_dump()),
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
        epsilon_s=read.epsilon_s,
        kv_balance=None if read.kv_balance is None else KvBalance(read.kv_balance.mu, read.kv_balance.delta),
        work_budget=read.work_budget,
    )
