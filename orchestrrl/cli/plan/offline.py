"""`orchestrrl plan solve` and `render`: solve a placement problem from a file, and print the command lines of
engines."""

import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import ProblemFile, command, problem_command
from orchestrrl.cli.formats import duration, ranges, seconds
from orchestrrl.cli.output import Output, View, fields, raise_faults
from orchestrrl.cli.plan.explain import instances_table
from orchestrrl.core.errors import ProblemFaults, shorten
from planner.model import ConfigurationId, GpuId

if TYPE_CHECKING:
    from orchestrrl.core.config.schema import FleetSettings
    from orchestrrl.fleet.deployers.command_line import CommandLine, EngineSpec
    from planner.solver.problem import MakespanProblem, Solution


@problem_command("plan_solve")
def solve(file: ProblemFile) -> Output:
    """Compute which engines to run on which GPUs, and which requests each engine decodes, to minimize the makespan.

    The command reads one JSON problem: `gpus`, `configurations`, the `current` instances, `requests` with their
    estimated remaining tokens, and the costs of moves and of starting instances. The command prints the decision and a
    proven lower bound of the makespan. It changes nothing.

    Example:

        orchestrrl plan solve --print-example > problem.json

        orchestrrl plan solve problem.json

        orchestrrl plan solve - --json < problem.json
    """
    # Imported here so that other commands start fast, and before the clock starts, which measures only the solver.
    from orchestrrl.cli.problem import infeasible, read_problem
    from orchestrrl.cli.problems import SOLVE_CHECKS, SolveProblem, makespan_problem_of
    from planner.solver import makespan

    gc.disable()  # the process ends soon, and repeated collections over so many requests are slow
    read = read_problem(file, SolveProblem, SOLVE_CHECKS)
    problem = makespan_problem_of(read)
    started_s = time.perf_counter()
    until_s = math.inf if read.time_budget_s is None else started_s + read.time_budget_s
    try:
        solution = makespan.solve(problem, stop=lambda: time.perf_counter() > until_s)
    except makespan.Infeasible as missed:
        infeasible(missed.limit, missed.needed, missed.available, missed.unit)
    result = _solution_json(problem, solution)
    result["solve_s"] = time.perf_counter() - started_s
    return Output(result, _solution_view(solution, result, banded=read.kv_balance is not None))


def _solution_json(problem: "MakespanProblem", solution: "Solution") -> dict[str, Any]:
    ids = problem.requests.ids
    return {
        **fields(solution, "decision reason makespan_s current_makespan_s lower_bound_s gap"),
        "solve_s": 0.0,
        "kv_balance_violation": solution.kv_balance_violation,
        "instances": [
            {
                **fields(placed, "id configuration"),
                "gpus": list(placed.gpus),
                "requests": [ids[request] for request in placed.requests.tolist()],
                **fields(placed, "kept decode_s migration_s switch_s finish_s"),
            }
            for placed in solution.instances
        ],
        "migrations": [
            {"request": ids[move.request], "from": move.source, "to": move.destination} | fields(move, "method cost_s")
            for move in solution.migrations
        ],
    }


def _solution_view(solution: "Solution", result: dict[str, Any], banded: bool) -> View:
    gap = "unknown" if solution.gap is None else f"{solution.gap * 100:.2f} %"
    yield f"[bold]{solution.decision}[/bold]: {solution.reason}"
    yield (
        f"makespan {seconds(solution.makespan_s)}; current placement {seconds(solution.current_makespan_s)};"
        f" lower bound {seconds(solution.lower_bound_s)} (gap {gap});"
        f" solved in {duration(result['solve_s'])}"
    )
    names = [{"engine_id": each["id"], "requests_count": len(each["requests"])} for each in result["instances"]]
    counted = (each | more for each, more in zip(result["instances"], names, strict=True))
    yield instances_table("Instances", counted)
    if banded:
        yield f"KV balance: the worst instance misses the band by {solution.kv_balance_violation * 100:.2f} %"
    if solution.migrations:
        transfers = sum(move.method == "transfer" for move in solution.migrations)
        yield (
            f"{len(solution.migrations):,} running requests move: {transfers:,} by transfer,"
            f" {len(solution.migrations) - transfers:,} by recomputation"
        )


