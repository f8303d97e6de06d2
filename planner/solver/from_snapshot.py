"""A snapshot as a makespan problem: what the planner may decide on, and what it cannot see. Pure."""

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
NO_TRANSFER = KvTransferCost(0.0, 0.0, 0.0)  # moved requests are prefilled again


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """The part of the fleet that is decided on: engines that answer and whose configuration is known.

    `requests` are those on them and those that no engine holds, in the snapshot's order; all arrays follow it.
    """

    # With capacities as the engines report them. Gain is judged by plan admission, so epsilon is 0.
    problem: MakespanProblem
    limits: tuple[Configuration, ...]  # [current instance], with the engine's own KV capacity and slots
    requests: tuple[RequestView, ...]
    rows: NDArray[np.int64]  # [request], its place in the snapshot
    may_leave: NDArray[np.bool_]  # [request]: it can be moved at all
    may_rebalance: NDArray[np.bool_]  # [request]: and has not been moved too often
    blocked: Hold | None  # why engines must not be changed, though requests may move
    notes: tuple[str, ...]

    def expecting(self, remaining_tokens: NDArray[np.int64]) -> "LiveFleet":
        """Return it with one estimate of the lengths, which are all 1 at first.

        An engine admits what fits at its longest, so an estimate beyond the largest KV cache means: until that is full.
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
    """What `snapshot` has to decide on. Engines that are gone, answer nonsense, are being drained or run an unknown
    configuration are left alone; requests on engines that are gone count as held by their gateway."""
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
            f"{listed(sorted(strangers))} run an unknown configuration and are left alone with {held} requests"
        )
    if draining:
        held = sum(request.engine in draining for request in snapshot.requests)
        notes.append(f"{listed(sorted(draining))} are being drained and are left alone with {held} requests")
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
    """A fleet for people: `4 x tp2, 1 x tp8`."""
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
    """What a new engine of this configuration will have: what those that run have, half of them at least."""
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
    """Return the GPUs of each of `engines`, how many there are, and why none may be given to another engine.

    Where engines do not say, GPUs are dealt to them to estimate with; they are known only where nothing else is
    possible: a single engine, and just as many GPUs left as it takes.
    """
    said = {e.id: tuple(sorted(e.gpus)) for e in engines if len(set(e.gpus)) == known[_id_of(e)].gpus}
    taken = {int(gpu) for gpus in said.values() for gpu in gpus}
    twice = sum(map(len, said.values())) > len(taken)
    if twice:
        said, taken = {}, set()
    silent = [engine for engine in engines if engine.id not in said]
    configured = max(gpus_count, max(taken, default=-1) + 1)
    of = {**said, **_dealt(silent, known, taken, per_node)}
    needed = max((gpu for gpus in of.values() for gpu in gpus), default=-1) + 1
    count = configured if needed <= configured else -(-needed // per_node) * per_node
    if twice:
        return of, count, _unknown("two engines claim one GPU")
    if needed > configured:
        return of, count, _unknown(f"the engines take more than the {configured} GPUs that are configured")
    certain = len(silent) == 1 and count - len(taken) == known[_id_of(silent[0])].gpus
    if silent and not certain:
        return of, count, _silent(silent)
    return of, count, _lost(all_engines, of, count)


def _lost(all_engines: Sequence[EngineView], of: Mapping[EngineId, Sequence[GpuId]], count: int) -> Hold | None:
    """Why the GPUs that no engine of ours has may not be free all the same: others have them, or had them."""
    free = set(range(count)) - {gpu for gpus in of.values() for gpu in gpus}
    others = [engine for engine in all_engines if engine.id not in of]
    lost = [engine.id for engine in others if free & set(engine.gpus)]
    if lost:
        why = f"the GPUs of {listed(sorted(lost))} cannot be planned with: drained, or nobody knows their state"
        return Hold("gpus_unavailable", why)
    strangers = [engine for engine in others if engine.health in ANSWERING and not engine.gpus]
    return _silent(strangers) if strangers and free else None


def _silent(engines: Sequence[EngineView]) -> Hold:
    return _unknown(f"{listed(sorted(e.id for e in engines))} do not say which GPUs they have (fleet.engines[].gpus)")


def _unknown(why: str) -> Hold:
    return Hold("gpus_unknown", why)


def _dealt(
    engines: Sequence[EngineView], known: Mapping[ConfigurationId, Configuration], taken: Collection[int], per_node: int
) -> dict[EngineId, tuple[GpuId, ...]]:
    """GPUs that nobody has, larger engines first, each inside one node or on whole nodes."""
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
