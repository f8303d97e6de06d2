"""`orchestrrl profile predict`, `score` and `fit`: predict the costs of engines with the cost model, and compare its
predictions with measured deployments."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, View, choice_faults, note, raise_faults, table, writing
from orchestrrl.cli.profile.measure import COST_COLUMNS
from orchestrrl.core.errors import Permanent, ProblemFaults

if TYPE_CHECKING:
    from planner.cost.models import Model
    from planner.cost.profile import Profile
    from planner.cost.roofline import Precision

SOURCES = ("roofline", "measured")
MeasuredFile = Annotated[
    Path, typer.Argument(metavar="CSV", help="Measured deployments, in the columns of AIConfigurator's silicon file.")
]


@command
def predict(
    model: Annotated[str, typer.Argument(help="Name or path of the model, or a built-in profile: paper-14b-h800.")],
    gpu: Annotated[str, typer.Option(help="GPU model, such as h100.")] = "h100",
    engine_kind: Annotated[str, typer.Option(metavar="KIND", help="Engine product: vllm, sglang or trtllm.")] = "vllm",
    gpu_count: Annotated[int, typer.Option(min=1, help="GPUs of the fleet, the maximum size of a layout.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs per node.")] = 8,
    weight_bits: Annotated[
        int | None, typer.Option(help="Bits per weight: 16, 8 or 4. Default: the checkpoint's.")
    ] = None,
    kv_bits: Annotated[int, typer.Option(help="Bits per KV cache element: 16 or 8.")] = 16,
    phase: Annotated[str, typer.Option(help="Only layouts for this phase of a step: bulk or tail.")] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the profile to this file (YAML).")] = None,
) -> Output:
    """Predict step times, KV capacity and costs of candidate layouts from data sheets and fitted engine constants.

    If possible, measure your own engines instead. `orchestrrl profile score` reports the error of these predictions.

    Example: `orchestrrl profile predict Qwen/Qwen3-32B --gpu h100 --gpu-count 16 --out profile.yaml`
    """
    from planner.cost.engines import ENGINES
    from planner.cost.hardware import GPUS, UnknownGpu, gpu_named
    from planner.cost.models import MODELS, UnknownModel, model_named
    from planner.cost.paper import PROFILES, named_profile
    from planner.cost.predict import move_costs
    from planner.cost.profile import Profile
    from planner.solver.layouts import StepPhase, candidates

    if model in PROFILES:
        return _output(named_profile(model), out)
    faults = []
    try:
        served = model_named(model)
    except UnknownModel:
        faults.append(f"MODEL: must be one of {', '.join(sorted(MODELS))}, got {model!r}")
    try:
        hardware = gpu_named(gpu)
    except UnknownGpu:
        faults.append(f"--gpu: must be one of {', '.join(sorted(GPUS))}, got {gpu!r}")
    faults += choice_faults("--engine-kind", engine_kind, sorted(ENGINES))
    if weight_bits not in (None, 4, 8, 16):
        faults.append(f"--weight-bits: must be 4, 8 or 16, got {weight_bits}")
    if kv_bits not in (8, 16):
        faults.append(f"--kv-bits: must be 8 or 16, got {kv_bits}")
    if phase:
        faults += choice_faults("--phase", phase, StepPhase)
    raise_faults(faults)
    product, precision = ENGINES[engine_kind], _precision(served, weight_bits, kv_bits)
    good_in = StepPhase(phase) if phase else None
    configurations = candidates(served, hardware, gpu_count, per_node, product, good_in, precision)
    if not configurations:
        raise Permanent(
            f"model {served.name} does not fit on any layout of up to {gpu_count} {hardware.name} GPUs: "
            "increase --gpu-count, or reduce --weight-bits or --kv-bits"
        )
    moves = move_costs(served, hardware, product, precision, recompute_tp=min(per_node, gpu_count))
    return _output(Profile(served.name, hardware.name, product.name, tuple(configurations), moves), out)


def _output(made: "Profile", out: Path | None) -> Output:
    from orchestrrl.engines.profiles.store import as_document, write_profile

    if out is not None:
        with writing(out, "--out"):
            write_profile(out, made)
    details = sorted({configuration.provenance.detail for configuration in made.configurations})
    wrote = [] if out is None else [f"wrote {out}"]
    costs = table(f"{made.model} on {made.gpu}, {made.engine}", COST_COLUMNS, made.configurations)
    return Output(as_document(made), [costs, *details, *wrote])


def _precision(model: "Model", weight_bits: int | None, kv_bits: int) -> "Precision":
    from planner.cost.roofline import Precision

    if weight_bits is None:
        return Precision(model.weight_bits, model.expert_bits, float(kv_bits))
    # 4-bit formats store a scale for each small group of weights.
    bits = 4.5 if weight_bits == 4 else float(weight_bits)
    return Precision(bits, min(bits, model.expert_bits), float(kv_bits))


# --- comparison with measurements


@command
def score(
    measured: MeasuredFile,
    source: Annotated[
        str, typer.Option(help="Predict by: roofline, or measured (rows of the same engine at other lengths).")
    ] = "roofline",
) -> Output:
    """Compare the predicted with the measured time per output token (TPOT).

    The command reports the error of each row's prediction and, for rows that differ only in TP, the error of the
    predicted ratio of their TPOTs. Predictions are cross-validated: a row is predicted with constants that are not
    fitted on its model, or with a profile that is not fitted on its prompt and output lengths. Rows that cannot be
    predicted are listed with the reason.

    Example: `orchestrrl profile score silicon.csv --source measured`
    """
    # Imported here so that the other commands start without numpy.
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
    out: Annotated[Path, typer.Option(help="The Python module to write.")] = Path("planner/cost/fitted.py"),
) -> Output:
    """Fit the engine constants of the roofline model, and write them to a Python module.

    One set of constants is fitted on all models. In addition, one set for each model is fitted on all other models.
    `orchestrrl profile score` predicts each model with the set that was fitted without that model.

    Example: `orchestrrl profile fit silicon.csv --out planner/cost/fitted.py`
    """
    from datetime import UTC, datetime

    from orchestrrl.engines.profiles import roofline_fit
    from orchestrrl.engines.profiles.silicon import read_silicon

    deployments = read_silicon(measured).deployments
    if not deployments:
        raise ProblemFaults(
            [f"(document): must contain at least one row whose step times can be predicted, got none in {measured}"]
        )
    note(f"fitting {len(deployments)} deployments ...")
    sets = roofline_fit.fit(deployments)
    errors = roofline_fit.left_out_errors(deployments, sets)
    today = datetime.now(UTC).date()
    with writing(out, "--out"):
        roofline_fit.write_fitted(out, sets, errors, measured.name, today)
    mean = errors.mean().item()
    document = {"out": str(out), "rows": len(deployments), "left_out_error_mean": mean, "sets": sets}
    return Output(document, [f"wrote {out}: {len(sets)} sets of constants; {mean:.1%} mean error on held-out models"])


def _view(result: dict[str, Any]) -> View:
    kinds = [{"kind": kind, **errors} for kind, errors in result["overall"].items() if errors["rows"]]
    yield table(f"TPOT of {result['predicted']} of {result['rows']} rows", {"": "kind", **ERROR_COLUMNS}, kinds)
    yield table(
        "By model, system, backend and source",
        {"": "{model} {system} {backend} {source}".format_map, **ERROR_COLUMNS},
        result["groups"],
    )
    ratios = [{"kind": kind, **row} for kind in ("dense", "moe") for row in result["tp_ratios"][kind]]
    yield table("Ratios of TPOT between two TPs", RATIO_COLUMNS, ratios)
    yield from sorted({f"source: {row['source']}, {row['detail']}" for row in result["predictions"]})
    yield from (f"not predicted: row {row['row']} ({row['model']}): {row['reason']}" for row in result["not_predicted"])


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
