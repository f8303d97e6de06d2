"""`orchestrrl profile score` and `fit`: the cost model against measured deployments."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, View, choice_faults, note, raise_faults, table
from orchestrrl.core.errors import ProblemFaults

SOURCES = ("roofline", "measured")
MeasuredFile = Annotated[
    Path, typer.Argument(metavar="CSV", help="Measured deployments, with the columns of AIConfigurator's silicon file.")
]


@command
def score(
    measured: MeasuredFile,
    source: Annotated[
        str, typer.Option(help="roofline, or measured: by rows of the same engine at other lengths.")
    ] = "roofline",
) -> Output:
    """Compare predicted with measured time per output token, row by row and as ratios between TPs.

    No model is scored with constants that were fitted on it, and no prompt and output length with a profile that was
    fitted to it. Rows that cannot be predicted are listed with the reason.

    Example: `orchestrrl profile score silicon.csv --source measured`
    """
    # Imported here so that every other command starts without numpy.
    from orchestrrl.engines.profiles.score import report, roofline, score_measured
    from orchestrrl.engines.profiles.silicon import read_silicon

    faults = choice_faults("--source", source, SOURCES)
    try:
        silicon = read_silicon(measured)
    except ProblemFaults as error:
        faults += error.faults
    raise_faults(faults)
    by_roofline = roofline(silicon.deployments), silicon.unpredicted
    result = report(*(score_measured(silicon) if source == "measured" else by_roofline))
    return Output(result, _view(result))


@command
def fit(
    measured: MeasuredFile,
    out: Annotated[Path, typer.Option(help="The module of constants to write.")] = Path("planner/cost/fitted.py"),
) -> Output:
    """Fit the engine constants of the roofline, once on all models and once without each, and write them.

    A later `profile score` takes its constants from that module, never from a fit to the model that it scores.

    Example: `orchestrrl profile fit silicon.csv --out planner/cost/fitted.py`
    """
    from datetime import UTC, datetime

    from orchestrrl.engines.profiles import roofline_fit
    from orchestrrl.engines.profiles.silicon import read_silicon

    deployments = read_silicon(measured).deployments
    if not deployments:
        raise ProblemFaults([f"(document): has no row that can be predicted, got {measured}"])
    note(f"fitting {len(deployments)} deployments ...")
    sets = roofline_fit.fit(deployments)
    errors = roofline_fit.left_out_errors(deployments, sets)
    today = datetime.now(UTC).date()
    try:
        roofline_fit.write_fitted(out, sets, errors, measured.name, today)
    except OSError as error:
        raise ProblemFaults([f"--out: cannot be written: {error.strerror}, got {out}"]) from error
    mean = errors.mean().item()
    document = {"out": str(out), "rows": len(deployments), "left_out_error_mean": mean, "sets": sets}
    return Output(document, [f"wrote {out}: {len(sets)} sets of constants; {mean:.1%} mean error on models left out"])


def _view(result: dict[str, Any]) -> View:
    kinds = [{"kind": kind, **errors} for kind, errors in result["overall"].items() if errors["rows"]]
    yield table(f"TPOT of {result['predicted']} of {result['rows']} rows", {"": "kind", **ERROR_COLUMNS}, kinds)
    yield table("By model, system, backend and source", {"": _group, **ERROR_COLUMNS}, result["groups"])
    ratios = [{"kind": kind, **row} for kind in ("dense", "moe") for row in result["tp_ratios"][kind]]
    yield table("Ratios of TPOT between two TPs", RATIO_COLUMNS, ratios)
    yield from sorted({f"source: {row['source']}, {row['detail']}" for row in result["predictions"]})
    yield from (f"not predicted: row {row['row']} ({row['model']}): {row['reason']}" for row in result["not_predicted"])


def _group(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['system']} {row['backend']} {row['source']}"


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.1f} %"


ERROR_COLUMNS: Columns = {
    "rows": "rows",
    "mean error": lambda row: _percent(row["error_mean"]),
    "median error": lambda row: _percent(row["error_median"]),
    "pairs of TPs": lambda row: row["ratio"]["pairs"],
    "mean ratio error": lambda row: _percent(row["ratio"]["error_mean"]),
    "median ratio error": lambda row: _percent(row["ratio"]["error_median"]),
}
RATIO_COLUMNS: Columns = {
    "": lambda row: "{kind}, TP {tp[0]} to {tp[1]}".format(**row),
    "pairs": "pairs",
    "mean error": lambda row: _percent(row["error_mean"]),
    "median error": lambda row: _percent(row["error_median"]),
}
