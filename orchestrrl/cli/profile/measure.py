"""`orchestrrl profile measure`, `import` and `show`: create and print profiles of engines."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import EngineKindOption, command, engine_kind_faults, url_faults
from orchestrrl.cli.output import Columns, Output, fail, note, raise_faults, stderr, table, writing
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:  # these import numpy, which only running commands need
    from orchestrrl.engines.base import Engine
    from orchestrrl.engines.profiles.measure import MeasuredProfile, MeasurementInputs, MoveLink
    from planner.cost.profile import EngineProfile, Profile, Provenance

# Default cost of a change of configuration: starting an engine process and loading its weights.
COLD_START_S = 60.0
VLLM_MAX_SEQUENCES = 1024  # vLLM's default on GPUs with at least 70 GiB

OutFile = Annotated[Path, typer.Option(help="The profile file to write (YAML).")]
SwitchOption = Annotated[
    float | None, typer.Option("--switch-s", help=f"Seconds to start the configuration. Default: {COLD_START_S:g}.")
]


@command
def measure(
    url: Annotated[str, typer.Argument(help="URL of the engine, which must be idle.")],
    out: OutFile,
    configuration: Annotated[str, typer.Option(help="Id of the configuration. Default: from its layout.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel attention replicas.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism.")] = 1,
    gpu: Annotated[str, typer.Option(help="GPU model, for the file. Default: that of an existing file.")] = "",
    switch_s: SwitchOption = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Maximum sequences, if the engine does not report it.")
    ] = None,
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache size in tokens, if the engine does not report it.")
    ] = None,
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(help="KV bytes per token. With --transfer-gbps, adds the cost of KV transfer.")
    ] = None,
    transfer_gbps: Annotated[float | None, typer.Option(help="Rate of KV transfer between engines, in Gbit/s.")] = None,
    budget_s: Annotated[float, typer.Option(min=1.0, help="Time limit of the measurement in seconds.")] = 300.0,
    engine_kind: EngineKindOption = "vllm",
) -> Output:
    """Measure an engine and write its configuration to a profile file. A configuration with the same id is replaced.

    The engine decodes batches of random prompts. Small batches are measured first, and measurements that do not fit in
    the remaining budget are skipped. Ctrl-C cancels all requests and leaves the file unchanged.

    Example: `orchestrrl profile measure http://127.0.0.1:8000 --tp 2 --switch-s 45 --gpu H800 --out profile.yaml`
    """
    from orchestrrl.engines.base import connect
    from orchestrrl.engines.profiles.measure import MeasuredProfile, MeasurementInputs
    from planner.cost.predict import identifier
    from planner.cost.profile import Parallelism
    from planner.model import ConfigurationId

    layout = Parallelism(tp=tp, dp=dp, ep=ep)
    link = _link(kv_bytes_per_token, transfer_gbps)
    existing = _existing(out, gpu)
    wanted = MeasurementInputs(
        id=ConfigurationId(configuration) if configuration else identifier(layout),
        parallelism=layout,
        switch_s=COLD_START_S if switch_s is None else switch_s,
        switch_detail=_switch_detail(switch_s),
        date=_today(),
        budget_s=budget_s,
        max_sequences=max_sequences,
        kv_capacity_tokens=kv_capacity_tokens,
    )
    raise_faults([*url_faults("URL", url), *engine_kind_faults(engine_kind)])
    measured = with_progress(
        lambda report: until_stopped(_measure(connect(engine_kind, url), wanted, existing, report))
    )
    if not isinstance(measured, MeasuredProfile):
        fail(f"stopped: {out} is unchanged")
    profile = _merged(existing, measured, gpu, link)
    _write(out, profile)
    return _output(profile, measured.skipped)


@command
def import_(
    model: Annotated[str, typer.Option(help="Name of the model, or a folder with its config.json.")],
    gpu: Annotated[str, typer.Option(help="GPU model, such as h100_sxm.")],
    out: OutFile,
    engine_kind: Annotated[str, typer.Option(metavar="KIND", help="Engine product: vllm, sglang or trtllm.")] = "vllm",
    tp_sizes: Annotated[str, typer.Option(help="Tensor-parallel sizes, such as 1,2,4,8.")] = "",
    layouts: Annotated[str, typer.Option(help="Other layouts, such as tp8ep8,dp8ep8 for mixtures of experts.")] = "",
    precision: Annotated[str, typer.Option(help="Precision of the weights, such as fp8. Default: the model's.")] = "",
    max_sequences: Annotated[int, typer.Option(min=1, help="Maximum sequences of an engine.")] = VLLM_MAX_SEQUENCES,
    switch_s: SwitchOption = None,
) -> Output:
    """Create a profile from NVIDIA's measured kernel data, with the optional package aiconfigurator-core.

    The step times include only the run time of kernels, not the engine's overheads. If possible, measure your own
    engines instead. Layouts whose weights leave no memory for the KV cache are omitted.

    Example: `orchestrrl profile import --model Qwen/Qwen3-32B --gpu h100_sxm --tp-sizes 1,2,4,8 --out profile.yaml`
    """
    from orchestrrl.engines.profiles.importer import Aiconfigurator, ImportInputs, import_profile

    wanted = _layouts(tp_sizes, layouts)
    given = ImportInputs(
        max_sequences,
        COLD_START_S if switch_s is None else switch_s,
        "command line" if max_sequences != VLLM_MAX_SEQUENCES else "default: vLLM's on large GPUs",
        _switch_detail(switch_s),
        _today(),
    )
    vendor = Aiconfigurator(model, gpu, engine_kind, precision=precision)
    profile, left_out = import_profile(vendor, wanted, given, lambda name: stderr().print(f"{name} ..."))
    _write(out, profile)
    return _output(profile, left_out)


@command
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The profile file (YAML).")],
    plot: Annotated[Path | None, typer.Option(help="Plot step time over sequences to this PNG file.")] = None,
) -> Output:
    """Show a profile: step times, KV capacity and costs of each configuration, and the source of each value.

    Example: `orchestrrl profile show profile.yaml --plot profile.png`
    """
    from orchestrrl.engines.profiles.store import read_profile

    profile = read_profile(file)
    if plot is not None:
        _plot(profile, plot)
    return _output(profile, ())


def _output(profile: "Profile", left_out: Iterable[str]) -> Output:
    from orchestrrl.engines.profiles.store import as_document

    for reason in left_out:
        note(f"skipped: {reason}")
    title = f"{profile.model} on {profile.gpu}, {profile.engine}"
    return Output(as_document(profile), [table(title, COLUMNS, profile.configurations), *_origins(profile)])


async def _measure(
    engine: "Engine",
    wanted: "MeasurementInputs",
    existing: "Profile | None",
    report: Callable[[str, int, int], None],
) -> "MeasuredProfile":
    from orchestrrl.core.clock import WallClock
    from orchestrrl.engines.profiles.measure import measure as measured

    try:
        if existing is not None:
            _same(existing, await engine.capabilities())
        return await measured(engine, wanted, WallClock(), lambda done, total, doing: report(doing, done, total))
    finally:
        await engine.close()


def _same(existing: "Profile", capabilities: Any) -> None:
    """Raise ProblemFaults if the engine's model or product differs from that of the existing profile."""
    faults = []
    if capabilities.models and existing.model not in capabilities.models:
        faults.append(f"--out: must be a profile of model {capabilities.models[0]}, got {existing.model!r}")
    if existing.engine != capabilities.engine:
        faults.append(f"--out: must be a profile of {capabilities.engine} engines, got {existing.engine!r}")
    raise_faults(faults)


