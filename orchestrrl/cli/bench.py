"""`orchestrrl bench`: benchmark the decisions, the gateway and other parts of OrchestrRL against baselines from the
same run."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, choice_faults, fields, note, raise_faults, table, write_json


@command
def bench(
    only: Annotated[list[str] | None, typer.Option(help="Run only this benchmark. Can be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Write the JSON report to this file.")] = Path("out/bench.json"),
) -> Output:
    """Benchmark OrchestrRL and print each result as a ratio to a baseline from the same run. Lower is better.

    Absolute values depend on the machine and its load, so compare the ratios. Benchmarks: balancer_tick, fast_tick,
    solve, plan_tick, gateway_cpu, gateway_burst, gateway_ledger, start_up, fabric_allocate, sync_plan, sim_step,
    routing, recorder, fabric_windows.

    Example: `orchestrrl bench --only gateway_cpu`
    """
    # Imported here so that the other commands start without the measured code.
    from orchestrrl.lab.bench.run import BENCHMARKS, run

    raise_faults(fault for name in sorted(set(only or ())) for fault in choice_faults("--only", name, BENCHMARKS))
    names = [name for name in BENCHMARKS if not only or name in only]
    figures = run(names, out.parent / "bench", lambda name: note(f"{name} ..."))
    report = [fields(figure, "name value unit baseline baseline_value ratio note") for figure in figures]
    document = {"benchmarks": report}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, document)
    shown = table("Medians; ratio = value / baseline value", COLUMNS, figures)
    return Output(document, [shown, f"wrote {out}"])


COLUMNS: Columns = {
    "benchmark": "name",
    "value": lambda figure: f"{figure.value:.3g}",
    "unit": "unit",
    "baseline": "baseline",
    "baseline value": lambda figure: f"{figure.baseline_value:.3g}",
    "ratio": lambda figure: None if figure.ratio is None else f"{figure.ratio:.3g}",
    "note": "note",
}
