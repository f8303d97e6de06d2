"""Report the outcome of a scenario as a JSON object, as table rows, and as charts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from orchestrrl.core.charts import ChartLine, add_stairs, axes, literal, save
from orchestrrl.lab.sim.run import ArmRun, NotKnowing, ScenarioOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fields of SeedRun that are reported under the same name, as medians over seeds.
MEDIANS = ("idle_fraction", "moves", "redeployments", "tokens_recomputed", "preemptions", "transfers")
KNOWN = {
    "packed_known": "static packing, all lengths",
    "prompts_known": "static placement, each prompt's distribution of lengths",
}
LEGEND = (
    "medians over seeds; per s: samples; gain: relative to verl_to's samples per second; recomputed: tokens; "
    "off: relative error of plans' predicted makespans"
)


def as_json(outcome: ScenarioOutcome) -> dict[str, Any]:
    known = outcome.not_knowing
    return {
        "scenario": outcome.scenario.name,
        "seeds": [run.seed for run in outcome.arms[0].seeds],
        "static_makespan_s": outcome.static_makespan_s,
        "ceiling": {
            "gain": outcome.ceiling.gain,
            "gain_vs_verl_to": outcome.ceiling_gain,
            "redeploying_s": outcome.ceiling.redeploying_s,
            "static_s": dict(outcome.ceiling.static_s),
        },
        "not_knowing": None if known is None else {**asdict(known), "price_s": known.price_s, "kept": known.kept},
        "contention_s": outcome.contention_s,
        "arms": {run.arm: _arm_json(outcome, run) for run in outcome.arms},
    }


def marks(outcome: ScenarioOutcome) -> Iterator[str]:
    """Yield the lines that are printed below the table of arms."""
    sweep = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.static_makespan_s.items())
    yield f"static fleets, median makespan: {sweep}"
    also = "" if outcome.ceiling_gain is None else f", {outcome.ceiling_gain:.3f} over verl_to"
    yield f"even spreading with free redeployments: gain {outcome.ceiling.gain:.3f} over even spreading{also}"
    for name, what in KNOWN.items():
        run = outcome.arm(name)
        if run is not None and outcome.gain(run) is not None:
            yield f"{what} known: gain {_decimals(outcome.gain(run))}"
    if outcome.not_knowing is not None:
        yield from _not_knowing_lines(outcome.not_knowing)
    if outcome.contention_s is not None:
        yield f"price of contention: sharing the NICs adds {outcome.contention_s:.1f} s to a step of `both`"
        yield "static arms do not share the NICs"


def _not_knowing_lines(found: NotKnowing) -> Iterator[str]:
    mean = "" if found.mean_s is None else f", {found.mean_s:.1f} s with their mean only"
    yield (
        f"price of not knowing lengths: {found.price_s:.1f} s "
        f"({found.forecast_s:.1f} s forecast, {found.oracle_s:.1f} s known{mean})"
    )
    kept = (
        "the oracle gains nothing to keep" if found.kept is None else f"{found.kept:.0%} of the oracle's gain is kept"
    )
    yield f"{kept}, over the tuned static fleet's {found.static_s:.1f} s"


def _arm_json(outcome: ScenarioOutcome, run: ArmRun) -> dict[str, Any]:
    return {
        "begins_with": run.configuration,
        "makespan_s": run.makespan_s,
        "makespans_s": {str(seed.seed): seed.makespan_s for seed in run.seeds},
        "samples_per_s": median(seed.samples_per_s for seed in run.seeds),
        "gain_vs_verl_to": outcome.gain(run),
        "paper_gain": outcome.scenario.paper.get(run.arm),
        **{name: median(getattr(seed, name) for seed in run.seeds) for name in MEDIANS},
        "plan_error": run.calibration_error,
        "journal_digests": [seed.journal_digest for seed in run.seeds if seed.journal_digest],
    }


def rows(outcome: ScenarioOutcome) -> Iterator[dict[str, Any]]:
    """Yield the fields of each arm, from which the columns in COLUMNS are computed."""
    for run in outcome.arms:
        yield {"arm": run.arm, **_arm_json(outcome, run)}


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "arm": lambda row: row["arm"],
    "begins": lambda row: row["begins_with"],
    "step s": lambda row: f"{row['makespan_s']:.1f}",
    "per s": lambda row: f"{row['samples_per_s']:.2f}",
    "gain": lambda row: _decimals(row["gain_vs_verl_to"]),
    "paper": lambda row: _decimals(row["paper_gain"]),
    "idle": lambda row: f"{row['idle_fraction']:.0%}",
    "moves": lambda row: _count(row["moves"]),
    "redeployments": lambda row: _count(row["redeployments"]),
    "recomputed": lambda row: _count(row["tokens_recomputed"]),
    "preempted": lambda row: _count(row["preemptions"]),
    "off": lambda row: None if row["plan_error"] is None else f"{row['plan_error']:.0%}",
}


def _count(value: float) -> str | None:
    if not value:
        return None
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.0f}k"


def _decimals(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def plot(outcome: ScenarioOutcome, folder: Path) -> list[Path]:
    """Draw charts of the first seed's last step into `folder`, which must exist. One chart shows the remaining requests
    of all arms over time. One chart per arm shows the load of each GPU. Return the paths of the files."""
    figure, [[axis]] = axes(width=8)
    add_stairs(axis, [ChartLine(run.arm, run.seeds[0].remaining) for run in outcome.arms])
    axis.set(
        title=literal(outcome.scenario.name), xlabel="seconds", ylabel="requests without an answer", yscale="symlog"
    )
    axis.legend()
    paths = [folder / "remaining_requests.png"]
    save(figure, paths[0])
    for run in outcome.arms:
        paths.append(folder / f"busy_{run.arm}.png")
        save(_busy_figure(run, outcome.scenario.gpus), paths[-1])
    return paths


def _busy_figure(run: ArmRun, gpus: int) -> "Figure":
    """Draw the load of each GPU (vertical) over time (horizontal). Darker areas mean more running sequences."""
    spans = run.seeds[0].spans
    most = max((count for span in spans for _, count in span.running), default=1) or 1
    figure, [[axis]] = axes(width=8, height=min(12.0, 1.5 + 0.2 * gpus))
    for span in spans:
        gpus_of = (span.first_gpu, span.gpus)
        stretches = pairwise([*span.running, (span.ended_s, 0)])
        busy = [(from_s, to_s - from_s, count) for (from_s, count), (to_s, _) in stretches if count and to_s > from_s]
        shades = [("tab:blue", 0.15 + 0.85 * (count / most) ** 0.5) for *_, count in busy]
        axis.broken_barh([(from_s, seconds) for from_s, seconds, _ in busy], gpus_of, facecolors=shades)
        whole = (span.started_s, span.ended_s - span.started_s)
        axis.broken_barh([whole], gpus_of, facecolor="none", edgecolor="0.4", lw=0.5)
    axis.set(
        title=f"{run.arm}: engines on their GPUs, the darker the more sequences",
        xlabel="seconds",
        ylabel="GPU",
        xlim=(0, max((span.ended_s for span in spans), default=1.0)),
        ylim=(0, gpus),
    )
    return figure