def _existing(path: Path, gpu: str) -> "Profile | None":
    from orchestrrl.engines.profiles.store import read_profile

    if not path.exists():
        return None
    profile = read_profile(path)
    if gpu and gpu != profile.gpu:
        raise ProblemFaults([f"--gpu: must be {profile.gpu}, the GPU of the profile in {path}, got {gpu!r}"])
    return profile


def _link(kv_bytes_per_token: float | None, transfer_gbps: float | None) -> "MoveLink | None":
    from orchestrrl.engines.profiles.measure import MoveLink

    if kv_bytes_per_token is None and transfer_gbps is None:
        return None
    given = {"--kv-bytes-per-token": kv_bytes_per_token, "--transfer-gbps": transfer_gbps}
    faults = [
        f"{option}: must be > 0, got {'nothing' if value is None else f'{value:g}'}"
        for option, value in given.items()
        if value is None or not 0 < value < float("inf")
    ]
    if kv_bytes_per_token is None or transfer_gbps is None or faults:
        raise ProblemFaults(faults)
    return MoveLink(kv_bytes_per_token, transfer_gbps)


def _merged(existing: "Profile | None", measured: "MeasuredProfile", gpu: str, link: "MoveLink | None") -> "Profile":
    from dataclasses import replace

    from orchestrrl.engines.profiles.measure import move_costs
    from orchestrrl.engines.profiles.store import tidy, with_engine
    from planner.cost.profile import Profile

    profile = existing or Profile(measured.model, gpu or "unknown", measured.engine_name, ())
    if link is not None:
        seen = measured.engine.provenance
        source = replace(seen, detail=f"{seen.detail}; transfer: command line")
        profile = replace(profile, moves=tidy(move_costs(measured.prefill, link, source)))
    return with_engine(profile, tidy(measured.engine))


