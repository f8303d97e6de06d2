"""`orchestrrl demo`: see it work, on simulated engines or on real vLLM servers."""

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrrl.cli.output import EXIT_FAILURE, JsonFlag, print_json, print_lines, print_table, reporting_errors, stderr
from orchestrrl.cli.running import LEAVE_SIGNALS, until_stopped
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.demo.run import DemoOutcome, Report
    from orchestrrl.lab.demo.scenario import DemoScenario

_Outcome = TypeVar("_Outcome")


def register(app: typer.Typer) -> None:
    app.command(name="demo")(demo)


def demo(
    engine: Annotated[str, typer.Option(help="simulated | vllm (needs `make venv-vllm`)")] = "simulated",
    kv: Annotated[bool, typer.Option("--kv", help="Long prompts, on engines that can hand KV over.")] = False,
    redeploy: Annotated[
        bool, typer.Option("--redeploy", help="The daemon starts the engines, and may replace them by wider ones.")
    ] = False,
    sync: Annotated[bool, typer.Option("--sync", help="The new weights alone, without the comparison.")] = False,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")] = "",
    out: Annotated[Path, typer.Option(help="Where the report, the picture and the logs go.")] = Path("out/demo"),
    json: JsonFlag = False,
) -> None:
    """Run one generation step without and with OrchestrRL, over several seeds, and compare; then bring new weights.

    Starts the engines, a daemon, an agent and a gateway as processes on this machine, and ends them again. Writes
    `report.json` and `remaining_requests.png`. Exit status 1 if a request was lost or its tokens differ. With --kv,
    running requests move by KV or by computing their context again, whichever is predicted to take less.

    At last a trainer publishes weights while requests run: peers bring them to every engine, and each token has to be
    of the version that its answer names. --sync shows that alone.

    With --redeploy, a step of Qwen2.5-14B begins on eight TP=2 engines, once with the planner pinned to them and once
    without: it may go on with two of TP=8, as in the paper's case study. Circuits of a small optical fabric of virtual
    switches follow. Writes `redeployment.json` and `redeployment.png`.

    Example: `orchestrrl demo --seeds 1,2`
    """
    # Imported here so that every other command starts without the demo's numerics.
    from orchestrrl.lab.demo.scenario import ENGINES, load_scenario

    with reporting_errors():
        if engine not in ENGINES:
            raise ProblemFaults([f"--engine: must be one of {', '.join(ENGINES)}, got {engine!r}"])
        faults = [
            f"{flag}: goes with --engine simulated, got {engine!r}"
            for flag, given in (("--kv", kv), ("--redeploy", redeploy))
            if given and engine != "simulated"
        ]
        if kv and redeploy:
            faults.append("--redeploy: does not go with --kv")
        if sync and (kv or redeploy or seeds):
            faults.append("--sync: goes without --kv, --redeploy and --seeds")
        if faults:
            raise ProblemFaults(faults)
        scenario = load_scenario("simulated-redeploy" if redeploy else "simulated-kv" if kv else engine)
        chosen = _seeds(seeds) or list(scenario.seeds)
    if redeploy:
        whole = _demo_redeployment(scenario, chosen, out, json)
    elif sync:
        whole = _demo_sync(scenario, engine, out, json)
    else:
        whole = _demo(scenario, engine, chosen, out, json)
    if not whole:
        raise typer.Exit(EXIT_FAILURE)


def _demo(scenario: "DemoScenario", engine: str, seeds: list[int], out: Path, json: bool) -> bool:
    """Whether nothing was lost, no answer differs, and every engine has the new weights."""
    from orchestrrl.cli.demo.weight_sync import print_sync_demo
    from orchestrrl.lab.demo.report import as_json, write
    from orchestrrl.lab.demo.run import run_demo

    with reporting_errors():
        outcome = _with_progress(lambda report: run_demo(scenario, engine, seeds, out, report))
        report_path, picture_path = write(outcome, out)
    if json:
        print_json(as_json(outcome))
    else:
        _print_tables(outcome)
        print_lines(_summary(outcome))
        if outcome.sync is not None:
            print_sync_demo(outcome.sync)
        print_lines([f"wrote {report_path} and {picture_path}"])
    return outcome.is_well


def _demo_sync(scenario: "DemoScenario", engine: str, out: Path, json: bool) -> bool:
    """Whether every engine has the new weights, and every token is of the version that it should be of."""
    from orchestrrl.cli.demo.weight_sync import print_sync_demo
    from orchestrrl.lab.demo.report import sync_json, write_sync
    from orchestrrl.lab.demo.run import run_sync_demo

    with reporting_errors():
        outcome = _with_progress(lambda report: run_sync_demo(scenario, engine, out, report))
        path = write_sync(outcome, out)
    if json:
        print_json(sync_json(outcome))
    else:
        print_sync_demo(outcome)
        print_lines([f"wrote {path}"])
    return outcome.is_well


