"""`orchestrrl plan solve`: the fleet and the placement of requests that end soonest, for a problem in a file."""

import gc
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from orchestrrl.cli.formats import duration, ranges, seconds
from orchestrrl.cli.groups import RUNNING_DAEMON, group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors
from orchestrrl.cli.plan_example import print_example
from orchestrrl.cli.problem import ProblemFile, ProblemPart, infeasible, known, read_problem, unique, values_at
from orchestrrl.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.problem import Placed, Problem, Solution

LINES_SHOWN = 40  # instances; beyond that they are shown in groups
MOST_GPUS = 2**20  # beyond any cluster; what is more is a slip, and would take all memory

HELP = """Say which engines to run on which GPUs, and which request each decodes, so that the last one ends soonest.

Reads one JSON problem: `gpus`, `configurations`, the `current` instances, `requests` with their estimated remaining
tokens, and what moving and switching cost. Prints the decision with a proven lower bound. Nothing is changed.

Example:

    orchestrrl plan solve --print-example > problem.json

    orchestrrl plan solve problem.json

    orchestrrl plan solve - --json < problem.json
"""


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


class RequestPart(ProblemPart):
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
    requests: list[RequestPart]
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
    known("current[].configuration", "configurations[].id"),
    known("requests[].instance", "current[].id"),
    _places,
    _gpus,
)


def register(app: typer.Typer) -> None:
    plans = group(app, "plan", "What the planner proposes and why; override, pin and release it.", RUNNING_DAEMON)
    plans.command("solve", help=HELP)(solve_problem)


ExampleFlag = Annotated[
    bool,
    typer.Option("--print-example", help="Print an example problem and stop.", callback=print_example, is_eager=True),
]


def solve_problem(file: ProblemFile, as_json: JsonFlag = False, _example: ExampleFlag = False) -> None:
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from planner.makespan import Infeasible, solve

    gc.disable()  # the process ends soon, and looking through so many requests again and again is slow
    with reporting_errors():
        read = read_problem(file, SolveProblem, CHECKS)
        problem = _problem(read)
        started_s = time.perf_counter()
        until_s = math.inf if read.time_budget_s is None else started_s + read.time_budget_s
        try:
            solution = solve(problem, stop=lambda: time.perf_counter() > until_s)
        except Infeasible as missed:
            infeasible(missed.limit, missed.needed, missed.available, missed.unit)
        result = _json(problem, solution)
        result["solve_s"] = time.perf_counter() - started_s
    if as_json:
        print_json(result)
    else:
        _show(solution, result["solve_s"], banded=read.kv_balance is not None)


def _problem(read: SolveProblem) -> "Problem":
    import numpy as np

    from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId
    from planner.problem import NEW, NOWHERE, RUNNING, WAITING, Instance, KvBalance, Problem, Requests, Transfer

    places: dict[str | None, int] = {each.id: place for place, each in enumerate(read.current)}
    places[None] = NOWHERE
    states = {"running": RUNNING, "waiting": WAITING, "new": NEW}
    return Problem(
        gpus_count=read.gpus.count,
        per_node=read.gpus.per_node,
        configurations=tuple(
            Configuration(**{**each.model_dump(), "id": ConfigurationId(each.id)}) for each in read.configurations
        ),
        kv_bytes_per_token=read.kv_bytes_per_token,
        transfer=Transfer(**read.transfer.model_dump()),
        current=tuple(
            Instance(
                EngineId(each.id), ConfigurationId(each.configuration), tuple(GpuId(gpu) for gpu in sorted(each.gpus))
            )
            for each in read.current
        ),
        requests=Requests(
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


def _json(problem: "Problem", solution: "Solution") -> dict[str, Any]:
    ids = problem.requests.ids
    return {
        "decision": solution.decision,
        "reason": solution.reason,
        "makespan_s": solution.makespan_s,
        "current_makespan_s": solution.current_makespan_s,
        "lower_bound_s": solution.lower_bound_s,
        "gap": solution.gap,
        "solve_s": 0.0,
        "kv_balance_violation": solution.kv_balance_violation,
        "instances": [
            {
                "id": placed.id,
                "configuration": placed.configuration,
                "gpus": list(placed.gpus),
                "requests": [ids[request] for request in placed.requests.tolist()],
                "kept": placed.kept,
                "decode_s": placed.decode_s,
                "migration_s": placed.migration_s,
                "switch_s": placed.switch_s,
                "finish_s": placed.finish_s,
            }
            for placed in solution.instances
        ],
        "migrations": [
            {
                "request": ids[move.request],
                "from": move.source,
                "to": move.destination,
                "method": move.method,
                "cost_s": move.cost_s,
            }
            for move in solution.migrations
        ],
    }


def _show(solution: "Solution", solve_s: float, banded: bool) -> None:
    print_lines(
        [
            f"[bold]{solution.decision}[/bold]: {solution.reason}",
            f"makespan {seconds(solution.makespan_s)}; as placed now {seconds(solution.current_makespan_s)};"
            f" no placement ends before {seconds(solution.lower_bound_s)} (gap {_gap(solution)});"
            f" solved in {duration(solve_s)}",
        ]
    )
    rows = _grouped(solution.instances) if len(solution.instances) > LINES_SHOWN else map(_row, solution.instances)
    print_table(
        "Instances",
        ("instance", "configuration", "GPUs", "requests", "kept", "decode", "migration", "switch", "finish"),
        rows,
    )
    if banded:
        print_lines([f"KV balance: the worst instance misses the band by {solution.kv_balance_violation * 100:.2f} %"])
    if solution.migrations:
        transfers = sum(move.method == "transfer" for move in solution.migrations)
        print_lines(
            [
                f"{len(solution.migrations):,} running requests move: {transfers:,} by transfer,"
                f" {len(solution.migrations) - transfers:,} rebuilt"
            ]
        )


def _gap(solution: "Solution") -> str:
    return "unknown" if solution.gap is None else f"{solution.gap * 100:.2f} %"


def _row(placed: "Placed") -> tuple[object, ...]:
    return (
        placed.id,
        placed.configuration,
        ranges(placed.gpus),
        len(placed.requests),
        "yes" if placed.kept else "no",
        seconds(placed.decode_s),
        seconds(placed.migration_s),
        seconds(placed.switch_s),
        seconds(placed.finish_s),
    )


def _grouped(instances: "tuple[Placed, ...]") -> Iterator[tuple[object, ...]]:
    groups: dict[tuple[str, bool], list[Placed]] = {}
    for placed in instances:
        groups.setdefault((placed.configuration, placed.kept), []).append(placed)
    for (configuration, kept), members in groups.items():
        yield (
            f"{len(members):,} instances",
            configuration,
            f"{sum(len(placed.gpus) for placed in members):,}",
            f"{sum(len(placed.requests) for placed in members):,}",
            "yes" if kept else "no",
            *(
                f"up to {seconds(max(getattr(placed, name) for placed in members))}"
                for name in ("decode_s", "migration_s", "switch_s", "finish_s")
            ),
        )
