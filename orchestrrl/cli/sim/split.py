"""`orchestrrl sim split`: how many of a cluster's GPUs should train, and how many generate."""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors
from orchestrrl.cli.sim.cells import digits, kept_in
from orchestrrl.cli.sim.cluster import Cluster, Out, keep
from orchestrrl.cli.sim.generation import check_folder, or_faults, with_progress
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import ClusterResult


def register(app: typer.Typer) -> None:
    group(app, "sim").command(name="split")(split)


def split(
    scenario: Cluster,
    fabric: Annotated[str | None, typer.Option(help="On which fabric. Default: the scenario's first.")] = None,
    arm: Annotated[str, typer.Option(help="An arm of `sim gen`.")] = "verl_to",
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Try how a cluster's GPUs are best divided between training and generation: the most samples per second.

    The sum of the scenario's train_gpus and gen_gpus stays; each split that is tried runs its loop. All are shown, the
    best is marked.

    Example: `orchestrrl sim split cluster64 --fabric fat_tree`
    """
    from orchestrrl.lab.sim.rl.scenario_file import load_cluster_scenario
    from orchestrrl.lab.sim.rl.split import best, faults_of, splits
    from orchestrrl.lab.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    with reporting_errors():
        faults: list[str] = []
        loaded = or_faults(faults, lambda: load_cluster_scenario(scenario))
        if loaded is not None:
            faults += faults_of(loaded, fabric, arm)
        elif arm not in ARMS:
            faults.append(f"--arm: must be one of {', '.join(ARMS)}, got {arm!r}")
        if out is not None:
            or_faults(faults, lambda: check_folder(out, "--out"))
        if loaded is None or faults:
            raise ProblemFaults(faults)
        ran: list[ClusterResult] = []
        found = with_progress(lambda report: splits(loaded, fabric, arm, report, ran.append))
        if out is not None:
            for result in ran:
                keep(out, result.scenario, [result])
    top = best(found)
    if json:
        print_json({"best": asdict(top), "tried": [asdict(each) for each in found]})
        return
    columns = ("GPUs train", "generate", "gen", "train", "sync", "gen/train", "samples/s", "best")
    cells = [
        (
            str(each.train_gpus),
            str(each.gen_gpus),
            f"{each.gen_s:.1f} s",
            f"{each.train_s:.1f} s",
            f"{each.sync_s:.2f} s",
            f"{each.gen_over_train:.2f}",
            digits(each.samples_per_s),
            "*" if each is top else None,
        )
        for each in found
    ]
    print_table(escape(loaded.name), columns, cells)
    print_lines([f"cluster: {{train_gpus: {top.train_gpus}, gen_gpus: {top.gen_gpus}}}", *kept_in(out)])