def _demo_redeployment(scenario: "DemoScenario", seeds: list[int], out: Path, json: bool) -> bool:
    """The same, of the demo of a redeployment."""
    from orchestrrl.cli.demo.redeployment import print_redeploy_demo
    from orchestrrl.lab.demo.redeploy_report import as_json, write
    from orchestrrl.lab.demo.redeploy_run import run_redeploy_demo

    with reporting_errors():
        outcome = _with_progress(lambda report: run_redeploy_demo(scenario, seeds, out, report))
        report_path, picture_path = write(outcome, out)
    if json:
        print_json(as_json(outcome))
    else:
        print_redeploy_demo(outcome)
        print_lines([f"wrote {report_path} and {picture_path}"])
    return not outcome.lost and not outcome.differing


def _with_progress(work: Callable[["Report"], Coroutine[Any, Any, _Outcome]]) -> _Outcome:
    """Its outcome, while a bar shows how far it is. Any signal that stops it ends its processes, too."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    outcomes: list[_Outcome] = []

    def report(what: str, done: int, total: int) -> None:
        bars.update(task, description=what, completed=done, total=total or None)

    async def run() -> None:
        outcomes.append(await work(report))

    with Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
    ) as bars:
        task = bars.add_task("", total=None)
        stopped_by = until_stopped(run(), LEAVE_SIGNALS)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)
    return outcomes[0]


def _seeds(text: str) -> list[int]:
    seeds, faults = [], []
    for index, part in enumerate(part.strip() for part in text.split(",") if part.strip()):
        if part.isdecimal():
            seeds.append(int(part))
        else:
            faults.append(f"--seeds[{index}]: must be a whole number, got {part!r}")
    if faults:
        raise ProblemFaults(faults)
    return seeds


def _print_tables(demo: "DemoOutcome") -> None:
    unit = "engine seconds" if demo.scenario.speed != 1 else "seconds"
    print_table(
        f"One generation step of {len(demo.seeds[0].samples)} requests: makespan in {unit}",
        ("seed", "without", "with", "ratio", "oracle's ratio", "moves", "tokens recomputed"),
        (
            (
                outcome.seed,
                f"{outcome.static.makespan_s:.1f}",
                f"{outcome.orchestrrl.makespan_s:.1f}",
                f"{outcome.ratio:.3f}",
                None if outcome.oracle_ratio is None else f"{outcome.oracle_ratio:.3f}",
                outcome.moves,
                f"{outcome.tokens_recomputed:,}",
            )
            for outcome in demo.seeds
        ),
    )
    if demo.moves_by_method:
        print_table(
            f"Requests that moved with their context: medians, {unit}",
            ("by", "moves", "tokens of context", "predicted", "actual", "ratio", "predicted by the other method"),
            (
                (
                    mark.method,
                    mark.moves,
                    f"{mark.context_tokens:,.0f}",
                    f"{mark.predicted_s:.3f}",
                    f"{mark.actual_s:.3f}",
                    f"{mark.predicted_over_actual:.2f}",
                    f"{mark.other_s:.3f}" if mark.other_s else None,
                )
                for mark in demo.moves_by_method
            ),
        )
    print_table(
        f"Idle {unit} of each engine",
        ("seed", "OrchestrRL", *(f"e{index}" for index in range(demo.scenario.engines))),
        (
            (outcome.seed, which, *(f"{seconds:.0f}" for seconds in record.idle_s))
            for outcome in demo.seeds
            for which, record in (("without", outcome.static), ("with", outcome.orchestrrl))
        ),
    )


def _summary(demo: "DemoOutcome") -> Iterator[str]:
    ratios = [outcome.ratio for outcome in demo.seeds]
    yield f"makespan ratio (without / with): median {demo.ratio_median:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    if demo.oracle_ratio_median is not None:
        kept = "" if demo.gain_kept is None else f"; OrchestrRL keeps {demo.gain_kept:.0%} of its gain"
        yield f"an oracle that knows every length: median {demo.oracle_ratio_median:.3f}{kept}"
    yield f"requests lost: {demo.lost}, differing from an undisturbed run: {demo.differing}"
    if demo.limit:
        share, tokens, seed = demo.limit
        yield (
            f"what limits it: one answer cannot be split; with seed {seed} the longest ({tokens:,} tokens), alone on "
            f"an engine, takes {share:.0%} of the step"
        )
    yield from (f"[red]{fault}[/red]" for fault in demo.faults[:5])
