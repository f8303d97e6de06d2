"""Write the JSON reports of the demos (report.json, sync.json, redeployment.json), and plots of remaining requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrrl.core.charts import axes, save
from orchestrrl.lab.demo.redeploy_run import ObservedRedeployment, RedeployDemo, RedeploySeed, Resumption
from orchestrrl.lab.demo.redeploy_stack import ObservedFabric
from orchestrrl.lab.demo.run import DemoOutcome
from orchestrrl.lab.demo.step import DemoStepRecord
from orchestrrl.lab.demo.sync_run import SyncOutcome
from orchestrrl.lab.sim.static import countdown
from orchestrrl.weights.controller.advice import advice

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_json(demo: DemoOutcome) -> dict[str, Any]:
    """Return the report of `make demo`, including the data from which its numbers can be verified."""
    return {
        "engine": demo.engine,
        "requests": len(demo.seeds[0].samples),
        "seeds": [outcome.seed for outcome in demo.seeds],
        "makespan_s": {
            "static": [outcome.baseline.makespan_s for outcome in demo.seeds],
            "orchestrrl": [outcome.shown.makespan_s for outcome in demo.seeds],
            "oracle": [None if outcome.oracle is None else outcome.oracle.makespan_s for outcome in demo.seeds],
            "lower_bound": [None if outcome.oracle is None else outcome.oracle.lower_bound_s for outcome in demo.seeds],
        },
        "ratio": "static / orchestrrl; the oracle's: simulated static / oracle",
        "ratios": [outcome.ratio for outcome in demo.seeds],
        "oracle_ratios": [outcome.oracle_ratio for outcome in demo.seeds],
        "ratio_median": demo.ratio_median,
        "oracle_ratio_median": demo.oracle_ratio_median,
        "gain_kept": demo.gain_kept,
        "moves": sum(outcome.moves for outcome in demo.seeds),
        "tokens_recomputed": sum(outcome.tokens_recomputed for outcome in demo.seeds),
        "moves_by_method": [asdict(mark) for mark in demo.moves_by_method],
        "lost": demo.lost,
        "differing": demo.differing,
        "idle_s": {
            "static": [outcome.baseline.idle_s for outcome in demo.seeds],
            "orchestrrl": [outcome.shown.idle_s for outcome in demo.seeds],
        },
        "sync": None if demo.sync is None else sync_json(demo.sync),
        "faults": demo.faults,
    }


def sync_json(synced: SyncOutcome) -> dict[str, Any]:
    """Return the report of a weight sync. Times are in wall-clock seconds."""
    took = synced.profile
    return {
        "version": took.report.version,
        "state": took.report.state,
        "code": took.report.code,
        "bytes": took.report.bytes,
        "engines": synced.engines,
        "serve_it": synced.serve_it,
        "requests": synced.requests,
        "answered": synced.answered,
        "answers_of_both_versions": synced.crossed,
        "tokens_by_version": {str(version): count for version, count in synced.tokens.items()},
        "tokens_differing": synced.differing,
        "whole_s": took.whole_s,
        "stood_still_s": took.still_s,
        "transfer_s": took.transfer_s,
        "estimate_s": took.report.estimate_s,
        "phases_s": {row.phase: row.seconds for row in took.rows},
        "dominating": took.dominating,
        "advice": [each.text for each in advice(took)],
        "faults": synced.faults,
    }


def draw(demo: DemoOutcome, path: Path) -> None:
    """Plot the requests in flight over time, without and with OrchestrRL, in one panel per seed. The plot resembles
    figure 11 of the paper."""
    count = len(demo.seeds)
    figure, [panels] = axes(1, count, width=1.2 + 3.1 * count, height=3.4, sharey=True)
    for axis, outcome in zip(panels, demo.seeds, strict=True):
        arms = {"without OrchestrRL": outcome.baseline, "with OrchestrRL": outcome.shown}
        draw_remaining(axis, arms, len(outcome.samples))
        axis.set_title(f"seed {outcome.seed}: ratio {outcome.ratio:.2f}", fontsize=10)
        axis.set_xlabel("time (s)")
    panels[0].set_ylabel("remaining requests")
    panels[0].legend(loc="lower left", fontsize=8)
    figure.suptitle(f"One generation step on {demo.scenario.engines} {demo.engine} engines", fontsize=11)
    save(figure, path)


def draw_remaining(axis: "Axes", arms: Mapping[str, DemoStepRecord], total: int) -> None:
    """Plot the requests in flight over time for two runs of `total` requests each, and mark the end of each run. The
    first run is the baseline."""
    for (label, record), colour in zip(arms.items(), ("#888888", "#1f77b4"), strict=True):
        points = countdown(sorted(record.finish_s.values()), total - len(record.finish_s))
        axis.step(*zip(*points, strict=True), where="post", label=label, color=colour)
        axis.axvline(record.makespan_s, color=colour, linewidth=0.8, linestyle=":")
    axis.set_yscale("symlog", linthresh=1)
    axis.set_ylim(0, total * 1.2)
    axis.set_yticks([tick for tick in (0, 1, 10, 100, 1000) if tick <= total])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


# --- the demo of a redeployment

# The case study, arXiv 2601.01209, section 6.2.2: seconds into the step, and seconds of the redeployment.
PAPER = {"at_s": 272.0, "total_s": 7.5, "redeploying_s": 1.5, "kv_recompute_s": 5.4}


def redeploy_json(demo: RedeployDemo) -> dict[str, Any]:
    """Return the report of the redeployment demo. Times are in engine seconds, as in the paper. Fields whose name ends
    in `wall_s`, and times in the daemon's reports and plans, are in wall-clock seconds instead."""
    speed = demo.scenario.speed
    return {
        "requests": len(demo.seeds[0].samples),
        "engine_seconds_per_wall_second": speed,
        "seeds": [outcome.seed for outcome in demo.seeds],
        "makespan_s": {
            "pinned": [outcome.baseline.makespan_s for outcome in demo.seeds],
            "free": [outcome.shown.makespan_s for outcome in demo.seeds],
        },
        "ratio": "pinned / free",
        "ratios": [outcome.ratio for outcome in demo.seeds],
        "redeployments": [
            {"seed": outcome.seed, **_redeployment_json(redeployed, outcome, speed)}
            for outcome in demo.seeds
            for redeployed in outcome.redeployments
        ],
        "failed_redeployments": [
            {"seed": outcome.seed, "detail": redeployment["detail"]}
            for outcome in demo.seeds
            for redeployment in outcome.failed_redeployments
        ],
        "fabric": [
            {
                "seed": outcome.seed,
                "circuits_before": _circuits_json(outcome.fabric_before),
                "circuits_after": _circuits_json(outcome.fabric_after),
            }
            for outcome in demo.seeds
        ],
        "paper": PAPER,
        "lost": demo.lost,
        "differing": demo.differing,
        "faults": demo.faults,
    }


