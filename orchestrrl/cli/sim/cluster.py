"""`orchestrrl sim run`, `compare`, `split`, `sweep`, `report` and `daemon-config`: simulate a whole RL cluster with
its fabric and training loop."""

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, choice_faults, fields, note, print_view, table
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.sim.generation import check_folder, make_folder, or_faults, parts_of, seeds_of
from orchestrrl.core.errors import Permanent, ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import ClusterResult, SummaryRow
    from orchestrrl.lab.sim.rl.scenario import ClusterScenario


STAGES: Columns = {
    "gen": lambda row: f"{row.gen_s:.1f} s",
    "train": lambda row: f"{row.train_s:.1f} s",
    "sync": lambda row: f"{row.sync_s:.2f} s",
    "waiting": lambda row: f"{row.waits_s:.2f} s",
    "idle gen": lambda row: f"{row.idle_gen:.0%}",
    "idle train": lambda row: f"{row.idle_train:.0%}",
    "staleness": lambda row: f"{row.staleness:.2f}",
}
LEGEND = (
    "gen, train, sync: means per step; waiting: engines that wait for weights or for space in the sample buffer;"
    " per M$: samples/s per million dollars of network"
)
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def rate_of(row: "SummaryRow") -> str:
    return digits(row.samples_per_s)


def usd_of(row: "SummaryRow") -> str | None:
    """Return the cost of the network in millions of dollars as text, or None if no prices are known."""
    return f"{row.network_usd / 1e6:.2f} M$" if row.network_usd else None


def worth_of(row: "SummaryRow") -> str | None:
    return digits(row.samples_per_s_per_musd) if row.network_usd else None


