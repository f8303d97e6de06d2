"""The demo's outcome for machines (report.json), and a picture of the requests that remain."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrrl.core.charts import axes, save
from orchestrrl.lab.demo.run import DemoOutcome
from orchestrrl.lab.demo.step import DemoStepRecord
from orchestrrl.lab.demo.sync_run import SyncOutcome
from orchestrrl.weights.controller.advice import advice

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_json(demo: DemoOutcome) -> dict[str, Any]:
    """The report, as the contract of `make demo` has it, and what it takes to check its figures."""
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
    """Seconds of the clock."""
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
    """Requests in flight over time, both runs, one panel per seed (figure 11 of the paper)."""
    count = len(demo.seeds)
    figure, [panels] = axes(1, count, width=1.2 + 3.1 * count, height=3.4, sharey=True)
    for axis, outcome in zip(panels, demo.seeds, strict=True):
        arms = {"without OrchestrRL": outcome.baseline, "with OrchestrRL": outcome.shown}
        draw_remaining(axis, arms, len(outcome.samples))
        axis.set_title(f"seed {outcome.seed}: ratio {outcome.ratio:.2f}", fontsize=10)
        axis.set_xlabel("time (s)")
    panels[0].set_ylabel("requests that remain")
    panels[0].legend(loc="lower left", fontsize=8)
    figure.suptitle(f"One generation step on {demo.scenario.engines} {demo.engine} engines", fontsize=11)
    save(figure, path)


def draw_remaining(axis: "Axes", arms: Mapping[str, DemoStepRecord], total: int) -> None:
    """Draw the requests in flight in two runs, and the ends of both; the first run is the baseline."""
    for (label, record), colour in zip(arms.items(), ("#888888", "#1f77b4"), strict=True):
        times, counts = record.remaining(total)
        axis.step(times, counts, where="post", label=label, color=colour)
        axis.axvline(record.makespan_s, color=colour, linewidth=0.8, linestyle=":")
    axis.set_yscale("symlog", linthresh=1)
    axis.set_ylim(0, total * 1.2)
    axis.set_yticks([tick for tick in (0, 1, 10, 100, 1000) if tick <= total])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
