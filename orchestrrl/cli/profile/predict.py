"""`orchestrrl profile predict`: profiles of engines that nobody has measured yet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Output, choice_faults, raise_faults, table
from orchestrrl.cli.profile.measure import COST_COLUMNS

if TYPE_CHECKING:
    from planner.cost.models import Model
    from planner.cost.profile import Profile
    from planner.cost.roofline import Precision


@command
def predict(
    model: Annotated[str, typer.Argument(help="A model's name or path, or a built-in profile: paper-14b-h800.")],
    gpu: Annotated[str, typer.Option(help="Kind of GPU, e.g. h100.")] = "h100",
    engine: Annotated[str, typer.Option(help="vllm, sglang or trtllm.")] = "vllm",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the whole fleet: no layout is larger.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    weight_bits: Annotated[int | None, typer.Option(help="16, 8 or 4; the checkpoint's own if left out.")] = None,
    kv_bits: Annotated[int, typer.Option(help="16 or 8.")] = 16,
    phase: Annotated[str, typer.Option(help="bulk or tail: only layouts that are good there.")] = "",
    out: Annotated[Path | None, typer.Option(help="The profile file, in YAML.")] = None,
) -> Output:
    """Predict step times, room and costs of every layout worth a look, from data sheets and fitted engine constants.

    Measure your own engines where you can: `orchestrrl profile score` shows how far such predictions are off.

    Example: `orchestrrl profile predict Qwen/Qwen3-32B --gpu h100 --gpus 16 --out profile.yaml`
    """
    from orchestrrl.core.errors import Permanent
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
    faults += choice_faults("--engine", engine, sorted(ENGINES))
    if weight_bits not in (None, 4, 8, 16):
        faults.append(f"--weight-bits: must be 4, 8 or 16, got {weight_bits}")
    if kv_bits not in (8, 16):
        faults.append(f"--kv-bits: must be 8 or 16, got {kv_bits}")
    if phase:
        faults += choice_faults("--phase", phase, StepPhase)
    raise_faults(faults)
    product, precision = ENGINES[engine], _precision(served, weight_bits, kv_bits)
    good_in = StepPhase(phase) if phase else None
    configurations = candidates(served, hardware, gpus, per_node, product, good_in, precision)
    if not configurations:
        raise Permanent(
            f"{served.name} fits on no layout of up to {gpus} {hardware.name}: allow more GPUs or fewer bits"
        )
    moves = move_costs(served, hardware, product, precision, recompute_tp=min(per_node, gpus))
    return _output(Profile(served.name, hardware.name, product.name, tuple(configurations), moves), out)


def _output(made: "Profile", out: Path | None) -> Output:
    from orchestrrl.core.errors import ProblemFaults
    from orchestrrl.engines.profiles.store import as_document, write_profile

    if out is not None:
        try:
            write_profile(out, made)
        except OSError as error:
            raise ProblemFaults([f"--out: cannot be written: {error.strerror}, got {str(out)!r}"]) from error
    details = sorted({configuration.provenance.detail for configuration in made.configurations})
    wrote = [] if out is None else [f"wrote {out}"]
    costs = table(f"{made.model} on {made.gpu}, {made.engine}", COST_COLUMNS, made.configurations)
    return Output(as_document(made), [costs, *details, *wrote])


def _precision(model: "Model", weight_bits: int | None, kv_bits: int) -> "Precision":
    from planner.cost.roofline import Precision

    if weight_bits is None:
        return Precision(model.weight_bits, model.expert_bits, float(kv_bits))
    # Four bits come with a scale for every few weights.
    bits = 4.5 if weight_bits == 4 else float(weight_bits)
    return Precision(bits, min(bits, model.expert_bits), float(kv_bits))
