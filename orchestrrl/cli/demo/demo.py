"""`orchestrrl demo`: see it work, on simulated engines or on real vLLM servers."""

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
    engine: Annotated[str, typer.Option(help="simulated | vllm (needs `make venv-vllm`)")] = "simulated",
    kv: Annotated[bool, typer.Option("--kv", help="Long prompts, on engines that can hand KV over.")] = False,
    redeploy: Annotated[
        bool, typer.Option("--redeploy", help="The daemon starts the engines, and may replace them by wider ones.")
    ] = False,
    sync: Annotated[bool, typer.Option("--sync", help="The new weights alone, without the comparison.")] = False,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds. Default: the scenario's.")] = "",
    out: Annotated[Path, typer.Option(help="Where the report, the picture and the logs go.")] = Path("out/demo"),
) -> Output:
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

    raise_faults(choice_faults("--engine", engine, ENGINES))
    faults = [
        f"{flag}: goes with --engine simulated, got {engine!r}"
        for flag, given in (("--kv", kv), ("--redeploy", redeploy))
        if given and engine != "simulated"
    ]
    if kv and redeploy:
        faults.append("--redeploy: does not go with --kv")
    if sync and (kv or redeploy or seeds):
        faults.append("--sync: goes without --kv, --redeploy and --seeds")
    raise_faults(faults)
    scenario = load_scenario("simulated-redeploy" if redeploy else "simulated-kv" if kv else engine)
    chosen = seeds_of(seeds) or list(scenario.seeds)
    if redeploy:
        return _demo_redeployment(scenario, chosen, out)
    return _demo_sync(scenario, engine, out) if sync else _demo(scenario, engine, chosen, out)


def _demo(scenario: "DemoScenario", engine: str, seeds: list[int], out: Path) -> Output:
    """Exit status 0: nothing was lost, no answer differs, and every engine has the new weights."""
    from orchestrrl.lab.demo.report import as_json, draw
    from orchestrrl.lab.demo.run import run_demo

    outcome = _finished(lambda report: run_demo(scenario, engine, seeds, out, report))
    draw(outcome, picture := out / "remaining_requests.png")
    synced = [] if outcome.sync is None else sync_demo_view(outcome.sync)
    view = [*_tables(outcome), *_summary(outcome), *synced]
    is_well = outcome.is_well and (outcome.sync is None or outcome.sync.is_well)
    return _written(out / "report.json", as_json(outcome), view, is_well, picture)


def _demo_sync(scenario: "DemoScenario", engine: str, out: Path) -> Output:
    """Exit status 0: every engine has the new weights, and every token is of the version that it should be of."""
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
    """Return the outcome of the work. Any signal that stops it ends its processes, too."""
    outcome = with_progress(lambda report: until_stopped(work(report), LEAVE_SIGNALS))
    if isinstance(outcome, Signals):
        raise typer.Exit(128 + outcome)
    assert outcome is not None, "only a signal cancels it"
    return outcome


def _tables(demo: "DemoOutcome") -> View:
    unit = "engine seconds" if demo.scenario.speed != 1 else "seconds"
    requests = len(demo.seeds[0].samples)
    yield table(f"One generation step of {requests} requests: makespan in {unit}", SEED_COLUMNS, demo.seeds)
    if demo.moves_by_method:
        yield table(f"Requests that moved with their context: medians, {unit}", METHOD_COLUMNS, demo.moves_by_method)
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
    "by": "method",
    "moves": "moves",
    "tokens of context": lambda mark: f"{mark.context_tokens:,.0f}",
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
        yield f"an oracle that knows every length: median {demo.oracle_ratio_median:.3f}{kept}"
    yield f"requests lost: {demo.lost}, differing from an undisturbed run: {demo.differing}"
    if demo.limit:
        share, tokens, seed = demo.limit
        yield (
            f"what limits it: one answer cannot be split; with seed {seed} the longest ({tokens:,} tokens), alone on "
            f"an engine, takes {share:.0%} of the step"
        )
    yield from (f"[red]{fault}[/red]" for fault in demo.faults[:5])


def sync_demo_view(synced: "SyncOutcome") -> View:
    yield words.phases_table("New weights while requests run", [synced.profile])
    yield from _sync_summary(synced)
    yield from words.advice_lines([synced.profile])


def _sync_summary(synced: "SyncOutcome") -> Iterator[str]:
    took = synced.profile
    version = f"version {took.report.version} ({size(took.report.bytes)})"
    still = f"requests stood still for {duration(took.still_s)}"
    yield f"{version}: {synced.serve_it} of {synced.engines} engines have it; {still} of {duration(took.whole_s)}"
    yield (
        f"answers: {synced.answered} of {synced.requests}, {synced.crossed} with tokens of both versions; tokens that"
        f" are not of the version which the answer names: {synced.differing} of {sum(synced.tokens.values()):,}"
    )
    if took.transfer_s:
        yield words.transfer_text(took)
    yield from (escape(note) for note in took.report.notes)
    yield from (f"[red]{escape(fault)}[/red]" for fault in synced.faults[:5])