def _write(path: Path, profile: "Profile") -> None:
    from orchestrrl.engines.profiles.store import write_profile

    with writing(path):
        write_profile(path, profile)


def _layouts(tp_sizes: str, layouts: str) -> list[Any]:
    from orchestrrl.engines.profiles.importer import layout_named

    named = [("--tp-sizes", f"tp{number.strip()}") for number in tp_sizes.split(",") if tp_sizes]
    named += [("--layouts", name.strip()) for name in layouts.split(",") if layouts]
    found, faults = [], []
    for option, name in named or [("--tp-sizes", f"tp{size}") for size in (1, 2, 4, 8)]:
        try:
            layout = layout_named(name)
        except ValueError as error:
            faults.append(f"{option}: {error}, got {name.removeprefix('tp') if option == '--tp-sizes' else name!r}")
        else:
            found += [layout] if layout not in found else []
    raise_faults(faults)
    return found


def _switch_detail(switch_s: float | None) -> str:
    return "default: a cold start" if switch_s is None else "command line"


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).date().isoformat()


def step_ms(sequences: int) -> Callable[["EngineProfile"], str | None]:
    """Return a getter that formats the step time of a batch of `sequences` in milliseconds. The getter returns None if
    the engine allows fewer sequences."""
    return lambda engine: (
        f"{engine.step.base_s.at(sequences) * 1e3:.2f} ms" if sequences <= engine.max_sequences else None
    )


COST_COLUMNS: Columns = {
    "configuration": "id",
    "GPUs": lambda engine: engine.parallelism.gpus,
    "step, 1 seq.": step_ms(1),
    "16": step_ms(16),
    "256": step_ms(256),
    "per 100k KV": lambda engine: f"{engine.step.kv_s_per_token * 1e8:.2f} ms",
    "prefill/s": lambda engine: f"{engine.prefill_tokens_per_s:.0f}",
    "KV tokens": "kv_capacity_tokens",
    "switch": lambda engine: f"{engine.switch_s:.3g} s",
}
COLUMNS: Columns = {
    **COST_COLUMNS,
    "sequences": "max_sequences",
    "source": lambda engine: engine.provenance.source,
    "date": lambda engine: engine.provenance.date,
    "fit error": lambda engine: _percent(engine.provenance.fit_error_mean),
    "worst": lambda engine: _percent(engine.provenance.fit_error_max),
}


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{fraction:.1%}"


def _origins(profile: "Profile") -> Iterator[str]:
    """Yield lines with the source of each configuration, of each value whose source differs from that of its
    configuration, and of the costs of moves."""
    for engine in profile.configurations:
        yield f"{engine.id}: {_origin(engine.provenance)}"
        for name, provenance in engine.others:
            yield f"  {name}: {_origin(provenance)}"
    if profile.moves is not None:
        moves = profile.moves
        rate = 1e9 / max(moves.transfer_s.at(2e9) - moves.transfer_s.at(1e9), 1e-12) / 1e9
        yield (
            f"moves: {moves.kv_bytes_per_token:.0f} bytes of KV per token; transfer {rate:.3g} GB/s; "
            f"recomputing 8,192 tokens {moves.recompute_s.at(8192):.3g} s"
            + (f" ({_origin(moves.provenance)})" if moves.provenance else "")
        )


def _origin(provenance: "Provenance") -> str:
    parts = [f"{provenance.source}, {provenance.date}", provenance.detail]
    if provenance.samples:
        parts.append(f"{provenance.samples} samples")
    if provenance.fit_error_mean is not None:
        parts.append(f"fit error {provenance.fit_error_mean:.1%}")
    return "; ".join(part for part in parts if part).replace("[", "\\[")


def _plot(profile: "Profile", path: Path) -> None:
    """Plot step time over the number of sequences, with an empty and with a half-full KV cache, to a PNG file."""
    from orchestrrl.core.charts import axes, save

    figure, [[axis]] = axes(width=8, height=5)
    for engine in profile.configurations:
        most = engine.max_sequences
        batches = sorted({*(2**k for k in range(most.bit_length())), *engine.step.base_s.xs, most})
        batches = [batch for batch in batches if 1 <= batch <= most]
        (line,) = axis.plot(batches, [engine.step.at(b, 0) * 1e3 for b in batches], marker=".", label=str(engine.id))
        half_full = [engine.step.at(b, engine.kv_capacity_tokens / 2) * 1e3 for b in batches]
        axis.plot(batches, half_full, linestyle="--", color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences")
    axis.set_ylabel("decode step, ms (dashed: KV cache half full)")
    axis.set_title(f"{profile.model} on {profile.gpu}, {profile.engine}")
    axis.legend()
    with writing(path):
        save(figure, path, kind="png")
