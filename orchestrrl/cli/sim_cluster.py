"""`orchestrrl sim run`, `compare`, `report` and `daemon-config`: a whole RL cluster, its fabric and its loop."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors
from orchestrrl.cli.sim import HELP, or_faults, parts_of, seeds_of, with_progress
from orchestrrl.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.sim.rl.results import Result
    from orchestrrl.sim.rl.scenario import ClusterScenario
    from orchestrrl.sim.rl.summary import Row

Cluster = Annotated[
    str, typer.Argument(metavar="SCENARIO.yaml", help="A cluster scenario's file, or the name of a built-in one.")
]
Fabrics = Annotated[str, typer.Option(help="Comma-separated fabrics. Default: the scenario's.")]
Arms = Annotated[str, typer.Option(help="Comma-separated arms of `sim gen`. Default: the scenario's.")]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the results there, for `sim report`.")]


def register(app: typer.Typer) -> None:
    sim = group(app, "sim", HELP)
    sim.command(name="run")(run)
    sim.command(name="compare")(compare)
    sim.command(name="report")(report)
    sim.command(name="daemon-config")(daemon_config)


def run(
    scenario: Cluster,
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
    results, chosen = _ran(scenario, fabrics, arms, seeds, out)
    if json:
        _print_json(chosen, results)
        return
    from orchestrrl.sim.rl.summary import rows

    columns = ("fabric", "arm", *STAGES, "samples/s", "network", "per M$", "with GPUs")
    found = rows(results)
    cells = [(row.fabric, row.arm, *_stages(row), _rate(row), _usd(row), _worth(row), _total(row)) for row in found]
    print_table(chosen.name, columns, cells, optional=("with GPUs",), left=("arm",))
    print_lines(_notes(results, out))


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
    from orchestrrl.sim.rl.summary import rows

    columns = ("fabric", "arm", "samples/s", "vs first", "network", "per M$", "per M$ vs first", "Pareto", *STAGES)
    cells = [
        (
            row.fabric,
            row.arm,
            _rate(row),
            f"{row.gain:.2f}x",
            _usd(row),
            _worth(row),
            f"{row.gain_per_usd:.2f}x" if row.network_usd else None,
            "*" if row.pareto else None,
            *_stages(row),
        )
        for row in rows(results)
    ]
    print_table(chosen.name, columns, cells, left=("arm",))
    print_lines(_notes(results, out))


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results file, or a folder of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE.html", help="The page.")] = Path("report.html"),
    json: JsonFlag = False,
) -> None:
    """One self-contained HTML page of results of `sim run`, `sim compare` and `sim sweep`, with its pictures inside.

    Example: `orchestrrl sim report out/sim -o page.html`
    """
    from orchestrrl.sim.report_page import write
    from orchestrrl.sim.rl.results import read

    with reporting_errors():
        found = read(results)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write(found, out, command=shlex.join(["orchestrrl", "sim", "report", str(results), "-o", str(out)]))
        except OSError as error:
            raise ProblemFaults([f"--out: {error.strerror}, got {str(out)!r}"]) from None
    if json:
        print_json({"wrote": str(out), "results": len(found)})
    else:
        print_lines([f"wrote {out}"])


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
    from orchestrrl.sim.rl.deployable import write_daemon
    from orchestrrl.sim.rl.scenario_file import load_cluster_scenario

    with reporting_errors():
        written = write_daemon(load_cluster_scenario(scenario), fabric, out)
    if json:
        print_json({"wrote": [str(path) for path in written]})
    else:
        print_lines(f"wrote {path}" for path in written)


def _ran(source: str, fabrics: str, arms: str, seeds: str, out: Path | None) -> "tuple[list[Result], ClusterScenario]":
    from orchestrrl.sim.rl.results import write
    from orchestrrl.sim.rl.run import chosen, run_cluster
    from orchestrrl.sim.rl.scenario_file import load_cluster_scenario
    from orchestrrl.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    with reporting_errors():
        faults: list[str] = []
        loaded = or_faults(faults, lambda: load_cluster_scenario(source))
        known = [section.title for section in loaded.fabrics] if loaded is not None else []
        wanted = or_faults(faults, lambda: chosen(parts_of(fabrics), known, "--fabrics")) if loaded else None
        named = or_faults(faults, lambda: chosen(parts_of(arms), ARMS, "--arms") if arms else [])
        numbers = or_faults(faults, lambda: seeds_of(seeds))
        if out is not None:
            or_faults(faults, lambda: _make_folder(out))
        if loaded is None or faults:
            raise ProblemFaults(faults)
        scenario = _narrowed(loaded, wanted or known, named or list(loaded.generation.arms), numbers or loaded.seeds)
        results = with_progress(lambda report: run_cluster(scenario, report))
        if out is not None:
            write(out, scenario.document(), results)
    return results, scenario


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


def _make_folder(out: Path) -> None:
    """Before a long run, not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProblemFaults([f"--out: {error.strerror}, got {str(out)!r}"]) from None


# --- what is printed

STAGES = ("gen", "train", "sync", "waits", "idle gen", "idle train", "staleness")


def _stages(row: "Row") -> tuple[str, ...]:
    seconds = (f"{value:.1f} s" for value in (row.gen_s, row.train_s))
    finer = (f"{value:.2f} s" for value in (row.sync_s, row.waits_s))
    return (*seconds, *finer, f"{row.idle_gen:.0%}", f"{row.idle_train:.0%}", f"{row.staleness:.2f}")


def _rate(row: "Row") -> str:
    return f"{row.samples_per_s:.3g}"


def _usd(row: "Row") -> str | None:
    return f"{row.network_usd / 1e6:.2f} M$" if row.network_usd else None


def _worth(row: "Row") -> str | None:
    return f"{row.samples_per_s_per_musd:.3g}" if row.network_usd else None


def _total(row: "Row") -> str | None:
    return None if row.total_usd is None else f"{row.total_usd / 1e6:.2f} M$"


def _notes(results: "Sequence[Result]", out: Path | None) -> list[str]:
    lines = [
        "gen, train, sync: of a step, in the mean; waits: engines for weights or room; per M$: samples/s by the"
        " network's price"
    ]
    told: dict[str, str] = {}
    for result in results:
        for note in result.run.notes:
            told.setdefault(note, f"{result.run.fabric}, {result.run.arm}: {note}")
    lines += told.values()
    if out is not None:
        lines.append(f"wrote results to {out}; `orchestrrl sim report {out}` makes a page of them")
    return lines


def _print_json(scenario: "ClusterScenario", results: "Sequence[Result]") -> None:
    from orchestrrl.sim.rl.summary import rows

    def without(result: "Result") -> dict[str, Any]:
        document = asdict(result)
        del document["scenario"]
        return document

    summary = [asdict(row) for row in rows(results)]
    print_json({"scenario": scenario.document(), "summary": summary, "results": [without(each) for each in results]})
