"""`orchestrrl demo`: demonstrate OrchestrRL on simulated engines or on vLLM servers."""

from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape

from orchestrrl.cli.command import command
from orchestrrl.cli.formats import duration, size
from orchestrrl.cli.lazy import sync_text as words
from orchestrrl.cli.output import Columns, Output, View, cells_table, choice_faults, raise_faults, table, write_json
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.running import LEAVE_SIGNALS, until_stopped
from orchestrrl.cli.sim.generation import seeds_of

if TYPE_CHECKING:
    from orchestrrl.lab.demo.run import DemoOutcome
    from orchestrrl.lab.demo.scenario import DemoScenario
    from orchestrrl.lab.demo.step import Report
    from orchestrrl.lab.demo.sync_run import SyncOutcome

_Outcome = TypeVar("_Outcome")


@command
def demo(
    engine: Annotated[
        str, typer.Option("--engine-kind", metavar="KIND", help="simulated | vllm (needs `make venv-vllm`)")
    ] = "simulated",
    kv: Annotated[bool, typer.Option("--kv", help="Use long prompts and engines with KV transfer.")] = False,
    redeploy: Annotated[
        bool, typer.Option("--redeploy", help="Have the daemon start the engines and redeploy them during the step.")
    ] = False,
    sync: Annotated[bool, typer.Option("--sync", help="Demonstrate only the weight sync.")] = False,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the report, the picture and the logs.")] = Path("out/demo"),
) -> Output:
    """Run a generation step without and with OrchestrRL for several seeds, compare the results, and sync new weights.

    The command starts engines, a daemon, an agent and a gateway as processes on this machine, and stops them at the
    end. It writes `report.json` and `remaining_requests.png`. The exit status is 1 if a request was lost or its tokens
    differ from those of an undisturbed run. With --kv, each moved request is continued by KV transfer or by
    recomputation, whichever is predicted to be faster.

    Finally, a trainer publishes weights while requests run. Peers transfer them to every engine, and each token is
    checked against the version that its response names. With --sync, the command runs only this part.

    With --redeploy, a step of Qwen2.5-14B starts on eight TP=2 engines, once with the planner pinned and once without.
    In the second run, the planner can continue the step on two TP=8 engines, as in the paper's case study. The circuits
    of a small optical fabric of virtual switches change accordingly. The command writes `redeployment.json` and
    `redeployment.png`.

    Example: `orchestrrl demo --seeds 1,2`
    """
    # Imported here so that the other commands start without the demo's numerical libraries.
    from orchestrrl.lab.demo.scenario import ENGINES, load_scenario

    raise_faults(choice_faults("--engine-kind", engine, ENGINES))
    faults = [
        f"{flag}: requires --engine-kind simulated, got {engine!r}"
        for flag, given in (("--kv", kv), ("--redeploy", redeploy))
        if given and engine != "simulated"
    ]
    if kv and redeploy:
        faults.append("--redeploy: cannot be combined with --kv")
    if sync and (kv or redeploy or seeds):
        faults.append("--sync: cannot be combined with --kv, --redeploy or --seeds")
    raise_faults(faults)
    scenario = load_scenario("simulated-redeploy" if redeploy else "simulated-kv" if kv else engine)
    chosen = seeds_of(seeds) or list(scenario.seeds)
    if redeploy:
        return _demo_redeployment(scenario, chosen, out)
    return _demo_sync(scenario, engine, out) if sync else _demo(scenario, engine, chosen, out)


def _demo(scenario: "DemoScenario", engine: str, seeds: list[int], out: Path) -> Output:
    """Run the comparison and the weight sync. The returned output is a failure if a request was lost, a response
    differs from that of an undisturbed run, or an engine lacks the new weights."""
    from orchestrrl.lab.demo.report import as_json, draw
    from orchestrrl.lab.demo.run import run_demo

    outcome = _finished(lambda report: run_demo(scenario, engine, seeds, out, report))
    draw(outcome, picture := out / "remaining_requests.png")
    synced = [] if outcome.sync is None else sync_demo_view(outcome.sync)
    view = [*_tables(outcome), *_summary(outcome), *synced]
    is_well = outcome.is_well and (outcome.sync is None or outcome.sync.is_well)
    return _written(out / "report.json", as_json(outcome), view, is_well, picture)


def _demo_sync(scenario: "DemoScenario", engine: str, out: Path) -> Output:
    """Run only the weight sync. The returned output is a failure if an engine lacks the new weights or a token is of
    the wrong version."""
    from orchestrrl.lab.demo.report import sync_json
    from orchestrrl.lab.demo.run import run_sync_demo

    outcome = _finished(lambda report: run_sync_demo(scenario, engine, out, report))
    return _written(out / "sync.json", sync_json(outcome), sync_demo_view(outcome), outcome.is_well)


