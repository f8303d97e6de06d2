"""Check an answer of `orchestrrl plan solve` against its contract, by recomputing every figure from the JSON.

The checks follow the text of the contract alone and use no code of the planner. If the text leaves a choice, the
docstring of the function states the choice.
"""

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

Json = dict[str, Any]
Tokens = tuple[int, int]  # context, remaining

RELATIVE, ABSOLUTE = 1e-9, 1e-9
ANSWER_KEYS = [
    "decision",
    "reason",
    "makespan_s",
    "current_makespan_s",
    "lower_bound_s",
    "gap",
    "solve_s",
    "kv_balance_violation",
    "instances",
    "migrations",
]
INSTANCE_KEYS = [
    "id",
    "configuration",
    "gpus",
    "requests",
    "kept",
    "decode_s",
    "migration_s",
    "switch_s",
    "finish_s",
]
MIGRATION_KEYS = ["request", "from", "to", "method", "cost_s"]


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


# --- the model of one instance


def decode_iteration_by_iteration_s(configuration: Json, held: Sequence[Tokens]) -> float | None:
    """Return the seconds until the last request ends, in exact arithmetic, one iteration at a time.

    Return None if a request can never be admitted.
    """
    alpha, beta, gamma = (Fraction(configuration[name]) for name in ("alpha_s", "beta_s", "gamma_s"))
    queue = list(held)
    running: list[list[int]] = []  # resident, left, footprint
    clock = Fraction(0)
    while queue or running:
        while queue and len(running) < configuration["max_sequences"]:
            context, remaining = queue[0]
            if sum(entry[2] for entry in running) + context + remaining > configuration["kv_capacity_tokens"]:
                break
            running.append([context, remaining, context + remaining])
            queue.pop(0)
        if not running:
            return None
        clock += alpha + beta * len(running) + gamma * sum(entry[0] for entry in running)
        running = [[resident + 1, left - 1, footprint] for resident, left, footprint in running if left > 1]
    return float(clock)


