"""`orchestrrl bench`: what decisions and the gateway cost, as ratios measured side by side."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors, stderr


def register(app: typer.Typer) -> None:
    app.command(name="bench")(bench)


def bench(
    only: Annotated[list[str] | None, typer.Option(help="Run this benchmark alone; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("out/bench.json"),
    json: JsonFlag = False,
) -> None:
    """Measure what OrchestrRL costs, each figure beside a baseline in the same run; less is better.

    Machines differ and are noisy, so compare ratios. Benchmarks: balancer_tick, fast_tick, solve, plan_tick, forecast,
    policies, moves, profile_score, gateway_cpu, gateway_burst, gateway_ledger, start_up, fabric_allocate,
    fabric_place, fabric_transition, sync_plan, sim_step, routing, recorder, fabric_materialize,
    fabric_windows, slack, weights_bandwidth.

    Example: `orchestrrl bench --only gateway_cpu`
    """
    # Imported here so that every other command starts without what is measured.
    from orchestrrl.lab.bench.run import as_json, chosen, run, write

    with reporting_errors():
        names = chosen(only or [])
        figures = run(names, out.parent / "bench", lambda name: stderr().print(f"{name} ..."))
        write(figures, out)
    if json:
        print_json(as_json(figures))
        return
    print_table(
        "Medians; ratio: value / baseline's",
        ("benchmark", "value", "unit", "baseline", "baseline's", "ratio", "note"),
        (
            (
                figure.name,
                f"{figure.value:.3g}",
                figure.unit,
                figure.baseline,
                f"{figure.baseline_value:.3g}",
                None if figure.ratio is None else f"{figure.ratio:.3g}",
                figure.note,
            )
            for figure in figures
        ),
    )
    print_lines([f"wrote {out}"])
