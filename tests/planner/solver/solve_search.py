"""Find the optimum of a problem of `orchestrrl plan solve`: exactly if it is small, and over static fleets.

`literal_best_s` enumerates everything. `best_s` uses two consequences of the contract's model: the choice of GPUs in a
node only affects which instances can be kept, and instances end independently.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from solve_oracle import Facts, Json, decode_s, makespan_s

Seconds = NDArray[np.float64]  # [mask of requests]
Placed = tuple[str, Sequence[int], Sequence[str]]  # configuration, GPUs, requests in order of admission

EVERY_ORDER = 6  # number of requests up to which all orders of admission are tried


# --- full enumeration


def literal_best_s(problem: Json) -> float:
    """Return the optimum over every fleet, assignment and order of admission, for up to 4 GPUs and 4 requests."""
    facts = Facts(problem)

    @cache
    def alone_s(configuration: str, gpus: tuple[int, ...], held: tuple[str, ...]) -> float:
        return min(_finish_s(facts, configuration, gpus, order) for order in permutations(held))

    best = math.inf
    for fleet in _fleets(facts, tuple(range(facts.count))):
        for places in product(range(len(fleet)), repeat=len(facts.requests)):
            dealt = list(zip(facts.requests, places, strict=True))
            held = [tuple(name for name, at in dealt if at == place) for place in range(len(fleet))]
            best = min(best, max((alone_s(*each, ids) for each, ids in zip(fleet, held, strict=True)), default=0.0))
    return best


def _finish_s(facts: Facts, configuration: str, gpus: Sequence[int], order: Sequence[str]) -> float:
    try:
        return sum(facts.finish_s(configuration, gpus, order))
    except ValueError:
        return math.inf


def _fleets(facts: Facts, free: tuple[int, ...]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    if not free:
        yield []
        return
    yield from _fleets(facts, free[1:])
    for name, configuration in facts.configurations.items():
        for others in combinations(free[1:], configuration["gpus"] - 1):
            gpus = (free[0], *others)
            if allowed(facts, gpus):
                for rest in _fleets(facts, tuple(gpu for gpu in free if gpu not in gpus)):
                    yield [(name, gpus), *rest]


def allowed(facts: Facts, gpus: Sequence[int]) -> bool:
    """Return whether the GPUs are inside one node or are whole nodes."""
    nodes = facts.nodes(gpus)
    if len(gpus) <= facts.per_node:
        return len(nodes) == 1
    return len(gpus) == len(nodes) * facts.per_node


# --- exactly, for up to about 16 GPUs and 10 requests


def best_s(problem: Json) -> float:
    """Return the optimal makespan, or an achievable one if more than EVERY_ORDER requests do not fit at once."""
    return _Search(problem).best_s()


class _Search:
    """Computes the best seconds by set of requests for an instance, for the instances of a node, and for a fleet."""

    def __init__(self, problem: Json) -> None:
        self.facts = Facts(problem)
        self.ids = list(self.facts.requests)
        self.whole, self.part, self.starts = _splits(len(self.ids))
        self.none: Seconds = np.full(1 << len(self.ids), np.inf)
        self.none[0] = 0.0
        self.decode = {name: self._decode(each) for name, each in self.facts.configurations.items()}

    def best_s(self) -> float:
        nodes = range(math.ceil(self.facts.count / self.facts.per_node))
        alone = {node: self._node(node) for node in nodes}
        wide: list[tuple[frozenset[int], Seconds]] = list(self._wide(nodes))

        @cache
        def over(free: frozenset[int]) -> bytes:
            """Return the best seconds by set of requests for a fleet on these nodes."""
            if not free:
                return self.none.tobytes()
            first = min(free)
            best = self._both(_array(over(free - {first})), alone[first])
            for taken, cost in wide:
                if first in taken and taken <= free:
                    best = np.minimum(best, self._both(_array(over(free - taken)), cost))
            return best.tobytes()

        return float(_array(over(frozenset(nodes)))[-1])

    def _both(self, one: Seconds, other: Seconds) -> Seconds:
        """Return the best seconds by set of requests, split between two parts."""
        worst = np.maximum(one[self.whole ^ self.part], other[self.part])
        return np.asarray(np.minimum.reduceat(worst, self.starts))

    def _decode(self, configuration: Json) -> Seconds:
        seconds = self.none.copy()
        for mask in range(1, len(seconds)):
            held = [request for bit, request in enumerate(self.facts.requests.values()) if mask >> bit & 1]
            for order in _orders(configuration, held):
                end = decode_s(configuration, [(each["context_tokens"], each["remaining_tokens"]) for each in order])
                if end is None:
                    break
                seconds[mask] = min(seconds[mask], end)
        return seconds

    def _cost(self, configuration: str, gpus: Sequence[int], kept: str | None) -> Seconds:
        """Return the seconds of one instance. Without requests it costs nothing, because it is idle or omitted."""
        seconds = self.decode[configuration].copy()
        for bit, request in enumerate(self.facts.requests.values()):
            if request["state"] == "running" and request["instance"] != kept:
                having = np.arange(len(seconds)) >> bit & 1 == 1
                seconds[having] += self.facts.moved(request, configuration, gpus)[0]
        seconds[1:] += 0.0 if kept else self.facts.configurations[configuration]["switch_s"]
        return seconds

    def _node(self, node: int) -> Seconds:
        """Return the best seconds of a node, over every subset of its kept instances and new ones on the other GPUs."""
        gpus = sorted(self.facts.node_gpus(node))
        here = [each for each in self.facts.current.values() if set(each["gpus"]) <= set(gpus)]
        fresh = [self.none] * (len(gpus) + 1)  # [GPUs], the best seconds of new instances on that many GPUs
        kinds = {
            name: self._cost(name, gpus[: each["gpus"]], None)
            for name, each in self.facts.configurations.items()
            if each["gpus"] <= len(gpus)
        }
        for size in range(1, len(gpus) + 1):
            fresh[size] = fresh[size - 1]
            for name, cost in kinds.items():
                wanted = self.facts.configurations[name]["gpus"]
                if wanted <= size:
                    fresh[size] = np.minimum(fresh[size], self._both(fresh[size - wanted], cost))
        keeping = [self._cost(each["configuration"], each["gpus"], each["id"]) for each in here]
        best = self.none
        for kept in product((False, True), repeat=len(here)):
            used = [place for place, keep in enumerate(kept) if keep]
            seconds = fresh[len(gpus) - sum(len(here[place]["gpus"]) for place in used)]
            for place in used:
                seconds = self._both(seconds, keeping[place])
            best = np.minimum(best, seconds)
        return best

    def _wide(self, nodes: range) -> Iterator[tuple[frozenset[int], Seconds]]:
        """Yield instances that span several nodes, on every set of nodes with exactly their GPUs."""
        full = [node for node in nodes if len(self.facts.node_gpus(node)) == self.facts.per_node]
        for name, configuration in self.facts.configurations.items():
            for taken in (each for size in range(2, len(full) + 1) for each in combinations(full, size)):
                gpus = sorted(set().union(*map(self.facts.node_gpus, taken)))
                if configuration["gpus"] == len(gpus):
                    kept = self.facts.kept_id.get((name, frozenset(gpus)))
                    yield frozenset(taken), self._cost(name, gpus, kept)


def _array(raw: bytes) -> Seconds:
    return np.frombuffer(raw, dtype=np.float64)


def _splits(requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs (set, subset), and the index at which each set's pairs begin."""
    wholes, parts, starts = [], [], []
    for whole in range(1 << requests):
        starts.append(len(wholes))
        part = whole
        while True:
            wholes.append(whole)
            parts.append(part)
            if part == 0:
                break
            part = (part - 1) & whole
    return np.array(wholes), np.array(parts), np.array(starts)


