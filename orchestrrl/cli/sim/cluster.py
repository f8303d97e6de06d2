"""`orchestrrl sim run`, `compare`, `report` and `daemon-config`: a whole RL cluster, its fabric and its loop."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors
from orchestrrl.cli.sim.cells import STAGES, notes_of, rate_of, stages_of, total_of, usd_of, worth_of
from orchestrrl.cli.sim.generation import check_folder, or_faults, parts_of, seeds_of, with_progress
from orchestrrl.core.errors import Permanent, ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import ClusterResult
    from orchestrrl.lab.sim.rl.scenario import ClusterScenario

Cluster = Annotated[
    str, typer.Argument(metavar="SCENARIO.yaml", help="A cluster scenario's file, or the name of a built-in one.")
]
Fabrics = Annotated[str, typer.Option(help="Comma-separated fabrics. Default: the scenario's.")]
Arms = Annotated[str, typer.Option(help="Comma-separated arms of `sim gen`. Default: the scenario's.")]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the results there, for `sim report`.")]


def register(app: typer.Typer) -> None:
    sim = group(app, "sim")
    sim.command(name="run")(run)
    sim.command(name="compare")(compare)
    sim.command(name="report")(report)
    sim.command(name="daemon-config")(daemon_config)


def run(
    scenario: Cluster = "",
    print_example: Annotated[
        bool, typer.Option("--print-example", help="Print a built-in scenario to begin with: SCENARIO's, or cluster64.")
    ] = False,
    fabrics: Fabrics = "",
    arms: Arms = "",
    seeds: Seeds = "",
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Run a whole cluster in virtual time: training, generation and weight sync on a fabric, as the loop joins them.

    Built in: cluster64, cluster512, cluster1024, cluster2048. A step's stages, throughput, what the network costs, and
    samples per second for each million dollars of it.

    Example: `orchestrrl sim run cluster64 --fabrics rfabric --arms both --out out/sim`
    """
    if print_example:
        _print_example(scenario)
        return
    results, chosen = _ran(scenario, fabrics, arms, seeds, out)
    if json:
        _print_json(chosen, results)
        return
    from orchestrrl.lab.sim.rl.results import rows

    columns = ("fabric", "arm", *STAGES, "samples/s", "network", "per M$", "with GPUs")
    cells = [
        (row.fabric, row.arm, *stages_of(row), rate_of(row), usd_of(row), worth_of(row), total_of(row))
        for row in rows(results)
    ]
    print_table(escape(chosen.name), columns, cells, optional=("with GPUs",), left=("arm",))
    print_lines(notes_of(results, out))


