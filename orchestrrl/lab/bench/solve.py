"""The makespan solver: how its time, gap and memory grow, where room is short as well, and which part of what it gains
comes from where.

Each problem is solved in a process of its own, so that nothing is warm: `-m orchestrrl.lab.bench.solve GPUS [TIGHT]`.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.bench.figure import Figure
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId
from planner.solver.bound import lower_bound_s
from planner.solver.columns import ProblemColumns, columns
from planner.solver.evaluate import FleetPlacement, SolverFleet, evaluate, place
from planner.solver.layout import lay_out
from planner.solver.makespan import solve
from planner.solver.packed import homogeneous_cut, packed
from planner.solver.problem import (
    RUNNING,
    WAITING,
    CurrentInstance,
    KvTransferCost,
    MakespanProblem,
    ProblemRequests,
    Solution,
)
from planner.solver.spread import least_loaded, loads

SEED = 1
SIZES = (8, 32, 128, 512, 1_024, 4_096, 16_384)  # GPUs
REQUESTS_PER_GPU = 16
AIMS_S = {1_024: 0.3, 16_384: 2.0}
GAP_AIM = 0.04
TIGHT_SIZES = (8, 64, 256, 1_024)  # GPUs
OWNERS_GPUS = 1_024
CHILD_TIMEOUT_S = 300.0

# An engine with 70 to 90 us of host time per sequence, over GPUs: alpha, beta, gamma, KV tokens, prefill, switch.
ENGINES = {
    1: (0.02375, 8.7e-5, 8.2e-8, 216_674, 9_000.0, 1.6),
    2: (0.0183738, 8.1e-5, 4.1e-8, 582_885, 18_000.0, 1.7),
    4: (0.0154841, 7.8e-5, 2.0e-8, 1_315_307, 36_000.0, 1.9),
    8: (0.01429845, 7.65e-5, 1.0e-8, 2_780_151, 72_000.0, 2.3),
}
MAX_SEQUENCES, LONGEST = 1_024, 32_768
LENGTH_MEDIAN, LENGTH_SIGMA = 4_500.0, 1.0  # of a lognormal, in tokens


@dataclass(frozen=True, slots=True)
class Tight:
    """How many times as much is asked for as an instance on all GPUs of a node has; 0: as much as the engines have."""

    what: str
    kv: float = 0.0  # footprint of all requests, over KV room
    sequences: float = 0.0  # requests, over max_sequences


TIGHT = {
    "kv_2x": Tight("KV room oversubscribed 2 times", kv=2.0),
    "kv_4x": Tight("KV room oversubscribed 4 times", kv=4.0),
    "slots_4x": Tight("max_sequences oversubscribed 4 times", sequences=4.0),
    "kv_and_slots_4x": Tight("KV room and max_sequences oversubscribed 4 times", kv=4.0, sequences=4.0),
}


@dataclass(frozen=True, slots=True)
class SolveStep:
    """A step on its way: the problem with true lengths, and with as likely ones as are known of each request."""

    known: MakespanProblem
    forecast: MakespanProblem


def step(gpus: int, seed: int) -> SolveStep:
    """Requests that have run for a while on instances of two GPUs, some of which got more than others."""
    rng = np.random.default_rng(seed)
    count, engines = gpus * REQUESTS_PER_GPU, gpus // 2
    generated = rng.integers(0, 3_000, count)
    shares = rng.choice([3.0, 1.0, 1.0, 1.0], engines)
    places = rng.choice(engines, count, p=shares / shares.sum())
    context = rng.integers(100, 2_000, count) + generated
    states = np.where(rng.random(count) < 0.1, WAITING, RUNNING).astype(np.int8)
    true, likely = (_longer(rng, generated) - generated for _ in range(2))
    return SolveStep(_problem(gpus, context, true, places, states), _problem(gpus, context, likely, places, states))


def _longer(rng: np.random.Generator, generated: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths of requests of which only this is known: that they have generated as much, and go on."""
    lengths = np.zeros(len(generated))
    while (short := np.flatnonzero(lengths <= generated)).size:
        lengths[short] = LENGTH_MEDIAN * np.exp(LENGTH_SIGMA * rng.standard_normal(short.size))
    return np.minimum(np.ceil(lengths), LONGEST).astype(np.int64)