def _orders(configuration: Json, held: list[Json]) -> Iterator[Sequence[Json]]:
    """Return the orders of admission to try; a single one if all requests run at once."""
    footprints = [each["context_tokens"] + each["remaining_tokens"] for each in held]
    if len(held) <= configuration["max_sequences"] and sum(footprints) <= configuration["kv_capacity_tokens"]:
        yield held
    elif len(held) <= EVERY_ORDER:
        yield from permutations(held)
    else:
        keys: list[Callable[[Json], Any]] = [
            lambda each: -each["remaining_tokens"],
            lambda each: each["remaining_tokens"],
            lambda each: -each["context_tokens"] - each["remaining_tokens"],
            lambda each: each["context_tokens"] + each["remaining_tokens"],
        ]
        yield from (sorted(held, key=key) for key in keys)


# --- static fleets: one configuration, longest first onto the least loaded


def static_fleets(problem: Json) -> Iterator[list[Placed]]:
    """Return static fleets of one configuration on all nodes, from the first GPU on or around its current instances.

    Load is measured in requests, in remaining tokens, or in seconds of work.
    """
    facts = Facts(problem)
    order = sorted(facts.requests.values(), key=lambda each: (-each["remaining_tokens"], each["id"]))
    for name, configuration in facts.configurations.items():
        footprints = [each["context_tokens"] + each["remaining_tokens"] for each in order]
        if max(footprints, default=0) > configuration["kv_capacity_tokens"]:
            continue
        for around in (False, True) if facts.current else (False,):
            fleet = _one_configuration(facts, name, around)
            for load in (_count, _tokens, _work):
                if fleet:
                    yield _least_loaded(name, fleet, order, lambda each, c=configuration, f=load: f(c, each))


