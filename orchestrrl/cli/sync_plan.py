"""`orchestrrl sync plan`: how a weight version reaches every engine, for a site and shards in a file."""

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import sync_group
from orchestrrl.cli.output import (
    EXIT_INFEASIBLE,
    JsonFlag,
    fail,
    print_json,
    print_lines,
    print_table,
    reporting_errors,
)
from orchestrrl.cli.problem import ProblemFile, ProblemPart, known, read_problem, unique, values_at
from orchestrrl.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.sync_tree.model import SyncPlan, SyncProblem, Wave

SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 2**60  # what goes beyond is a slip
MOST_CIRCUITS = 2**20
ROWS_SHOWN = 30  # waves


def _example() -> dict[str, Any]:
    pods = [{"id": "train0", "role": "train", "boundary_circuits": 4}]
    pods += [{"id": f"gen{number}", "role": "gen", "boundary_circuits": 4} for number in range(3)]
    names = {pod["id"]: [f"{pod['id']}-{number}" for number in range(8)] for pod in pods}
    ends = [
        {"id": name, "pod": pod, "tor": f"{pod}-tor{number // 4}", "nic_gbps": 200}
        for pod, inside in names.items()
        for number, name in enumerate(inside)
    ]
    receivers = [name for pod, inside in names.items() if pod != "train0" for name in inside]
    return {
        "link_gbps": 200,
        "pods": pods,
        "endpoints": ends,
        "tor_circuits": {str(end["tor"]): 4 for end in ends},
        "shards": [
            {
                "id": f"layers{number}",
                "bytes": 2_000_000_000,
                "holders": [names["train0"][number], names["train0"][number + 4]],
                "receivers": receivers[number % 2 :: 2],
            }
            for number in range(4)
        ],
        "seeds_per_pod": 1,
        "chunk_bytes": 4_194_304,
        "hop_latency_s": 1e-5,
    }


HELP = """Plan a tree broadcast of new weights: who sends which bytes to whom, in waves.

Reads one JSON problem: `link_gbps`; `pods` with the circuits that may cross their boundary; `endpoints` with their PoD,
ToR and NIC; `tor_circuits`, upwards; `shards`, each with its `bytes`, who holds it and who receives it;
`seeds_per_pod`, how many may receive the same bytes from outside; `chunk_bytes` and `hop_latency_s` of what is
forwarded while it comes. Phase A crosses PoDs over circuits, phase B fans out inside. The estimate is the model's time
of the very waves that are printed, beside a bound that no plan beats and the best that every receiver straight from a
holder could do. Nothing is sent. Exit status 3: a PoD or ToR has no circuits and shards have to pass it.

Where PoDs are joined as they are, by circuits that exist or by Ethernet across sites, `links` say which two, with how
many circuits in each direction, of which rate: `[{"a", "b", "circuits", "gbps"}]`. There is no way but these then.

Example:

    orchestrrl sync plan --print-example > sync.json

    orchestrrl sync plan sync.json

    orchestrrl sync plan - --json < sync.json
"""


class PodPart(ProblemPart):
    id: str
    role: Annotated[str, Field(pattern="^(train|gen)$")]
    boundary_circuits: int = Field(ge=0, le=MOST_CIRCUITS)


class EndpointPart(ProblemPart):
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
    pods: list[PodPart]
    endpoints: list[EndpointPart]
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


def _held(document: Any) -> Iterator[str]:
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
    known("endpoints[].pod", "pods[].id"),
    known("shards[].holders[]", "endpoints[].id"),
    known("shards[].receivers[]", "endpoints[].id"),
    known("links[].a", "pods[].id"),
    known("links[].b", "pods[].id"),
    _tors,
    _held,
    _links,
)


def register(app: typer.Typer) -> None:
    sync_group(app).command("plan", help=HELP)(plan_sync)


def _print_example(wanted: bool) -> None:
    if wanted:
        print_json(_example())
        raise typer.Exit