def _problem(
    gpus: int,
    context: NDArray[np.int64],
    remaining: NDArray[np.int64],
    places: NDArray[np.int64],
    states: NDArray[np.int8],
) -> MakespanProblem:
    configurations = tuple(
        Configuration(ConfigurationId(f"tp{size}"), size, *engine[:4], MAX_SEQUENCES, *engine[4:])
        for size, engine in ENGINES.items()
    )
    current = tuple(
        CurrentInstance(EngineId(f"i{number}"), ConfigurationId("tp2"), (GpuId(2 * number), GpuId(2 * number + 1)))
        for number in range(gpus // 2)
    )
    names = tuple(RequestId(f"r{number}") for number in range(len(remaining)))
    requests = ProblemRequests(names, context, remaining, places, states)
    return MakespanProblem(
        gpus, 8, configurations, 196_608.0, KvTransferCost(200.0, 1_600.0, 0.002), current, requests, 0.5
    )


def tightened(problem: MakespanProblem, tight: Tight) -> MakespanProblem:
    """With engines of which all requests together ask for so many times what they have, all in proportion."""
    nodes, footprint = problem.gpus_count / problem.per_node, problem.requests.context_tokens.sum()
    widest = problem.configurations[-1]
    footprint += problem.requests.remaining_tokens.sum()
    room = float(footprint) / tight.kv / nodes / widest.kv_capacity_tokens if tight.kv else 1.0
    seats = len(problem.requests.ids) / tight.sequences / nodes / widest.gpus if tight.sequences else 0.0
    return replace(
        problem,
        configurations=tuple(
            replace(
                each,
                kv_capacity_tokens=int(each.kv_capacity_tokens * room),
                max_sequences=max(1, round(seats * each.gpus)) if seats else each.max_sequences,
            )
            for each in problem.configurations
        ),
    )


def solver(out_dir: Path) -> list[Figure]:
    rows = [_in_a_process(gpus) for gpus in SIZES]
    out_dir.mkdir(parents=True, exist_ok=True)
    _plot(rows, out_dir / "solve_growth.png")
    figures = []
    for row in rows:
        gpus, aim_s = row["gpus"], AIMS_S.get(row["gpus"])
        note = f"{row['requests']:,} requests, a process of its own, {row['cpu_s']:.2g} s of CPU, {row['rss_mib']} MiB"
        baseline = ("the aim", aim_s) if aim_s else ("the CPU seconds of it", row["cpu_s"])
        figures.append(Figure(f"solve_{gpus}_gpus", row["solve_s"], "s", baseline[0], baseline[1], note))
        figures.append(
            Figure(
                f"solve_{gpus}_gpus_makespan",
                row["makespan_s"],
                "s",
                "its proven lower bound",
                row["lower_bound_s"],
                f"gap {row['gap'] * 100:.2f} %, costs included; the aim is {GAP_AIM * 100:g} % on large fleets",
            )
        )
    figures += [_tight(gpus, name) for name in TIGHT for gpus in TIGHT_SIZES]
    return figures + _owners(step(OWNERS_GPUS, SEED))


def _tight(gpus: int, name: str) -> Figure:
    row = _in_a_process(gpus, name)
    return Figure(
        f"solve_{name}_{gpus}_gpus_makespan",
        row["makespan_s"],
        "s",
        "its proven lower bound",
        row["lower_bound_s"],
        f"gap {row['gap'] * 100:.2f} %; {TIGHT[name].what}, {row['requests']:,} requests; {row['cpu_s']:.2g} s of CPU",
    )


def _in_a_process(gpus: int, *tight: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "orchestrrl.lab.bench.solve", str(gpus), *tight]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CHILD_TIMEOUT_S)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measure(gpus: int, tight: str = "") -> dict[str, Any]:
    problem = step(gpus, SEED).known
    if tight:
        problem = tightened(problem, TIGHT[tight])
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    started_s, cpu_s = time.perf_counter(), time.process_time()
    solution = solve(problem)
    return {
        "gpus": gpus,
        "requests": len(problem.requests.ids),
        "solve_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - cpu_s,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "before_mib": before_mib,
        "makespan_s": solution.makespan_s,
        "lower_bound_s": solution.lower_bound_s,
        "gap": solution.gap or 0.0,
    }