def best_static_s(problem: Json) -> float:
    """Return the best makespan of a static fleet; infinite if no single configuration serves every request."""
    return min((makespan_s(problem, placed) for placed in static_fleets(problem)), default=math.inf)


def _count(_: Json, __: Json) -> float:
    return 1.0


def _tokens(_: Json, request: Json) -> float:
    return float(request["remaining_tokens"])


def _work(configuration: Json, request: Json) -> float:
    context, remaining = request["context_tokens"], request["remaining_tokens"]
    held = context * remaining + remaining * (remaining - 1) // 2
    return float(configuration["beta_s"] * remaining + configuration["gamma_s"] * held)


def _one_configuration(facts: Facts, name: str, around: bool) -> list[list[int]]:
    """Return the GPUs of each instance. An instance of several nodes takes the next free nodes with its GPUs."""
    wanted = facts.configurations[name]["gpus"]
    fleet = [sorted(each["gpus"]) for each in facts.current.values() if around and each["configuration"] == name]
    taken = {gpu for gpus in fleet for gpu in gpus}
    gathered: list[int] = []
    for node in range(math.ceil(facts.count / facts.per_node)):
        gpus = sorted(facts.node_gpus(node) - taken)
        if wanted <= facts.per_node:
            fleet += [gpus[at : at + wanted] for at in range(0, len(gpus) - wanted + 1, wanted)]
        elif len(gpus) == facts.per_node:
            gathered += gpus
            if len(gathered) == wanted:
                fleet, gathered = [*fleet, gathered], []
    return fleet


def _least_loaded(name: str, fleet: list[list[int]], order: list[Json], load: Callable[[Json], float]) -> list[Placed]:
    heap = [(0.0, place) for place in range(len(fleet))]
    held: list[list[str]] = [[] for _ in fleet]
    for request in order:
        so_far, place = heapq.heappop(heap)
        held[place].append(request["id"])
        heapq.heappush(heap, (so_far + load(request), place))
    return [(name, gpus, ids) for gpus, ids in zip(fleet, held, strict=True) if ids]
