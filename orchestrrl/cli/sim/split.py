"""`orchestrrl sim split`: how many of a cluster's GPUs should train, and how many generate."""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, choice_faults, table
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.sim.cluster import Cluster, Out, digits, keep, kept_in
from orchestrrl.cli.sim.generation import check_folder, or_faults
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import ClusterResult


@command
def split(
    scenario: Cluster,
    fabric: Annotated[str | None, typer.Option(help="On which fabric. Default: the scenario's first.")] = None,
    arm: Annotated[str, typer.Option(help="An arm of `sim gen`.")] = "verl_to",
    out: Out = None,
) -> Output:
    """Try how a cluster's GPUs are best divided between training and generation: the most samples per second.

    The sum of the scenario's train_gpus and gen_gpus stays; each split that is tried runs its loop. All are shown, the
    best is marked.

    Example: `orchestrrl sim split cluster64 --fabric fat_tree`
    """
    from orchestrrl.lab.sim.rl.scenario import load_cluster_scenario
    from orchestrrl.lab.sim.rl.split import best, faults_of, splits
    from orchestrrl.lab.sim.scenario import ARMS

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    faults: list[str] = []
    loaded = or_faults(faults, lambda: load_cluster_scenario(scenario))
    if loaded is not None:
        faults += faults_of(loaded, fabric, arm)
    else:
        faults += choice_faults("--arm", arm, ARMS)
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
    columns: Columns = {
        "GPUs train": "train_gpus",
        "generate": "gen_gpus",
        "gen": lambda each: f"{each.gen_s:.1f} s",
        "train": lambda each: f"{each.train_s:.1f} s",
        "sync": lambda each: f"{each.sync_s:.2f} s",
        "gen/train": lambda each: f"{each.gen_over_train:.2f}",
        "samples/s": lambda each: digits(each.samples_per_s),
        "best": lambda each: "*" if each is top else None,
    }
    document = {"best": asdict(top), "tried": [asdict(each) for each in found]}
    chosen = f"cluster: {{train_gpus: {top.train_gpus}, gen_gpus: {top.gen_gpus}}}"
    return Output(document, [table(escape(loaded.name), columns, found), chosen, *kept_in(out)])
