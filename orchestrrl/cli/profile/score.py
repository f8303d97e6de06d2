"""`orchestrrl profile score` and `fit`: the cost model against measured deployments."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors, stderr
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = ("roofline", "measured")
MeasuredFile = Annotated[
    Path, typer.Argument(metavar="CSV", help="Measured deployments, with the columns of AIConfigurator's silicon file.")
]


def register(app: typer.Typer) -> None:
    profile = group(app, "profile")
    profile.command(name="score")(score)
    profile.command(name="fit")(fit)


def score(
    measured: MeasuredFile,
    source: Annotated[
        str, typer.Option(help="roofline, or measured: by rows of the same engine at other lengths.")
    ] = "roofline",
    json: JsonFlag = False,
) -> None:
    """Compare predicted with measured time per output token, row by row and as ratios between TPs.

    No model is scored with constants that were fitted on it, and no prompt and output length with a profile that was
    fitted to it. Rows that cannot be predicted are listed with the reason.

    Example: `orchestrrl profile score silicon.csv --source measured`
    """
    # Imported here so that every other command starts without numpy.
    from orchestrrl.engines.profiles.score import report
    from orchestrrl.engines.profiles.score import score as scored_rows
    from orchestrrl.engines.profiles.score_measured import score_measured
    from orchestrrl.engines.profiles.silicon import read_silicon

    with reporting_errors():
        faults = [] if source in SOURCES else [f"--source: must be one of {', '.join(SOURCES)}, got {source!r}"]
        try:
            silicon = read_silicon(measured)
        except ProblemFaults as error:
            faults += error.faults
        if faults:
            raise ProblemFaults(faults)
        result = report(*score_measured(silicon)) if source == "measured" else report(silicon, scored_rows(silicon))
    if json:
        print_json(result)
        return
    _show(result)


def fit(
    measured: MeasuredFile,
    out: Annotated[Path, typer.Option(help="The module of constants to write.")] = Path("planner/cost/fitted.py"),
    json: JsonFlag = False,
) -> None:
    """Fit the engine constants of the roofline, once on all models and once without each, and write them.

    A later `profile score` takes its constants from that module, never from a fit to the model that it scores.

    Example: `orchestrrl profile fit silicon.csv --out planner/cost/fitted.py`
    """
    from datetime import UTC, datetime

    from orchestrrl.engines.profiles import roofline_fit
    from orchestrrl.engines.profiles.silicon import read_silicon

    with reporting_errors():
        deployments = read_silicon(measured).deployments
        if not deployments:
            raise ProblemFaults([f"(document): has no row that can be predicted, got {measured}"])
        stderr().print(f"fitting {len(deployments)} deployments ...")
        sets = roofline_fit.fit(deployments)
        errors = roofline_fit.left_out_errors(deployments, sets)
        today = datetime.now(UTC).date()
        try:
            roofline_fit.write_fitted(out, sets, errors, measured.name, today)
        except OSError as error:
            raise ProblemFaults([f"--out: cannot be written: {error.strerror}, got {out}"]) from error
    if json:
        print_json(
            {"out": str(out), "rows": len(deployments), "left_out_error_mean": errors.mean().item(), "sets": sets}
        )
        return
    print_lines([f"wrote {out}: {len(sets)} sets of constants; {errors.mean():.1%} mean error on models left out"])


def _show(result: dict[str, Any]) -> None:
    columns = ("", "rows", "mean error", "median error", "pairs of TPs", "mean ratio error", "median ratio error")
    kinds = [(kind, *_cells(errors)) for kind, errors in result["overall"].items() if errors["rows"]]
    print_table(f"TPOT of {result['predicted']} of {result['rows']} rows", columns, kinds)
    groups = [
        (f"{row['model']} {row['system']} {row['backend']} {row['source']}", *_cells(row)) for row in result["groups"]
    ]
    print_table("By model, system, backend and source", columns, groups)
    print_table("Ratios of TPOT between two TPs", ("", "pairs", "mean error", "median error"), _ratio_rows(result))
    print_lines(sorted({f"source: {row['source']}, {row['detail']}" for row in result["predictions"]}))
    print_lines(f"not predicted: row {row['row']} ({row['model']}): {row['reason']}" for row in result["not_predicted"])


def _cells(errors: dict[str, Any]) -> "Iterator[str | int | None]":
    yield errors["rows"]
    yield _percent(errors["error_mean"])
    yield _percent(errors["error_median"])
    yield errors["ratio"]["pairs"]
    yield _percent(errors["ratio"]["error_mean"])
    yield _percent(errors["ratio"]["error_median"])


def _ratio_rows(result: dict[str, Any]) -> "Iterator[tuple[object, ...]]":
    for kind in ("dense", "moe"):
        for row in result["tp_ratios"][kind]:
            narrow, wide = row["tp"]
            errors = _percent(row["error_mean"]), _percent(row["error_median"])
            yield f"{kind}, TP {narrow} to {wide}", row["pairs"], *errors


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.1f} %"
