"""Output of `orchestrrl demo --redeploy`: the redeployment's time line compared with the time line in the paper, and
the gain in makespan."""

from collections.abc import Iterator

from orchestrrl.cli.fleet.redeploy_text import change_text, time_line
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Columns, View, cells_table, table
from orchestrrl.lab.demo.redeploy_run import ObservedRedeployment, RedeployDemo, RedeploySeed
from orchestrrl.lab.demo.redeploy_stack import GEN_POD, modelled_switch_s
from orchestrrl.lab.demo.report import PAPER, at_s

COLUMNS = ("", "clock, s", "engine s", "predicted", "paper")


def redeploy_demo_view(demo: RedeployDemo) -> View:
    speed = demo.scenario.speed
    for outcome in demo.seeds:
        for redeployed in outcome.redeployments:
            report = dict(redeployed.report)
            yield time_line(report, report["created_unix_s"])
            began_s = at_s(redeployed, outcome, speed)
            title = f"{change_text(report)} at {began_s:.0f} engine seconds of seed {outcome.seed}"
            yield cells_table(title, COLUMNS, _beside_the_paper(demo, redeployed))
        title = f"Circuits of {GEN_POD} before and after, seed {outcome.seed}"
        yield cells_table(title, ("from", "to", "before", "after"), _circuits(outcome))
    columns: Columns = {
        "seed": "seed",
        "pinned": lambda outcome: f"{outcome.baseline.makespan_s:.1f}",
        "free to redeploy": lambda outcome: f"{outcome.shown.makespan_s:.1f}",
        "ratio": lambda outcome: f"{outcome.ratio:.3f}",
        "gained": lambda outcome: f"{outcome.baseline.makespan_s - outcome.shown.makespan_s:.1f}",
        "gain predicted": lambda outcome: f"{sum(each.predicted_gain_s for each in outcome.redeployments) * speed:.1f}",
        "tokens recomputed": lambda outcome: (
            f"{sum(s.resumption.context_tokens for s in outcome.redeployments if s.resumption):,}"
        ),
    }
    title = f"One generation step of {len(demo.seeds[0].samples)} requests: engine seconds"
    yield table(title, columns, demo.seeds)
    yield from _summary(demo)


def _beside_the_paper(demo: RedeployDemo, redeployed: ObservedRedeployment) -> Iterator[tuple[object, ...]]:
    speed, plan, resumed = demo.scenario.speed, redeployed.plan, redeployed.resumption

    def row(what: str, wall_s: float, predicted_s: float | None, paper_s: float | None) -> tuple[object, ...]:
        predicted = None if predicted_s is None else f"{predicted_s * speed:.1f}"
        return what, f"{wall_s:.2f}", f"{wall_s * speed:.1f}", predicted, paper_s

    assert demo.scenario.deployment is not None, "the daemon starts the fleet of this scenario"
    modelled_s = modelled_switch_s(demo.scenario.deployment, demo.scenario.deployment.standby) / speed
    yield row("redeployment", redeployed.redeploying_s, plan["redeploy_cost_s"], PAPER["redeploying_s"])
    yield row("  as modelled: sleep and wake-up", modelled_s, None, PAPER["redeploying_s"])
    circuits_s = redeployed.followed["wall_s"] if redeployed.followed else 0.0
    if redeployed.followed:
        yield row("  circuits, on virtual switches", circuits_s, None, None)
    yield row(
        "  processes, checks, HTTP on this machine", redeployed.redeploying_s - modelled_s - circuits_s, None, None
    )
    if resumed is not None:
        what = f"KV recomputed: {resumed.requests} requests, {resumed.context_tokens:,} tokens"
        yield row(what, resumed.last_s, resumed.predicted_s, PAPER["kv_recompute_s"])
    yield row("total", redeployed.total_s, plan["redeploy_cost_s"] + plan["migration_cost_s"], PAPER["total_s"])


def _circuits(outcome: RedeploySeed) -> Iterator[tuple[object, ...]]:
    """Yield one row (from, to, before, after) for each pair of ToRs in the generation PoD, with the number of circuits
    before and after the redeployment. ToR names omit the PoD."""
    before, after = outcome.fabric_before.circuits, outcome.fabric_after.circuits
    for pod, a, b in sorted(before.keys() | after.keys()):
        if pod == GEN_POD:
            yield a, b, before.get((pod, a, b), 0), after.get((pod, a, b), 0)


def _summary(demo: RedeployDemo) -> Iterator[str]:
    speed = demo.scenario.speed
    redeployments = [(outcome, redeployed) for outcome in demo.seeds for redeployed in outcome.redeployments]
    if not redeployments:
        yield "[yellow]the planner found no redeployment with a gain: see `reason` in the journal's plans[/yellow]"
    for outcome, redeployed in redeployments:
        yield f"seed {outcome.seed}: {redeployed.report['reason']}"
        if redeployed.plan["actual_makespan_s"] is not None:
            predicted, actual = redeployed.plan["predicted_s"] * speed, redeployed.plan["actual_makespan_s"] * speed
            yield f"  time to the end of the step: predicted {predicted:.1f}, actual {actual:.1f} engine seconds"
        if (followed := redeployed.followed) is not None:
            yield (
                f"  {followed['said']}: announced to verified {duration(followed['wall_s'])}, of which command to "
                f"verified {duration(followed['switches_wall_s'])}"
            )
        if redeployed.resumption is not None:
            half, last = redeployed.resumption.median_s * speed, redeployed.resumption.last_s * speed
            yield f"  first token after it: half of the requests within {half:.1f}, the last after {last:.1f} engine s"
    yield (
        f"engines run {speed:g} times faster than real time: decoding, prefill and sleep are scaled. Processes and "
        f"HTTP are not, so a second of theirs counts as {speed:g} engine seconds"
    )
    yield f"requests lost: {demo.lost}, differing from an undisturbed run: {demo.differing}"
    yield from (f"[red]{fault}[/red]" for fault in demo.faults[:5])
