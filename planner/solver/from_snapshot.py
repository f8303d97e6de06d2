"""Convert a snapshot into a makespan problem, and note which engines and requests are excluded. Has no side effects."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    GpuId,
    Hold,
    RequestState,
    RequestView,
    Snapshot,
    listed,
)
from planner.solver.problem import (
    NEW,
    NOWHERE,
    RUNNING,
    WAITING,
    CurrentInstance,
    KvTransferCost,
    MakespanProblem,
    ProblemRequests,
)

ANSWERING = (EngineHealth.OK, EngineHealth.SLOW)
NO_TRANSFER = KvTransferCost(0.0, 0.0, 0.0)  # moved requests are recomputed


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """The part of the fleet that a plan can change: responding engines with a known configuration.

    `requests` are the requests on these engines and the requests on no engine, in the snapshot's order. All arrays
    follow this order.
    """

    # With capacities as reported by the engines. Plan admission judges the gain, so epsilon is 0.
    problem: MakespanProblem
    limits: tuple[Configuration, ...]  # [current instance], with the engine's own KV capacity and slots
    requests: tuple[RequestView, ...]
    rows: NDArray[np.int64]  # [request], its index in the snapshot
    may_leave: NDArray[np.bool_]  # [request]: it can be moved
    may_rebalance: NDArray[np.bool_]  # [request]: it can be moved and has moves left
    blocked: Hold | None  # why engines must not be changed, although requests may move
    notes: tuple[str, ...]

    def expecting(self, remaining_tokens: NDArray[np.int64]) -> "LiveFleet":
        """Return a copy of the fleet in which each request has the given estimate of its remaining length. Before this
        call, all estimates are 1.

        Estimates are reduced where necessary, so that the full length of each request fits in the largest KV cache.
        Otherwise, no engine would admit the request.
        """
        room = max(configuration.kv_capacity_tokens for configuration in self.problem.configurations)
        context = np.minimum(self.problem.requests.context_tokens, room - 1)
        remaining = np.clip(remaining_tokens, 1, room - context)
        requests = replace(self.problem.requests, context_tokens=context, remaining_tokens=remaining)
        return replace(self, problem=replace(self.problem, requests=requests))


def live_fleet(
    snapshot: Snapshot,
    configurations: Sequence[Configuration],
    gpus_count: int,
    per_node: int,
    max_moves_per_request: int,
    transfer: KvTransferCost = NO_TRANSFER,
    work_budget: int | None = None,
) -> LiveFleet:
    """Return the part of the fleet in `snapshot` that a plan can change.

    Engines that are gone, report invalid values, are draining or run an unknown configuration are excluded. Requests on
    engines that are gone or report invalid values are treated as queued in their gateway.
    """
    known = {configuration.id: configuration for configuration in configurations}
    draining = {engine.id for engine in snapshot.engines if engine.draining and engine.health in ANSWERING}
    answering = [e for e in snapshot.engines if e.health in ANSWERING and not e.draining]
    engines = [engine for engine in answering if engine.configuration in known]
    strangers = {engine.id for engine in answering if engine.configuration not in known}
    gpus_of, gpus_count, blocked = _gpus(snapshot.engines, engines, known, gpus_count, per_node)
    notes = []
    if strangers:
        held = sum(request.engine in strangers for request in snapshot.requests)
        notes.append(
            f"engines with an unknown configuration are excluded, with {held} requests: {listed(sorted(strangers))}"
        )
    if draining:
        held = sum(request.engine in draining for request in snapshot.requests)
        notes.append(f"draining engines are excluded, with {held} requests: {listed(sorted(draining))}")
    alone = strangers | draining
    rows = [row for row, request in enumerate(snapshot.requests) if request.engine not in alone]
    requests = tuple(snapshot.requests[row] for row in rows)
    place = {engine.id: index for index, engine in enumerate(engines)}
    return LiveFleet(
        problem=MakespanProblem(
            gpus_count=gpus_count,
            per_node=per_node,
            configurations=tuple(_as_reported(configuration, engines) for configuration in configurations),
            transfer=transfer,
            current=tuple(CurrentInstance(e.id, _id_of(e), gpus_of[e.id]) for e in engines),
            requests=_columns(requests, place),
            epsilon_s=0.0,
            work_budget=work_budget,
        ),
        limits=tuple(known[_id_of(engine)].limited_as(engine) for engine in engines),
        requests=requests,
        rows=np.array(rows, dtype=np.int64),
        may_leave=np.array([request.movable for request in requests], dtype=np.bool_),
        may_rebalance=np.array([r.movable and r.moves < max_moves_per_request for r in requests], dtype=np.bool_),
        blocked=blocked,
        notes=tuple(notes),
    )


def instances_text(instances: Sequence[ConfigurationId]) -> str:
    """Return a short description of a fleet, such as `4 x tp2, 1 x tp8`."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(instances).items()))