def digits(value: float) -> str:
    """Format a number with three significant digits or, if it is 100 or more, as a whole number with thousands
    separators."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def notes_of(results: "Sequence[ClusterResult]", out: Path | None) -> list[str]:
    """Return the legend, the notes of the runs and the location of the results as lines of rich markup. Notes that
    differ only in numbers are merged and counted."""
    notes: dict[str, tuple[str, set[str]]] = {}
    for result in results:
        who = f"{result.run.fabric}, {result.run.arm}"
        for line in result.run.notes:
            notes.setdefault(_FIGURE.sub("#", line), (f"{who}: {line}", set()))[1].add(who)
    lines = [LEGEND]
    for first, having in notes.values():
        others = f" (and {len(having) - 1} more)" if len(having) > 1 else ""
        lines.append(escape(first + others))
    return [*lines, *kept_in(out)]


def kept_in(out: Path | None) -> list[str]:
    return [] if out is None else [escape(f"wrote results to {out}; render them with `orchestrrl sim report {out}`")]


Cluster = Annotated[
    str, typer.Argument(metavar="SCENARIO.yaml", help="A cluster scenario file, or the name of a built-in scenario.")
]
Fabrics = Annotated[str, typer.Option(help="Comma-separated fabrics. Default: the scenario's.")]
Arms = Annotated[str, typer.Option(help="Comma-separated arms of `sim gen`. Default: the scenario's.")]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Store the results in this folder, for `sim report`.")]


@command
def run(
    scenario: Cluster = "",
    print_example: Annotated[
        bool, typer.Option("--print-example", help="Print a built-in scenario, SCENARIO or cluster64, and exit.")
    ] = False,
    fabrics: Fabrics = "",
    arms: Arms = "",
    seeds: Seeds = "",
    out: Out = None,
) -> Output:
    """Simulate the training loop of a whole cluster in virtual time: training, generation and weight sync on a fabric.

    Built-in scenarios: cluster64, cluster512, cluster1024, cluster2048. The command prints the stages of a step, the
    throughput, the cost of the network, and samples per second per million dollars of network.

    Example: `orchestrrl sim run cluster64 --fabrics rfabric --arms both --out out/sim`
    """
    if print_example:
        from orchestrrl.lab.sim.rl.scenario import FOLDER, SMALLEST
        from orchestrrl.lab.sim.scenario import scenario_text

        print_view(scenario_text(scenario or SMALLEST, FOLDER)[0])
        raise typer.Exit
    results, chosen = _ran(scenario, fabrics, arms, seeds, out)
    return _output(RUN_COLUMNS, chosen, results, out)


@command
def compare(scenario: Cluster, fabrics: Fabrics = "", arms: Arms = "", seeds: Seeds = "", out: Out = None) -> Output:
    """Simulate fabrics and arms, and compare the throughput and network cost of each run with those of the first run.

    A mark in the column Pareto means that no other run has at least the same throughput at no higher cost.

    Example: `orchestrrl sim compare cluster64 --fabrics fat_tree,rfabric --arms verl_to,both`
    """
    results, chosen = _ran(scenario, fabrics, arms, seeds, out)
    return _output(COMPARE_COLUMNS, chosen, results, out)


@command
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results file, or a folder of results.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> Output:
    """Render results of `sim run`, `sim compare` and `sim sweep` as one self-contained HTML page with plots.

    Example: `orchestrrl sim report out/sim -o page.html`
    """
    from orchestrrl.lab.sim.report_page.page import write
    from orchestrrl.lab.sim.rl.results import read

    found = read(results)
    write(found, out, command=shlex.join(["orchestrrl", "sim", "report", str(results), "-o", str(out)]))
    return Output({"wrote": str(out), "results": len(found)}, [escape(f"wrote {out}")])


@command
def daemon_config(
    scenario: Cluster,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The configuration file to write.")] = Path(
        "orchestrrl.yaml"
    ),
    fabric: Annotated[str | None, typer.Option(help="The fabric. Default: the scenario's first.")] = None,
) -> Output:
    """Write the simulated cluster as a daemon configuration, with the profile of its engines in a second file.

    Example: `orchestrrl sim daemon-config cluster64 -o orchestrrl.yaml && orchestrrl check-config orchestrrl.yaml`
    """
    from orchestrrl.lab.sim.rl.scenario import load_cluster_scenario
    from orchestrrl.lab.sim.rl.stages import write_daemon

    if out.is_dir():
        raise ProblemFaults([f"--out: must be a file, got the folder {str(out)!r}"])
    written = write_daemon(load_cluster_scenario(scenario), fabric, out)
    return Output({"wrote": [str(path) for path in written]}, [escape(f"wrote {path}") for path in written])


@command
def split(
    scenario: Cluster,
    fabric: Annotated[str | None, typer.Option(help="The fabric. Default: the scenario's first.")] = None,
    arm: Annotated[str, typer.Option(help="An arm of `sim gen`.")] = "verl_to",
    out: Out = None,
) -> Output:
    """Find the split of a cluster's GPUs between training and generation that has the highest throughput.

    The sum of the scenario's train_gpus and gen_gpus is constant. Each split is simulated. All splits are printed, and
    the best split is marked.

    Example: `orchestrrl sim split cluster64 --fabric fat_tree`
    """
    from orchestrrl.lab.sim.rl.run import best, faults_of, splits
    from orchestrrl.lab.sim.rl.scenario import load_cluster_scenario
    from orchestrrl.lab.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    faults: list[str] = []
    loaded = or_faults(faults, lambda: load_cluster_scenario(scenario))
    if loaded is not None:
        faults += faults_of(loaded, fabric, arm)
    else:
        faults += choice_faults("--arm", arm, ARMS)
    or_faults(faults, lambda: check_folder(out, "--out"))
    if loaded is None or faults:
        raise ProblemFaults(faults)
    ran: list[ClusterResult] = []
    found = with_progress(lambda report: splits(loaded, fabric, arm, report, ran.append))
    if out is not None:
        for result in ran:
            keep(out, result.scenario, [result])
    top = best(found)
    columns: Columns = {
        "GPUs train": "train_gpus",
        "generate": "gen_gpus",
        **{name: STAGES[name] for name in ("gen", "train", "sync")},
        "gen/train": lambda each: f"{each.gen_over_train:.2f}",
        "samples/s": lambda each: digits(each.samples_per_s),
        "best": lambda each: "*" if each is top else None,
    }
    document = {"best": asdict(top), "tried": [asdict(each) for each in found]}
    chosen = f"cluster: {{train_gpus: {top.train_gpus}, gen_gpus: {top.gen_gpus}}}"
    return Output(document, [table(escape(loaded.name), columns, found), chosen, *kept_in(out)])


@command
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="A base scenario, and values at dotted paths.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Result folder, one file per point.")] = Path("sweep"),
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on this Ray cluster: auto or HOST:PORT.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also rerun the points that have results.")] = False,
) -> Output:
    """Simulate a base scenario with every combination of the values in a file.

    The file has the form `{base: cluster64, grid: {cluster.nic_gbps: [100, 400]}}`. Each combination is a point. Points
    that have results are not run again, so that an interrupted sweep can be resumed. If a point fails, the failure is
    reported, the other points are run, and the exit status is 1.

    Example: `orchestrrl sim sweep sweep.yaml --out out/sweep && orchestrrl sim report out/sweep`
    """
    from orchestrrl.lab.sim.rl import sweep as sweeps
    from orchestrrl.lab.sim.rl.results import SUFFIX, parse, rows

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    if ray is not None and processes is not None:
        raise ProblemFaults([f"--processes: cannot be combined with --ray, got {processes}"])
    faults: list[str] = []
    points = or_faults(faults, lambda: sweeps.load_sweep(file))
    or_faults(faults, lambda: check_folder(out, "--out"))
    if points is None or faults:
        raise ProblemFaults(faults)
    make_folder(out, "--out")
    runner = partial(sweeps.on_ray, address=ray) if ray is not None else partial(sweeps.in_processes, at_once=processes)
    try:
        swept = with_progress(lambda report: sweeps.sweep(points, out, runner, report, again=again))
    except KeyboardInterrupt:
        note(escape(f"interrupted: finished points are in {out}; run the same command to resume"))
        raise
    found = [
        (point, row)
        for point in swept.done
        for row in rows(parse((out / f"{point.digest}{SUFFIX}").read_text(encoding="utf-8")))
    ]
    for point in swept.failed:
        note(escape(f"failed: {point.title}: {point.fault}"))
    there = [f"{swept.found} points already had results"] if swept.found else []
    shown = table(f"{len(swept.done)} of {len(points)} points", SWEEP_COLUMNS, found)
    failure = "" if swept.failed else None
    document = {
        "points": [
            {"values": dict(point.values), "digest": point.digest} | fields(row, "fabric arm samples_per_s network_usd")
            for point, row in found
        ],
        "failed": [{"values": dict(each.values), "fault": each.fault} for each in swept.failed],
    }
    return Output(document, [shown, *there, escape(f"results are in {out}")], failure)


def _ran(
    source: str, fabrics: str, arms: str, seeds: str, out: Path | None
) -> "tuple[list[ClusterResult], ClusterScenario]":
    from orchestrrl.lab.sim.rl.scenario import load_cluster_scenario
    from orchestrrl.lab.sim.run import chosen
    from orchestrrl.lab.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    faults: list[str] = []
    loaded = or_faults(faults, lambda: load_cluster_scenario(source))
    known = [section.title for section in loaded.fabrics] if loaded is not None else []
    wanted = or_faults(faults, lambda: chosen(parts_of(fabrics), known, "--fabrics")) if loaded else None
    named = or_faults(faults, lambda: chosen(parts_of(arms), ARMS, "--arms") if parts_of(arms) else [])
    numbers = or_faults(faults, lambda: seeds_of(seeds))
    or_faults(faults, lambda: check_folder(out, "--out"))
    if loaded is None or faults:
        raise ProblemFaults(faults)
    scenario = loaded.narrowed(wanted or known, named or list(loaded.generation.arms), numbers or loaded.seeds)
    return _run_and_keep(scenario, out), scenario


def _run_and_keep(scenario: "ClusterScenario", out: Path | None) -> "list[ClusterResult]":
    """Simulate the cluster and return the results. If `out` is not None, store each result in this folder as it
    arrives, so that a failure does not lose earlier results."""
    from orchestrrl.lab.sim.rl.run import run_cluster

    document, kept = scenario.document(), 0

    def keep_those(results: "Sequence[ClusterResult]") -> None:
        nonlocal kept
        if out is not None:
            keep(out, document, results)
            kept = len(results)

    try:
        return with_progress(lambda report: run_cluster(scenario, report, keep_those))
    except Permanent as error:
        if not kept:
            raise
        raise Permanent(f"{error}; the results of {kept} earlier runs are stored in {out}") from error


def keep(out: Path, scenario: Mapping[str, Any], results: "Sequence[ClusterResult]") -> None:
    """Store results of a scenario in the folder `out`. Raises Permanent if the results cannot be written, for example
    because the disk is full."""
    from orchestrrl.lab.sim.rl.results import write

    try:
        write(out, scenario, results)
    except OSError as error:
        raise Permanent(f"--out: cannot write results to {out}: {error.strerror}") from None


def _output(columns: Columns, scenario: "ClusterScenario", results: "list[ClusterResult]", out: Path | None) -> Output:
    from orchestrrl.lab.sim.rl.results import rows

    summary = rows(results)
    without_scenario = [{k: v for k, v in asdict(each).items() if k != "scenario"} for each in results]
    document = {
        "scenario": scenario.document(),
        "summary": [asdict(row) for row in summary],
        "results": without_scenario,
    }
    return Output(document, [table(escape(scenario.name), columns, summary), *notes_of(results, out)])


RUN_COLUMNS: Columns = {
    "fabric": "fabric",
    "arm": "arm",
    **STAGES,
    "samples/s": rate_of,
    "network": usd_of,
    "per M$": worth_of,
    "with GPUs": lambda row: None if row.total_usd is None else f"{row.total_usd / 1e6:.2f} M$",
}
COMPARE_COLUMNS: Columns = {
    "fabric": "fabric",
    "arm": "arm",
    "samples/s": rate_of,
    "vs first": lambda row: f"{row.gain:.2f}x",
    "network": usd_of,
    "per M$": worth_of,
    "per M$ vs first": lambda row: f"{row.gain_per_usd:.2f}x" if row.network_usd else None,
    "Pareto": lambda row: "*" if row.pareto and row.network_usd else None,
    **STAGES,
}
SWEEP_COLUMNS: Columns = {
    "point": lambda pair: pair[0].title,
    "fabric": lambda pair: pair[1].fabric,
    "arm": lambda pair: pair[1].arm,
    "samples/s": lambda pair: rate_of(pair[1]),
    "network": lambda pair: usd_of(pair[1]),
}