def compare(
    scenario: Cluster,
    fabrics: Fabrics = "",
    arms: Arms = "",
    seeds: Seeds = "",
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Fabrics and arms side by side: ratios to the first, and which of them are on the Pareto frontier.

    A mark says that no other has as much throughput for as little money.

    Example: `orchestrrl sim compare cluster64 --fabrics fat_tree,rfabric --arms verl_to,both`
    """
    results, chosen = _ran(scenario, fabrics, arms, seeds, out)
    if json:
        _print_json(chosen, results)
        return
    from orchestrrl.lab.sim.rl.results import rows

    columns = ("fabric", "arm", "samples/s", "vs first", "network", "per M$", "per M$ vs first", "Pareto", *STAGES)
    cells = [
        (
            row.fabric,
            row.arm,
            rate_of(row),
            f"{row.gain:.2f}x",
            usd_of(row),
            worth_of(row),
            f"{row.gain_per_usd:.2f}x" if row.network_usd else None,
            "*" if row.pareto and row.network_usd else None,
            *stages_of(row),
        )
        for row in rows(results)
    ]
    print_table(escape(chosen.name), columns, cells, left=("arm",))
    print_lines(notes_of(results, out))


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results file, or a folder of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE.html", help="The page.")] = Path("report.html"),
    json: JsonFlag = False,
) -> None:
    """One self-contained HTML page of results of `sim run`, `sim compare` and `sim sweep`, with its pictures inside.

    Example: `orchestrrl sim report out/sim -o page.html`
    """
    from orchestrrl.lab.sim.report_page.page import write
    from orchestrrl.lab.sim.rl.results import read

    with reporting_errors():
        found = read(results)
        write(found, out, command=shlex.join(["orchestrrl", "sim", "report", str(results), "-o", str(out)]))
    if json:
        print_json({"wrote": str(out), "results": len(found)})
    else:
        print_lines([escape(f"wrote {out}")])


def daemon_config(
    scenario: Cluster,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The daemon's file.")] = Path(
        "orchestrrl.yaml"
    ),
    fabric: Annotated[str | None, typer.Option(help="On which fabric. Default: the scenario's first.")] = None,
    json: JsonFlag = False,
) -> None:
    """Write what was simulated as a daemon's configuration, and beside it the profile of its engines.

    Example: `orchestrrl sim daemon-config cluster64 -o orchestrrl.yaml && orchestrrl check-config orchestrrl.yaml`
    """
    from orchestrrl.lab.sim.rl.deployable import write_daemon
    from orchestrrl.lab.sim.rl.scenario_file import load_cluster_scenario

    with reporting_errors():
        if out.is_dir():
            raise ProblemFaults([f"--out: must be a file, got the folder {str(out)!r}"])
        written = write_daemon(load_cluster_scenario(scenario), fabric, out)
    if json:
        print_json({"wrote": [str(path) for path in written]})
    else:
        print_lines(escape(f"wrote {path}") for path in written)


def _ran(
    source: str, fabrics: str, arms: str, seeds: str, out: Path | None
) -> "tuple[list[ClusterResult], ClusterScenario]":
    from orchestrrl.lab.sim.rl.scenario_file import load_cluster_scenario
    from orchestrrl.lab.sim.run import chosen
    from orchestrrl.lab.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    with reporting_errors():
        faults: list[str] = []
        loaded = or_faults(faults, lambda: load_cluster_scenario(source))
        known = [section.title for section in loaded.fabrics] if loaded is not None else []
        wanted = or_faults(faults, lambda: chosen(parts_of(fabrics), known, "--fabrics")) if loaded else None
        named = or_faults(faults, lambda: chosen(parts_of(arms), ARMS, "--arms") if parts_of(arms) else [])
        numbers = or_faults(faults, lambda: seeds_of(seeds))
        if out is not None:
            or_faults(faults, lambda: check_folder(out, "--out"))
        if loaded is None or faults:
            raise ProblemFaults(faults)
        scenario = _narrowed(loaded, wanted or known, named or list(loaded.generation.arms), numbers or loaded.seeds)
        return _run_and_keep(scenario, out), scenario


def _run_and_keep(scenario: "ClusterScenario", out: Path | None) -> "list[ClusterResult]":
    """Results are written as they come: what ends a run early leaves those before it."""
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
        raise Permanent(f"{error}; runs before it, which are kept in {out}: {kept}") from error


def _print_example(name: str) -> None:
    from orchestrrl.lab.sim.rl.scenario_file import FOLDER, SMALLEST
    from orchestrrl.lab.sim.scenario import scenario_text

    with reporting_errors():
        typer.echo(scenario_text(name or SMALLEST, FOLDER)[0], nl=False)


def keep(out: Path, scenario: Mapping[str, Any], results: "Sequence[ClusterResult]") -> None:
    """What could be written to before the run may be full after it."""
    from orchestrrl.lab.sim.rl.results import write

    try:
        write(out, scenario, results)
    except OSError as error:
        raise Permanent(f"--out: results cannot be written to {out}: {error.strerror}") from None


def _narrowed(
    scenario: "ClusterScenario", fabrics: Sequence[str], arms: Sequence[str], seeds: Sequence[int]
) -> "ClusterScenario":
    """What was asked for is what is written down: the same digest as a file that says so."""
    return scenario.model_copy(
        update={
            "fabrics": tuple(section for title in fabrics for section in scenario.fabrics if section.title == title),
            "generation": scenario.generation.model_copy(update={"arms": tuple(arms)}),
            "seeds": tuple(seeds),
        }
    )


def _print_json(scenario: "ClusterScenario", results: "Sequence[ClusterResult]") -> None:
    from orchestrrl.lab.sim.rl.results import rows

    def without(result: "ClusterResult") -> dict[str, Any]:
        document = asdict(result)
        del document["scenario"]
        return document

    summary = [asdict(row) for row in rows(results)]
    print_json({"scenario": scenario.document(), "summary": summary, "results": [without(each) for each in results]})