def _demo_redeployment(scenario: "DemoScenario", seeds: list[int], out: Path) -> Output:
    from orchestrrl.cli.demo.redeployment import redeploy_demo_view
    from orchestrrl.lab.demo.redeploy_run import run_redeploy_demo
    from orchestrrl.lab.demo.report import draw_redeployment, redeploy_json

    outcome = _finished(lambda report: run_redeploy_demo(scenario, seeds, out, report))
    draw_redeployment(outcome, picture := out / "redeployment.png")
    view = redeploy_demo_view(outcome)
    return _written(out / "redeployment.json", redeploy_json(outcome), view, outcome.is_well, picture)


def _written(path: Path, document: Any, view: Iterable[Any], is_well: bool, *pictures: Path) -> Output:
    write_json(path, document)
    wrote = f"wrote {' and '.join(map(str, (path, *pictures)))}"
    return Output(document, [*view, wrote], failure=None if is_well else "")


def _finished(work: Callable[["Report"], Coroutine[Any, Any, _Outcome]]) -> _Outcome:
    """Run `work`, show its progress and return its outcome. If a signal stops `work`, stop the processes that it
    started and exit with status 128 + the signal's number."""
    outcome = with_progress(lambda report: until_stopped(work(report), LEAVE_SIGNALS))
    if isinstance(outcome, Signals):
        raise typer.Exit(128 + outcome)
    assert outcome is not None, "the work is cancelled only by a signal"
    return outcome


def _tables(demo: "DemoOutcome") -> View:
    unit = "engine seconds" if demo.scenario.speed != 1 else "seconds"
    requests = len(demo.seeds[0].samples)
    yield table(f"One generation step of {requests} requests: makespan in {unit}", SEED_COLUMNS, demo.seeds)
    if demo.moves_by_method:
        yield table(f"Requests moved with their context: medians, {unit}", METHOD_COLUMNS, demo.moves_by_method)
    yield cells_table(
        f"Idle {unit} of each engine",
        ("seed", "OrchestrRL", *(f"e{index}" for index in range(demo.scenario.engines))),
        (
            (outcome.seed, which, *(f"{seconds:.0f}" for seconds in record.idle_s))
            for outcome in demo.seeds
            for which, record in (("without", outcome.baseline), ("with", outcome.shown))
        ),
    )


SEED_COLUMNS: Columns = {
    "seed": "seed",
    "without": lambda outcome: f"{outcome.baseline.makespan_s:.1f}",
    "with": lambda outcome: f"{outcome.shown.makespan_s:.1f}",
    "ratio": lambda outcome: f"{outcome.ratio:.3f}",
    "oracle's ratio": lambda outcome: None if outcome.oracle_ratio is None else f"{outcome.oracle_ratio:.3f}",
    "moves": "moves",
    "tokens recomputed": lambda outcome: f"{outcome.tokens_recomputed:,}",
}
METHOD_COLUMNS: Columns = {
    "method": "method",
    "moves": "moves",
    "context tokens": lambda mark: f"{mark.context_tokens:,.0f}",
    "predicted": lambda mark: f"{mark.predicted_s:.3f}",
    "actual": lambda mark: f"{mark.actual_s:.3f}",
    "ratio": lambda mark: f"{mark.predicted_over_actual:.2f}",
    "predicted by the other method": lambda mark: f"{mark.other_s:.3f}" if mark.other_s else None,
}


def _summary(demo: "DemoOutcome") -> Iterator[str]:
    ratios = [outcome.ratio for outcome in demo.seeds]
    yield f"makespan ratio (without / with): median {demo.ratio_median:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    if demo.oracle_ratio_median is not None:
        kept = "" if demo.gain_kept is None else f"; OrchestrRL keeps {demo.gain_kept:.0%} of its gain"
        yield f"an oracle with all lengths known: median {demo.oracle_ratio_median:.3f}{kept}"
    yield f"requests lost: {demo.lost}, differing from an undisturbed run: {demo.differing}"
    if demo.limit:
        share, tokens, seed = demo.limit
        yield (
            f"limit: a response cannot be split; with seed {seed}, the longest ({tokens:,} tokens), alone on an "
            f"engine, takes {share:.0%} of the step"
        )
    yield from (f"[red]{fault}[/red]" for fault in demo.faults[:5])


def sync_demo_view(synced: "SyncOutcome") -> View:
    yield words.phases_table("New weights while requests run", [synced.profile])
    yield from _sync_summary(synced)
    yield from words.advice_lines([synced.profile])


def _sync_summary(synced: "SyncOutcome") -> Iterator[str]:
    took = synced.profile
    version = f"version {took.report.version} ({size(took.report.bytes)})"
    still = f"requests were paused for {duration(took.still_s)}"
    yield f"{version}: installed on {synced.serve_it} of {synced.engines} engines; {still} of {duration(took.whole_s)}"
    yield (
        f"responses: {synced.answered} of {synced.requests}, {synced.crossed} with tokens of both versions; tokens of"
        f" a version other than the response names: {synced.differing} of {sum(synced.tokens.values()):,}"
    )
    if took.transfer_s:
        yield words.transfer_text(took)
    yield from (escape(note) for note in took.report.notes)
    yield from (f"[red]{escape(fault)}[/red]" for fault in synced.faults[:5])