def _redeployment_json(redeployed: ObservedRedeployment, outcome: RedeploySeed, speed: float) -> dict[str, Any]:
    report, resumed = redeployed.report, redeployed.resumption
    return {
        "from": dict(Counter(engine["configuration"] for engine in report["old_engines"])),
        "to": dict(Counter(engine["configuration"] for engine in report["new_engines"])),
        "at_s": at_s(redeployed, outcome, speed),
        "redeploying": {"wall_s": redeployed.redeploying_s, "s": redeployed.redeploying_s * speed},
        "recompute": None if resumed is None else _resumption_json(resumed, speed),
        "circuits": redeployed.followed,
        "total": {"wall_s": redeployed.total_s, "s": redeployed.total_s * speed},
        "predicted_gain_s": redeployed.predicted_gain_s * speed,
        "report": report,
        "plan": redeployed.plan,
    }


def _circuits_json(fabric: ObservedFabric) -> list[dict[str, Any]]:
    return [{"pod": pod, "a": a, "b": b, "circuits": count} for (pod, a, b), count in sorted(fabric.circuits.items())]


def _resumption_json(resumed: Resumption, speed: float) -> dict[str, Any]:
    seconds = {name: getattr(resumed, name) * speed for name in ("predicted_s", "median_s", "last_s")}
    return {"requests": resumed.requests, "context_tokens": resumed.context_tokens, **seconds}