def _columns(requests: Sequence[RequestView], place: Mapping[EngineId, int]) -> ProblemRequests:
    instance = [NOWHERE if r.engine is None else place.get(r.engine, NOWHERE) for r in requests]
    return ProblemRequests(
        ids=tuple(request.id for request in requests),
        context_tokens=np.array([request.context_tokens for request in requests], dtype=np.int64),
        remaining_tokens=np.ones(len(requests), dtype=np.int64),
        instance=np.array(instance, dtype=np.int64),
        state=np.array([_state(r, at) for r, at in zip(requests, instance, strict=True)], dtype=np.int8),
    )


def _state(request: RequestView, instance: int) -> int:
    if instance == NOWHERE:
        return NEW
    return RUNNING if request.state is RequestState.RUNNING else WAITING


def _id_of(engine: EngineView) -> ConfigurationId:
    assert engine.configuration is not None
    return engine.configuration


def _as_reported(configuration: Configuration, engines: Sequence[EngineView]) -> Configuration:
    """Return the configuration with the median limits that its running engines report. New engines are expected to have
    the same limits."""
    alike = [configuration.limited_as(e) for e in engines if e.configuration == configuration.id]
    if not alike:
        return configuration
    return replace(
        configuration,
        kv_capacity_tokens=median_low(other.kv_capacity_tokens for other in alike),
        max_sequences=median_low(other.max_sequences for other in alike),
    )


def _gpus(
    all_engines: Sequence[EngineView],
    engines: Sequence[EngineView],
    known: Mapping[ConfigurationId, Configuration],
    gpus_count: int,
    per_node: int,
) -> tuple[dict[EngineId, tuple[GpuId, ...]], int, Hold | None]:
    """Return the GPUs of each of `engines`, the total number of GPUs, and a Hold if the GPUs must not be assigned to
    other engines (otherwise None).

    Engines that do not report their GPUs are assumed to use free GPUs. This assumption is certain to be right only if
    there is one such engine and the number of free GPUs is exactly its size.
    """
    reported = {e.id: tuple(sorted(e.gpus)) for e in engines if len(set(e.gpus)) == known[_id_of(e)].gpus}
    taken = {int(gpu) for gpus in reported.values() for gpu in gpus}
    twice = sum(map(len, reported.values())) > len(taken)
    if twice:
        reported, taken = {}, set()
    silent = [engine for engine in engines if engine.id not in reported]
    configured = max(gpus_count, max(taken, default=-1) + 1)
    of = {**reported, **_dealt(silent, known, taken, per_node)}
    needed = max((gpu for gpus in of.values() for gpu in gpus), default=-1) + 1
    count = configured if needed <= configured else -(-needed // per_node) * per_node
    if twice:
        return of, count, _unknown("two engines report the same GPU")
    if needed > configured:
        return of, count, _unknown(f"the engines take more than the {configured} configured GPUs")
    certain = len(silent) == 1 and count - len(taken) == known[_id_of(silent[0])].gpus
    if silent and not certain:
        return of, count, _silent(silent)
    return of, count, _lost(all_engines, of, count)


def _lost(all_engines: Sequence[EngineView], of: Mapping[EngineId, Sequence[GpuId]], count: int) -> Hold | None:
    """Return a Hold if engines that are not part of the plan may still use GPUs that seem free. Otherwise, return
    None."""
    free = set(range(count)) - {gpu for gpus in of.values() for gpu in gpus}
    others = [engine for engine in all_engines if engine.id not in of]
    lost = [engine.id for engine in others if free & set(engine.gpus)]
    if lost:
        why = f"GPUs of engines that are draining or in an unknown state cannot be used: {listed(sorted(lost))}"
        return Hold("gpus_unavailable", why)
    strangers = [engine for engine in others if engine.health in ANSWERING and not engine.gpus]
    return _silent(strangers) if strangers and free else None


def _silent(engines: Sequence[EngineView]) -> Hold:
    names = listed(sorted(e.id for e in engines))
    return _unknown(f"the GPUs of {names} are unknown: set fleet.engines[].gpus")


def _unknown(why: str) -> Hold:
    return Hold("gpus_unknown", why)


def _dealt(
    engines: Sequence[EngineView], known: Mapping[ConfigurationId, Configuration], taken: Collection[int], per_node: int
) -> dict[EngineId, tuple[GpuId, ...]]:
    """Return free GPUs for each engine, inside one node or, for an engine larger than a node, on consecutive nodes.
    Larger engines are served first."""
    used = set(taken)
    dealt = {}
    for engine in sorted(engines, key=lambda e: (-known[_id_of(e)].gpus, e.id)):
        need, node = known[_id_of(engine)].gpus, 0
        while engine.id not in dealt:
            nodes = max(1, -(-need // per_node))
            free = [gpu for gpu in range(node * per_node, (node + nodes) * per_node) if gpu not in used]
            if len(free) >= need:
                dealt[engine.id] = tuple(GpuId(gpu) for gpu in free[:need])
                used.update(free[:need])
            node += 1
    return dealt