def decode_s(configuration: Json, held: Iterable[Tokens]) -> float | None:
    """Return the same seconds, from one completion to the next: fast enough for large fleets."""
    alpha, beta, gamma = configuration["alpha_s"], configuration["beta_s"], configuration["gamma_s"]
    capacity, slots = configuration["kv_capacity_tokens"], configuration["max_sequences"]
    ends: list[tuple[int, int, int]] = []  # iteration after its last, footprint, context less the iteration it began in
    now, reserved, offset, clock_s = 0, 0, 0, 0.0
    queue = list(held)
    head = 0
    while head < len(queue) or ends:
        while head < len(queue) and len(ends) < slots and reserved + sum(queue[head]) <= capacity:
            context, remaining = queue[head]
            heapq.heappush(ends, (now + remaining, context + remaining, context - now))
            reserved, offset, head = reserved + context + remaining, offset + context - now, head + 1
        if not ends:
            return None
        steps, sequences = ends[0][0] - now, len(ends)
        resident = steps * (offset + sequences * now) + sequences * (steps * (steps - 1) // 2)
        clock_s += steps * (alpha + beta * sequences) + gamma * resident
        now += steps
        while ends and ends[0][0] == now:
            _, footprint, began = heapq.heappop(ends)
            reserved, offset = reserved - footprint, offset - began
    return clock_s


# --- the problem


class Facts:
    """Derived facts of a problem that several checks use."""

    def __init__(self, problem: Json) -> None:
        self.problem = problem
        self.count, self.per_node = problem["gpus"]["count"], problem["gpus"]["per_node"]
        self.configurations: dict[str, Json] = {each["id"]: each for each in problem["configurations"]}
        self.current: dict[str, Json] = {each["id"]: each for each in problem["current"]}
        self.requests: dict[str, Json] = {each["id"]: each for each in problem["requests"]}
        self.kept_id = {(each["configuration"], frozenset(each["gpus"])): each["id"] for each in problem["current"]}

    def tokens(self, ids: Iterable[str]) -> list[Tokens]:
        return [(self.requests[name]["context_tokens"], self.requests[name]["remaining_tokens"]) for name in ids]

    def nodes(self, gpus: Iterable[int]) -> set[int]:
        return {gpu // self.per_node for gpu in gpus}

    def node_gpus(self, node: int) -> set[int]:
        return set(range(node * self.per_node, min((node + 1) * self.per_node, self.count)))

    def transfer_s(self, request: Json, gpus: Sequence[int]) -> float:
        """Return the seconds to transfer a running request's KV to the instance on `gpus`; infinite without a link."""
        source = self.current[request["instance"]]["gpus"]
        transfer = self.problem["transfer"]
        together = len(self.nodes([*source, *gpus])) == 1
        per_gpu = transfer["intra_node_gbps_per_gpu" if together else "inter_node_gbps_per_gpu"]
        rate = min(len(source), len(gpus)) * per_gpu
        bits = request["context_tokens"] * self.problem["kv_bytes_per_token"] * 8
        return float(bits / (rate * 1e9) + transfer["latency_s"]) if rate else math.inf

    def moved(self, request: Json, configuration: str, gpus: Sequence[int]) -> tuple[float, set[str]]:
        """Return the cost of a running request for its new instance, and the cheaper methods: both if they tie."""
        by_transfer = self.transfer_s(request, gpus)
        by_recompute = request["context_tokens"] / self.configurations[configuration]["prefill_tokens_per_s"]
        if same(by_transfer, by_recompute):
            return min(by_transfer, by_recompute), {"transfer", "recompute"}
        return min((by_transfer, {"transfer"}), (by_recompute, {"recompute"}), key=lambda each: each[0])

    def current_placement(self) -> dict[str, list[str]]:
        """Return the current placement: running, then waiting requests in input order, then new ones round robin."""
        placement: dict[str, list[str]] = {name: [] for name in self.current}
        for state in ("running", "waiting"):
            for name, request in self.requests.items():
                if request["state"] == state:
                    placement[request["instance"]].append(name)
        order = list(placement)
        new = [name for name, request in self.requests.items() if request["state"] == "new"]
        for turn, name in enumerate(new):
            placement[order[turn % len(order)]].append(name)
        return placement

    def current_makespan_s(self) -> float | None:
        """Return the current makespan; None without a current fleet or if a request can never be admitted."""
        if not self.current:
            return None
        ends = [
            decode_s(self.configurations[self.current[name]["configuration"]], self.tokens(ids))
            for name, ids in self.current_placement().items()
        ]
        return None if None in ends else max(end for end in ends if end is not None)

    def finish_s(self, configuration: str, gpus: Sequence[int], ids: Sequence[str]) -> tuple[float, float, float]:
        """Return the decode, migration and switch seconds of an instance.

        Raises ValueError if a request can never be admitted.
        """
        decoding = decode_s(self.configurations[configuration], self.tokens(ids))
        if decoding is None:
            raise ValueError(f"a request of {list(ids)[:5]} can never be admitted by {configuration}")
        kept = self.kept_id.get((configuration, frozenset(gpus)))
        moving = [
            self.requests[name]
            for name in ids
            if self.requests[name]["state"] == "running" and self.requests[name]["instance"] != kept
        ]
        migration = sum(self.moved(request, configuration, gpus)[0] for request in moving)
        return decoding, migration, 0.0 if kept else self.configurations[configuration]["switch_s"]

    def placeable(self) -> list[str]:
        """Return the configurations that fit on the nodes, including those that already run."""
        sizes = [len(self.node_gpus(node)) for node in range(math.ceil(self.count / self.per_node))]
        running = {each["configuration"] for each in self.problem["current"]}
        return [
            name
            for name, each in self.configurations.items()
            if name in running
            or (each["gpus"] <= self.per_node and max(sizes, default=0) >= each["gpus"])
            or (each["gpus"] % self.per_node == 0 and each["gpus"] <= sizes.count(self.per_node) * self.per_node)
        ]

    def missing_tokens(self) -> int:
        """Return by how much the longest footprint exceeds the largest capacity; above 0 the problem is infeasible."""
        footprints = [each["context_tokens"] + each["remaining_tokens"] for each in self.requests.values()]
        rooms = [self.configurations[name]["kv_capacity_tokens"] for name in self.placeable()]
        return max(footprints, default=0) - max(rooms, default=0)


def makespan_s(problem: Json, placed: Iterable[tuple[str, Sequence[int], Sequence[str]]]) -> float:
    """Return the makespan of a placement: (configuration, gpus, requests in order of admission) per instance."""
    facts = Facts(problem)
    return max((sum(facts.finish_s(*each)) for each in placed), default=0.0)


# --- the answer


def parse(text: str) -> Json:
    """Return standard output as one JSON object without NaN or infinities. Raises ValueError."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    answer = json.loads(text, parse_constant=refuse)
    if not isinstance(answer, dict):
        raise ValueError(f"not an object: {text[:80]}")
    return answer


def check(problem: Json, answer: Json) -> list[str]:
    """Return the violations of the contract by an answer; empty if it is valid."""
    faults = list(_shape(problem, answer))
    if faults:
        return faults
    facts = Facts(problem)
    return [
        *_placement(facts, answer),
        *_instances(facts, answer),
        *_migrations(facts, answer),
        *_totals(facts, answer),
        *_decision(facts, answer),
    ]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shape(problem: Json, answer: Json) -> Iterable[str]:
    if list(answer) != ANSWER_KEYS:
        yield f"keys of the answer are {list(answer)}, not {ANSWER_KEYS}"
        return
    for name in ("makespan_s", "lower_bound_s", "solve_s"):
        if not _number(answer[name]) or answer[name] < 0:
            yield f"{name} must be a number >= 0, got {answer[name]!r}"
    for name in ("current_makespan_s", "gap", "kv_balance_violation"):
        if answer[name] is not None and not _number(answer[name]):
            yield f"{name} must be null or a number, got {answer[name]!r}"
    if answer["decision"] not in ("reconfigure", "rebalance", "keep"):
        yield f"decision is {answer['decision']!r}"
    if not isinstance(answer["reason"], str) or not answer["reason"]:
        yield f"reason is {answer['reason']!r}"
    known = {each["id"] for each in problem["configurations"]}
    for place, each in enumerate(answer["instances"]):
        numbers = [each.get(name) for name in ("decode_s", "migration_s", "switch_s", "finish_s")]
        if list(each) != INSTANCE_KEYS:
            yield f"keys of instances[{place}] are {list(each)}"
        elif each["configuration"] not in known or not all(map(_number, numbers)) or not isinstance(each["kept"], bool):
            yield f"instances[{place}] has a value of the wrong kind: { {**each, 'requests': ...} }"
    for place, each in enumerate(answer["migrations"]):
        if list(each) != MIGRATION_KEYS or not _number(each["cost_s"]):
            yield f"migrations[{place}] is {each}"


def _placement(facts: Facts, answer: Json) -> Iterable[str]:
    """Check that requests occur exactly once and that GPUs are in range, disjoint, complete and within the node rules.

    "Takes whole nodes" means all `per_node` GPUs of each node, so that a smaller last node is never used.
    """
    times = Counter(name for each in answer["instances"] for name in each["requests"])
    for name in facts.requests:
        if times[name] != 1:
            yield f"request {name} is placed {times[name]} times"
    for name in times.keys() - facts.requests.keys():
        yield f"request {name} does not exist"
    ids = Counter(each["id"] for each in answer["instances"])
    yield from (f"instance id {name!r} is used {n} times" for name, n in ids.items() if n > 1)
    users = Counter(gpu for each in answer["instances"] for gpu in each["gpus"])
    yield from (f"GPU {gpu} is used {n} times" for gpu, n in users.items() if n > 1)
    for each in answer["instances"]:
        gpus, nodes = each["gpus"], facts.nodes(each["gpus"])
        if any(isinstance(gpu, bool) or not isinstance(gpu, int) or not 0 <= gpu < facts.count for gpu in gpus):
            yield f"instance {each['id']} has GPUs outside 0..{facts.count - 1}: {gpus}"
        wanted = facts.configurations[each["configuration"]]["gpus"]
        if len(gpus) != wanted:
            yield f"instance {each['id']} has {len(gpus)} GPUs, its configuration {wanted}"
        if wanted <= facts.per_node and len(nodes) != 1:
            yield f"instance {each['id']} of {wanted} GPUs spans nodes {sorted(nodes)}"
        if wanted > facts.per_node:
            whole = {gpu for node in nodes for gpu in facts.node_gpus(node)} == set(gpus)
            if not whole or any(len(facts.node_gpus(node)) < facts.per_node for node in nodes):
                yield f"instance {each['id']} of {wanted} GPUs does not take whole nodes: {gpus}"


def _instances(facts: Facts, answer: Json) -> Iterable[str]:
    """Check the instances. The id of a current instance belongs only to the instance that keeps it."""
    for each in answer["instances"]:
        name = each["id"]
        kept = facts.kept_id.get((each["configuration"], frozenset(each["gpus"])))
        if each["kept"] != (kept is not None):
            yield f"instance {name}: kept is {each['kept']}, same configuration and GPUs as {kept}"
        if kept is not None and name != kept:
            yield f"instance {name} has the configuration and GPUs of {kept} and not its id"
        if kept is None and name in facts.current:
            yield f"instance {name} is not kept and has a current instance's id"
        if set(each["requests"]) - facts.requests.keys():
            continue
        try:
            parts = facts.finish_s(each["configuration"], each["gpus"], each["requests"])
        except ValueError as error:
            yield f"instance {name}: {error}"
            continue
        for key, expected in zip(
            ("decode_s", "migration_s", "switch_s", "finish_s"), (*parts, sum(parts)), strict=True
        ):
            if not same(each[key], expected):
                yield f"instance {name}: {key} is {each[key]!r}, recomputed {expected!r}"


def _migrations(facts: Facts, answer: Json) -> Iterable[str]:
    expected = {
        request: each
        for each in answer["instances"]
        for request in each["requests"]
        if request in facts.requests
        and facts.requests[request]["state"] == "running"
        and facts.requests[request]["instance"] != each["id"]
    }
    times = Counter(move["request"] for move in answer["migrations"])
    for name in expected.keys() | times.keys():
        if times[name] != (name in expected):
            yield f"migrations name {name} {times[name]} times, it moves {int(name in expected)} times"
    for move in answer["migrations"]:
        target = expected.get(move["request"])
        if target is None:
            continue
        request = facts.requests[move["request"]]
        cost, methods = facts.moved(request, target["configuration"], target["gpus"])
        if (move["from"], move["to"]) != (request["instance"], target["id"]):
            yield f"migration of {move['request']} is {move['from']} -> {move['to']}, not to {target['id']}"
        if move["method"] not in methods or not same(move["cost_s"], cost):
            yield f"migration of {move['request']}: {move['method']} {move['cost_s']!r}, recomputed {methods} {cost!r}"


def kv_violation(facts: Facts, instances: Iterable[tuple[str, Sequence[str]]]) -> float:
    """Return how far the worst instance is outside mu ± delta. An instance without requests has a share of 0."""
    balance = facts.problem["kv_balance"]
    if balance is None:
        return 0.0
    return max(
        (
            max(
                0.0,
                abs(sum(map(sum, facts.tokens(ids))) / facts.configurations[name]["kv_capacity_tokens"] - balance["mu"])
                - balance["delta"],
            )
            for name, ids in instances
        ),
        default=0.0,
    )


def _totals(facts: Facts, answer: Json) -> Iterable[str]:
    makespan, bound = answer["makespan_s"], answer["lower_bound_s"]
    worst = max((each["finish_s"] for each in answer["instances"]), default=0.0)
    if not same(makespan, worst):
        yield f"makespan_s is {makespan!r}, the last instance finishes at {worst!r}"
    if bound > makespan and not same(bound, makespan):
        yield f"lower_bound_s {bound!r} is above makespan_s {makespan!r}"
    expected = makespan / bound - 1 if bound > 0 else 0.0
    if answer["gap"] is None if bound > 0 else answer["gap"] not in (None, 0):
        yield f"gap is {answer['gap']!r} with a bound of {bound!r}"
    elif bound > 0 and not same(answer["gap"], expected):
        yield f"gap is {answer['gap']!r}, recomputed {expected!r}"
    current = facts.current_makespan_s()
    told = answer["current_makespan_s"]
    if told != current and (told is None or current is None or not same(told, current)):
        yield f"current_makespan_s is {told!r}, recomputed {current!r}"
    if not any(set(each["requests"]) - facts.requests.keys() for each in answer["instances"]):
        violation = kv_violation(facts, [(each["configuration"], each["requests"]) for each in answer["instances"]])
        if not same(answer["kv_balance_violation"] or 0.0, violation):
            yield f"kv_balance_violation is {answer['kv_balance_violation']!r}, recomputed {violation!r}"


def _decision(facts: Facts, answer: Json) -> Iterable[str]:
    """Check the decision. A rebalance keeps the whole fleet, and a reconfiguration starts at least one instance.

    An instance is dropped only if another one needs its GPUs.
    """
    decision, makespan, current = answer["decision"], answer["makespan_s"], facts.current_makespan_s()
    epsilon = facts.problem["epsilon_s"]
    fleet = {each["id"] for each in answer["instances"] if each["kept"]}
    unchanged = fleet == facts.current.keys() and len(fleet) == len(answer["instances"])
    if not facts.current and decision != "reconfigure":
        yield f"a first deployment is {decision!r}"
    if decision == "rebalance" and not unchanged:
        yield "a rebalance changes the fleet"
    if decision == "reconfigure" and facts.current and len(fleet) == len(answer["instances"]):
        yield "a reconfiguration starts no instance"
    if decision != "keep" and current is not None and not makespan < current - epsilon + ABSOLUTE:
        yield f"{decision} to {makespan!r} does not gain more than {epsilon!r} on {current!r}"
    if decision == "keep":
        told = {each["id"]: each["requests"] for each in answer["instances"]}
        if not unchanged or told != facts.current_placement():
            yield f"keep is not the current placement: {told}, current {facts.current_placement()}"
        if current is None:
            yield "keep of a placement that can never end"