# --- command lines


@command
def render(
    file: Annotated[Path, typer.Argument(help="The configuration file (YAML).")] = Path("orchestrrl.yaml"),
    configuration: Annotated[str, typer.Option(help="Render engines of this configuration.")] = "",
    gpus: Annotated[str, typer.Option(help="The GPUs of one engine, such as 0,1 or 0-7.")] = "",
) -> Output:
    """Print the environment and command line of each engine, ready to paste into a shell. Nothing is started.

    By default, the command renders the engines of `fleet.engines`. With `--configuration`, it renders as many engines
    of the configuration as the fleet's GPUs allow. With `--gpus` in addition, it renders one engine on these GPUs.
    `fleet.launch` defines the launch options. An engine that spans several nodes or uses AFD has several processes.
    Each process is printed with its node and role.

    Example:

        orchestrrl check-config --print-example > orchestrrl.yaml

        orchestrrl plan render orchestrrl.yaml

        orchestrrl plan render orchestrrl.yaml --configuration tp2 --gpus 4,5
    """
    from orchestrrl.daemon.configuration import load_config

    rendered = _rendered(load_config(file).fleet, configuration, gpus)
    blocks = [block for each in rendered for block in _engine_blocks(*each)]
    return Output({"engines": [_engine_json(*each) for each in rendered]}, "\n".join(blocks))


def _rendered(
    fleet: "FleetSettings", configuration: str, gpus: str
) -> "list[tuple[EngineSpec, str, tuple[CommandLine, ...]]]":
    """Return the requested engines, each with its URL and its command lines. Raises ProblemFaults if an option or the
    fleet's configuration is invalid."""
    from orchestrrl.fabric.site_parts import numbers_in
    from orchestrrl.fleet.deployers.command_line import render, url_of
    from orchestrrl.fleet.launch import configured_engines, filled, launch_of

    faults, named = [], None
    try:
        named = tuple(map(GpuId, numbers_in(gpus))) if gpus else None
    except ValueError as error:
        faults.append(f"--gpus: {error}, got {shorten(gpus)}")
    if gpus and not configuration:
        faults.append(f"--gpus: requires --configuration, got {gpus!r}")
    if configuration and configuration not in fleet.layouts():
        known = ", ".join(sorted(fleet.layouts())) or "none"
        faults.append(f"--configuration: must be a configuration of the fleet ({known}), got {configuration!r}")
    if fleet.gpus is not None:
        count = fleet.gpus.count
        beyond = [gpu for gpu in named or () if gpu >= count]
        faults += [f"--gpus: must be less than fleet.gpus.count ({count}), got {gpu}" for gpu in beyond]
    try:
        launch = launch_of(fleet)
    except ProblemFaults as error:
        faults += error.faults
    if not configuration and not fleet.engines:
        faults.append("fleet.engines: must not be empty without --configuration")
    raise_faults(faults)
    found = []
    for spec in filled(fleet, ConfigurationId(configuration), named) if configuration else configured_engines(fleet):
        try:
            found.append((spec, url_of(spec, launch), render(spec, launch)))
        except ProblemFaults as error:
            faults += error.faults
    raise_faults(dict.fromkeys(faults))
    return found


def _engine_blocks(spec: "EngineSpec", url: str, lines: "Sequence[CommandLine]") -> list[str]:
    blocks = []
    for place, line in enumerate(lines, 1):
        several = f", process {place} of {len(lines)} ({line.role})" if len(lines) > 1 else ""
        answers = f", serving {url}" if place == 1 else ""
        heading = (
            f"# {spec.engine}{several}: {spec.configuration} on GPUs {ranges(line.gpus)} of node {line.node}{answers}"
        )
        blocks.append(f"{heading}\n{line.shell()}\n")
    return blocks


def _engine_json(spec: "EngineSpec", url: str, lines: "Sequence[CommandLine]") -> dict[str, Any]:
    return {
        "id": spec.engine,
        "configuration": spec.configuration,
        "gpus": sorted(spec.gpus),
        "url": url,
        "processes": [
            {
                **fields(line, "role node"),
                "gpus": list(line.gpus),
                "environment": dict(line.environment),
                "argv": list(line.argv),
            }
            for line in lines
        ],
    }