ExampleFlag = Annotated[
    bool,
    typer.Option("--print-example", help="Print an example problem and stop.", callback=_print_example, is_eager=True),
]


def plan_sync(file: ProblemFile, as_json: JsonFlag = False, _example: ExampleFlag = False) -> None:
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from planner.sync_tree.model import Unreachable
    from planner.sync_tree.plan import make_plan

    with reporting_errors():
        problem = _problem(read_problem(file, SyncPlanProblem, CHECKS))
        started_s = time.perf_counter()
        try:
            plan = make_plan(problem)
        except Unreachable as error:
            fail(f"infeasible: {error}", EXIT_INFEASIBLE)
        solve_s = time.perf_counter() - started_s
    if as_json:
        print_json(_json(problem, plan, solve_s))
    else:
        _show(problem, plan, solve_s)


def _problem(read: SyncPlanProblem) -> "SyncProblem":
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


def _json(problem: "SyncProblem", plan: "SyncPlan", solve_s: float) -> dict[str, Any]:
    return {
        "waves": [
            {"wave": number, "seconds": wave.seconds, "edges": _edges(problem, wave)}
            for number, wave in enumerate(plan.waves)
        ],
        "estimate_s": plan.estimate_s,
        "lower_bound_s": plan.lower_bound_s,
        "naive_s": plan.naive_s if math.isfinite(plan.naive_s) else None,  # with `links`: not all are joined directly
        "solve_s": solve_s,
    }


def _edges(problem: "SyncProblem", wave: "Wave") -> list[dict[str, Any]]:
    edges = wave.edges
    columns = (edges.shard, edges.offset, edges.bytes, edges.src, edges.dst, edges.circuits, edges.rate_gbps)
    return [
        {
            "shard": problem.shards[shard].id,
            "offset": offset,
            "bytes": size,
            "src": problem.endpoints[src],
            "dst": problem.endpoints[dst],
            "phase": "A" if circuits else "B",
            "circuits": circuits,
            "rate_gbps": rate_gbps,
        }
        for shard, offset, size, src, dst, circuits, rate_gbps in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _show(problem: "SyncProblem", plan: "SyncPlan", solve_s: float) -> None:
    edges = sum(len(wave.edges.bytes) for wave in plan.waves)
    if not plan.waves:
        print_lines(["Nothing to send: no shard has a receiver that does not hold it."])
        return
    print_lines(
        [
            f"[bold]{duration(plan.estimate_s)}[/bold] in {len(plan.waves):,} waves of {edges:,} edges:"
            f" {plan.estimate_s / plan.lower_bound_s:.2f} times the bound of {duration(plan.lower_bound_s)};"
            f" {_naive(plan)};"
            f" solved in {duration(solve_s)}"
        ]
    )
    shown = plan.waves[:ROWS_SHOWN]
    title = "Waves" if len(shown) == len(plan.waves) else f"The first {ROWS_SHOWN} of {len(plan.waves):,} waves"
    columns = ("wave", "takes", "GB delivered", "PoD to PoD", "circuits", "inside PoDs", "deepest", "shards")
    print_table(title, columns, [_row(number, wave) for number, wave in enumerate(shown)])


def _naive(plan: "SyncPlan") -> str:
    if not math.isfinite(plan.naive_s):
        return "straight from the holders no link leads everywhere"
    return f"straight from the holders {duration(plan.naive_s)}, {plan.naive_s / plan.estimate_s:.1f} times as long"


def _row(number: int, wave: "Wave") -> tuple[object, ...]:
    edges = wave.edges
    crossing = edges.circuits > 0
    return (
        number,
        duration(wave.seconds),
        f"{edges.bytes.sum() / 1e9:,.3g}",
        int(crossing.sum()),
        int(edges.circuits.sum()),
        int((~crossing).sum()),
        int(edges.above.max()) + 1,
        len(set(edges.shard.tolist())),
    )
