"""`orchestrrl sim gen` and `sim paper`: simulate policies on fleets with the real control plane, and reproduce the
paper's figures."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, TypeVar

import typer
from rich.markup import escape

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Output, raise_faults, table, write_file
from orchestrrl.cli.progress import with_progress
from orchestrrl.core.errors import ProblemFaults

Result = TypeVar("Result")

Source = Annotated[
    str, typer.Argument(metavar="SCENARIO.yaml", help="A scenario file, or the name of a built-in scenario.")
]


@command
def gen(
    scenario: Source = "",
    example: Annotated[bool, typer.Option("--example", help="Run the built-in quickstart scenario.")] = False,
    arms: Annotated[str, typer.Option(help="Comma-separated arms. Default: the scenario's.")] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")] = "",
    steps: Annotated[
        int | None, typer.Option(help="Steps per seed, warm-up included. Default: the scenario's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write plots to this folder.")] = None,
) -> Output:
    """Run generation steps of a scenario in virtual time, with static baselines and with OrchestrRL.

    Arms: verl_to (best static TP), verl_lo (widest engines within a node), partial_rollout, planning, balancing, both
    (planning and balancing), mean_only (no forecast), oracle (all lengths given to the planner), packed_known (the best
    static fleet, packed by the true lengths), prompts_known (the best static fleet, packed by the distribution of each
    prompt's lengths). The arms balancing_paper and both_paper move requests by the paper's rule.

    Example: `orchestrrl sim gen --example --plot out/sim`
    """
    # Imported here so that the other commands start without the numerical libraries.
    from orchestrrl.lab.sim.report import COLUMNS, LEGEND, as_json, marks, rows
    from orchestrrl.lab.sim.report import plot as draw
    from orchestrrl.lab.sim.run import chosen_arms, run_scenario
    from orchestrrl.lab.sim.scenario import EXAMPLE, load_scenario, with_steps

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)  # the simulated redeployments would log warnings
    if bool(scenario) == example:
        raise ProblemFaults(
            [f"SCENARIO: exactly one of SCENARIO and --example must be given, got {scenario!r} and --example {example}"]
        )
    faults: list[str] = []
    loaded = or_faults(faults, lambda: with_steps(load_scenario(scenario or EXAMPLE), steps))
    names = or_faults(faults, lambda: chosen_arms(parts_of(arms)))
    numbers = or_faults(faults, lambda: seeds_of(seeds))
    or_faults(faults, lambda: check_folder(plot, "--plot"))
    if loaded is None or faults:
        raise ProblemFaults(faults)
    if plot is not None:
        make_folder(plot, "--plot")
    chosen = names or chosen_arms(loaded.arms)
    outcome = with_progress(lambda report: run_scenario(loaded, chosen, numbers or loaded.seeds, report))
    pictures = draw(outcome, plot) if plot else []
    wrote = [escape(f"wrote {path}") for path in pictures]
    shown = table(escape(loaded.name), COLUMNS, rows(outcome))
    return Output(as_json(outcome), [shown, LEGEND, *marks(outcome), *wrote])


def or_faults(faults: list[str], check: Callable[[], Result]) -> Result | None:
    """Return the result of `check`, or append the errors that it raises to `faults` and return None."""
    try:
        return check()
    except ProblemFaults as error:
        faults += error.faults
        return None


def check_folder(folder: Path | None, option: str) -> None:
    """Raise ProblemFaults if `folder` is not a writable folder or, if it does not exist yet, if its closest existing
    parent is not one. Do nothing if `folder` is None. The check creates nothing."""
    if folder is None:
        return
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ProblemFaults([f"{option}: must be a folder, got the file {str(there)!r}"])
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ProblemFaults([f"{option}: cannot write to {str(folder)!r}: {error.strerror}"]) from None


def make_folder(folder: Path, option: str) -> None:
    """Create a folder. Raises ProblemFaults if the folder cannot be created or is not writable."""
    check_folder(folder, option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProblemFaults([f"{option}: cannot create {str(folder)!r}: {error.strerror}"]) from None


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def seeds_of(text: str) -> list[int]:
    parts = parts_of(text)
    faults = [
        f"--seeds[{i}]: must be a whole number, got {part!r}" for i, part in enumerate(parts) if not part.isdecimal()
    ]
    raise_faults(faults)
    return [int(part) for part in parts]


@command
def paper(
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer sizes and seeds, in under 3 minutes.")] = False,
    figures: Annotated[str, typer.Option(help="Comma-separated figures, such as 13,14. Default: all.")] = "",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Store the results in this folder.")] = Path("out/paper"),
    processes: Annotated[int, typer.Option(min=0, help="Number of parallel processes. 0: one per core.")] = 0,
    write_docs: Annotated[Path | None, typer.Option(metavar="PAGE.md", help="Also write a Markdown page.")] = None,
) -> Output:
    """Reproduce the paper's figures from first principles and compare them with the reported values.

    Differences of more than 15 % are explained. A full run takes under 30 minutes on two cores. To resume an
    interrupted run, repeat the command.

    Example: `orchestrrl sim paper --quick --figures 15,20`
    """
    from orchestrrl.lab.scoreboard.page import COLUMNS, counted, page
    from orchestrrl.lab.scoreboard.run import all_rows, as_json, chosen, make

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    wanted = chosen(parts_of(figures))
    make_folder(out, "--out")
    made = with_progress(lambda report: make(wanted, quick, out, report, processes=processes or None))
    lines = [f"figure {each.id} with --quick: {each.quick}" for each in made if each.quick]
    if write_docs is not None:
        write_file(write_docs, page(made), "--write-docs")
        lines.append(f"wrote {write_docs}")
    shown = table("The paper's figures and ours", {"figure": "figure", **COLUMNS}, all_rows(made))
    document = {"quick": quick, "figures": [as_json(each) for each in made]}
    return Output(document, [shown, counted(all_rows(made)), *lines])