def at_s(redeployed: ObservedRedeployment, outcome: RedeploySeed, speed: float) -> float:
    """Return the time from the start of the step to the start of the redeployment, in engine seconds."""
    return float(redeployed.report["created_unix_s"] - outcome.began_s) * speed


def draw_redeployment(demo: RedeployDemo, path: Path) -> None:
    """Plot two panels per seed: the requests in flight in both runs (top), and the requests per GPU of each engine in
    the run with redeployments (bottom)."""
    count, speed = len(demo.seeds), demo.scenario.speed
    figure, panels = axes(2, count, width=1.6 + 5.4 * count, height=5.6)
    for column, outcome in enumerate(demo.seeds):
        above, below = panels[0][column], panels[1][column]
        above.sharex(below)
        arms = {"pinned to the initial fleet": outcome.baseline, "free to redeploy": outcome.shown}
        draw_remaining(above, arms, len(outcome.samples))
        for redeployed in outcome.redeployments:
            began_s = at_s(redeployed, outcome, speed)
            ended_s = began_s + redeployed.total_s * speed
            above.axvspan(began_s, ended_s, color="#d62728", alpha=0.3, label="redeployment")
        above.set_title(f"seed {outcome.seed}: ratio {outcome.ratio:.2f}", fontsize=10)
        _draw_engines(below, demo, outcome)
    panels[0][0].set_ylabel("remaining requests")
    panels[1][0].set_ylabel("GPU")
    panels[0][0].legend(loc="lower left", fontsize=8)
    figure.suptitle("One generation step, with and without a redeployment", fontsize=11)
    save(figure, path)


def _draw_engines(axis: "Axes", demo: RedeployDemo, outcome: RedeploySeed) -> None:
    from matplotlib.colors import LogNorm

    deployment = demo.scenario.deployment
    assert deployment is not None, "the daemon starts the fleet of this scenario"
    gpus_of: dict[str, Sequence[int]] = {
        engine["engine_id"]: engine["gpus"]
        for redeployed in outcome.redeployments
        for engines in ("old_engines", "new_engines")
        for engine in redeployed.report[engines]
    }
    times = [(look.at_s - outcome.began_s) * demo.scenario.speed for look in outcome.snapshots]
    if len(times) > 1 and gpus_of:
        loads = np.full((deployment.gpus, len(times)), np.nan)  # [gpu, snapshot], requests of the engine per GPU
        for look, snapshot in enumerate(outcome.snapshots):
            for engine, requests in Counter(snapshot.engine_of.values()).items():
                if gpus := gpus_of.get(engine):
                    loads[gpus, look] = requests / len(gpus)
        edges = [*times, 2 * times[-1] - times[-2]]
        norm = LogNorm(0.1, np.nanmax(loads, initial=1.0))
        mesh = axis.pcolormesh(edges, range(deployment.gpus + 1), loads, norm=norm, cmap="Blues")
        axis.figure.colorbar(mesh, ax=axis, orientation="horizontal", label="requests per GPU", pad=0.25, aspect=40)
    end_s = outcome.shown.makespan_s
    for redeployed in outcome.redeployments:
        began_s = at_s(redeployed, outcome, demo.scenario.speed)
        over_s = began_s + redeployed.redeploying_s * demo.scenario.speed
        for engines, low_s, high_s in (("old_engines", 0.0, began_s), ("new_engines", over_s, end_s)):
            borders = [min(engine["gpus"]) for engine in redeployed.report[engines]]
            axis.hlines(borders, low_s, high_s, colors="white", linewidth=1.5)
            kinds = Counter(engine["configuration"] for engine in redeployed.report[engines])
            words = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
            axis.text((low_s + high_s) / 2, deployment.gpus + 0.3, words, ha="center", fontsize=9, color="#d62728")
    axis.set_xlabel("time (engine seconds)")
    axis.set_xlim(left=0)
    axis.set_yticks(range(0, deployment.gpus + 1, 4))