def _owners(of: SolveStep) -> list[Figure]:
    """Best static fleet, the best of one configuration packed, and the mixed fleet: planned with true lengths, and
    planned with likely ones and carried out on the true ones."""
    true = columns(of.known)
    figures = []
    for how, planned in (("known", of.known), ("forecast", of.forecast)):
        table = columns(planned)
        bound_s = lower_bound_s(table)
        spread_s = min(_carried_out(true, each) for each in _static(table))
        one_s = min(_carried_out(true, each) for each in _packed_alone(table, bound_s))
        solution = solve(planned)
        mixed_s = _carried_out(true, _placement(table, solution))
        for name, value_s, what in (
            ("homogeneous_packed", one_s, "best single configuration, packed"),
            ("mixed_packed", mixed_s, "mixed fleet, packed and searched"),
        ):
            note = f"{what}; lengths {how}; {OWNERS_GPUS:,} GPUs, {true.count:,} requests, switches and moves included"
            baseline = "best single configuration, longest first to least loaded"
            figures.append(Figure(f"solve_{name}_{how}", value_s, "s", baseline, spread_s, note))
    return figures


def _static(table: ProblemColumns) -> list[FleetPlacement]:
    found = []
    for configuration, count in enumerate(table.placeable.tolist()):
        fleet = lay_out(table, [], [configuration] * count)
        load, first = loads(table, configuration)[0]
        if fleet is not None:
            found.append(place(table, fleet, least_loaded(table, configuration, count, load, first)))
    return found


def _packed_alone(table: ProblemColumns, bound_s: float) -> list[FleetPlacement]:
    found = []
    for configuration in range(len(table.gpus)):
        cuts = homogeneous_cut(table, configuration, bound_s, bound_s * 4)
        if cuts is not None:
            found += packed(table, cuts, 3)
    return found


def _placement(table: ProblemColumns, solution: Solution) -> FleetPlacement:
    """The solution as the solver has it inside."""
    index = {each.id: number for number, each in enumerate(table.problem.configurations)}
    fleet = SolverFleet.of(table, [(index[each.configuration], -1, each.gpus) for each in solution.instances])
    order = np.concatenate([each.requests for each in solution.instances])
    starts = np.concatenate(([0], np.cumsum([len(each.requests) for each in solution.instances])))
    return evaluate(table, fleet, order, starts)


def _carried_out(true: ProblemColumns, planned: FleetPlacement) -> float:
    return evaluate(true, planned.fleet, planned.order, planned.starts).makespan_s


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from orchestrrl.core.charts import axes, save  # late: solving runs in processes whose memory is measured

    gpus = [row["gpus"] for row in rows]
    figure, [panels] = axes(1, 3, width=13, height=4)
    for panel, title, values in (
        (panels[0], "seconds to solve (wall)", [row["solve_s"] for row in rows]),
        (panels[1], "gap to the proven bound, %", [row["gap"] * 100 for row in rows]),
        (panels[2], "memory, MiB (process; dashed: before)", [row["rss_mib"] for row in rows]),
    ):
        panel.plot(gpus, values, marker="o")
        panel.set_xscale("log", base=2)
        panel.set_xlabel(f"GPUs ({REQUESTS_PER_GPU} requests each)")
        panel.set_title(title)
        panel.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].scatter(list(AIMS_S), list(AIMS_S.values()), marker="_", s=300, color="tab:red", label="aim")
    panels[0].legend()
    panels[1].axhline(GAP_AIM * 100, color="tab:red", linewidth=1)
    panels[2].plot(gpus, [row["before_mib"] for row in rows], linestyle="--")
    save(figure, path)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]), *sys.argv[2:])))
