"""The demo of a redeployment for machines (report.json), and a picture of it: requests that remain, and who decodes
them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrrl.core.charts import axes, save
from orchestrrl.lab.demo.redeploy_fabric import ObservedFabric
from orchestrrl.lab.demo.redeploy_run import ObservedRedeployment, RedeployDemo, RedeploySeed, Resumption
from orchestrrl.lab.demo.report import draw_remaining

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the case study, arXiv 2601.01209, section 6.2.2: seconds into the step, and what the redeployment took.
PAPER = {"at_s": 272.0, "total_s": 7.5, "redeploying_s": 1.5, "kv_recompute_s": 5.4}


def as_json(demo: RedeployDemo) -> dict[str, Any]:
    """All seconds are the engines', as the paper's are, but for those named wall_s."""
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
            if outcome.fabric_after is not None
        ],
        "paper": PAPER,
        "lost": demo.lost,
        "differing": demo.differing,
        "faults": demo.faults,
    }


def _redeployment_json(redeployed: ObservedRedeployment, outcome: RedeploySeed, speed: float) -> dict[str, Any]:
    report, resumed = redeployed.report, redeployed.resumption
    return {
        "redeployment_id": report["redeployment_id"],
        "plan_id": report["plan_id"],
        "reason": report["reason"],
        "from": dict(Counter(engine["configuration"] for engine in report["old_engines"])),
        "to": dict(Counter(engine["configuration"] for engine in report["new_engines"])),
        "at_s": at_s(redeployed, outcome, speed),
        "redeploying": {"wall_s": redeployed.redeploying_s, "s": redeployed.redeploying_s * speed},
        "predicted_redeploying_s": redeployed.plan["redeploy_cost_s"] * speed,
        "recompute": None if resumed is None else _resumption_json(resumed, speed),
        "circuits": None if redeployed.followed is None else asdict(redeployed.followed),
        "total": {"wall_s": redeployed.total_s, "s": redeployed.total_s * speed},
        "predicted_gain_s": redeployed.predicted_gain_s * speed,
        "predicted_rest_s": redeployed.plan["predicted_s"] * speed,
        "actual_rest_s": None
        if redeployed.plan["actual_makespan_s"] is None
        else redeployed.plan["actual_makespan_s"] * speed,
        "steps": [
            {
                "kind": step["kind"],
                "engine": step["engine_id"],
                "after_wall_s": step["began_unix_s"] - report["created_unix_s"],
                "wall_s": step["elapsed_s"],
            }
            for step in report["steps"]
            if step["began_unix_s"] is not None
        ],
    }


def _circuits_json(fabric: ObservedFabric | None) -> list[dict[str, Any]]:
    if fabric is None:
        return []
    return [{"pod": pod, "a": a, "b": b, "circuits": count} for (pod, a, b), count in sorted(fabric.circuits.items())]


def _resumption_json(resumed: Resumption, speed: float) -> dict[str, Any]:
    seconds = {name: getattr(resumed, name) * speed for name in ("predicted_s", "median_s", "last_s")}
    return {"requests": resumed.requests, "context_tokens": resumed.context_tokens, **seconds}


def at_s(redeployed: ObservedRedeployment, outcome: RedeploySeed, speed: float) -> float:
    """Engine seconds from the step's start."""
    return float(redeployed.report["created_unix_s"] - outcome.began_s) * speed


def draw(demo: RedeployDemo, path: Path) -> None:
    """Above, requests in flight in both runs; below, which engine has each GPU in the free one, with how many."""
    count, speed = len(demo.seeds), demo.scenario.speed
    figure, panels = axes(2, count, width=1.6 + 5.4 * count, height=5.6)
    for column, outcome in enumerate(demo.seeds):
        above, below = panels[0][column], panels[1][column]
        above.sharex(below)
        arms = {"pinned to the fleet as it is": outcome.baseline, "free to redeploy": outcome.shown}
        draw_remaining(above, arms, len(outcome.samples))
        for redeployed in outcome.redeployments:
            began_s = at_s(redeployed, outcome, speed)
            ended_s = began_s + redeployed.total_s * speed
            above.axvspan(began_s, ended_s, color="#d62728", alpha=0.3, label="redeployment")
        above.set_title(f"seed {outcome.seed}: ratio {outcome.ratio:.2f}", fontsize=10)
        _draw_engines(below, demo, outcome)
    panels[0][0].set_ylabel("requests that remain")
    panels[1][0].set_ylabel("GPU")
    panels[0][0].legend(loc="lower left", fontsize=8)
    figure.suptitle("One generation step, with and without a redeployment", fontsize=11)
    save(figure, path)


def _draw_engines(axis: "Axes", demo: RedeployDemo, outcome: RedeploySeed) -> None:
    from matplotlib.colors import LogNorm

    deployment = demo.scenario.deployment
    assert deployment is not None, "the scenario is of a fleet that the daemon starts"
    gpus_of = _gpus_of(outcome)
    rows = [_load(look.engine_of.values(), gpus_of, deployment.gpus) for look in outcome.snapshots]
    times = [(look.at_s - outcome.began_s) * demo.scenario.speed for look in outcome.snapshots]
    if len(times) > 1 and gpus_of:
        edges = [*times, 2 * times[-1] - times[-2]]
        loads = [list(gpu) for gpu in zip(*rows, strict=True)]  # [gpu, look]
        most = max((requests for row in loads for requests in row if not isnan(requests)), default=1.0)
        norm = LogNorm(0.1, max(1.0, most))
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


def _gpus_of(outcome: RedeploySeed) -> dict[str, Sequence[int]]:
    return {
        engine["engine_id"]: engine["gpus"]
        for redeployed in outcome.redeployments
        for engines in ("old_engines", "new_engines")
        for engine in redeployed.report[engines]
    }


def _load(engines: Any, gpus_of: Mapping[str, Sequence[int]], gpus: int) -> list[float]:
    """[gpu]: requests on its engine, by its GPUs. Not a number where there are none."""
    load = [float("nan")] * gpus
    for engine, requests in Counter(engines).items():
        for gpu in gpus_of.get(engine, ()):
            load[gpu] = requests / len(gpus_of[engine])
    return load
