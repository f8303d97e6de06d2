"""Render a plan as text and tables: the decision, its inputs, its alternatives and its outcome."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from orchestrrl.cli.formats import bar, chart, count, duration, percent, ranges, seconds, time_of_day
from orchestrrl.cli.output import Columns, cells_table, table

if TYPE_CHECKING:
    from rich.table import Table

BAR_WIDTH = 16
RANGES_SHOWN = 6
ENGINES_SHOWN = 24  # rows of the target fleet; with more, engines of the same kind share a row


def headline(plan: dict[str, Any], now_unix_s: float) -> list[str]:
    """Return lines about a plan: its decision, reason, time and inputs, and a comparison of the deployed and the best
    fleet."""
    age = duration(max(0.0, now_unix_s - plan["created_unix_s"]))
    acted = "acted on" if plan["acted"] else "not acted on"
    if plan["acted_detail"]:
        acted += f" ({escape(plan['acted_detail'])})"
    lines = [
        f"[bold]{escape(plan['plan_id'])}[/bold]: {plan['decision']}, {acted}",
        f"why: {escape(plan['reason'])} ({plan['reason_code']})",
    ]
    if plan["forgone_code"]:
        lines.append(f"forgone: {escape(plan['forgone'])} ({plan['forgone_code']})")
    lines += [
        f"made at {time_of_day(plan['created_unix_s'])}, {age} ago, in {duration(plan['solve_s'])}",
        f"inputs: at most {duration(plan['inputs_age_s'])} old; {count(plan['requests_running'])} requests running, "
        f"{count(plan['requests_waiting'])} waiting; forecast: {_forecast(plan)}",
    ]
    now, then = plan["current_configuration"] or "unknown or mixed", plan["proposed_configuration"] or "mixed or none"
    deployed = f"deployed: {now}, predicted {seconds(plan['current_makespan_s'])}"
    proposed = f"proposed: {plan['proposed_instances']} x {then}, predicted {seconds(plan['proposed_makespan_s'])}"
    costs = f"{duration(plan['redeploy_cost_s'])} to switch, {duration(plan['migration_cost_s'])} to move"
    change = f"{proposed} and {costs} {count(plan['moves_count'])} requests"
    lines.append(escape(f"{deployed}; {change if plan['proposed_makespan_s'] is not None else 'no proposal'}"))
    return [*lines, *(f"note: {escape(note)}" for note in plan["notes"])]


def alternatives_table(plan: dict[str, Any]) -> "Table":
    """Return a table of the plan's alternatives, each compared with the deployed fleet. Feasible alternatives come
    first, from the fastest to the slowest."""
    feasible = sorted((each for each in plan["alternatives"] if not each["infeasible_because"]), key=_together_s)
    ruled_out = [each for each in plan["alternatives"] if each["infeasible_because"]]
    current_s, wanted_s = plan["current_makespan_s"], proposed_s(plan)
    slowest_s = max(map(_together_s, feasible), default=0.0)

    def note(option: dict[str, Any]) -> str:
        proposed = wanted_s is not None and abs(_together_s(option) - wanted_s) < 1e-9
        notes = (("deployed", _deployed(option, plan)), ("proposed", proposed), ("fastest", option in feasible[:1]))
        if option["infeasible_because"]:
            return f"infeasible: {option['infeasible_because']}"
        return ", ".join(text for text, holds in notes if holds)

    def of_feasible(text: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
        return lambda option: None if option["infeasible_because"] else text(option)

    columns = {
        "decision": lambda option: option["decision"],
        "decoding": lambda option: seconds(option["makespan_s"]),
        "moves": lambda option: duration(option["migration_cost_s"]),
        "switch": lambda option: duration(option["redeploy_cost_s"]),
        "total": lambda option: seconds(_together_s(option)),
        "sample range": _between,
        "vs. current": lambda option: None if current_s is None else f"{_together_s(option) - current_s:+,.2f} s",
        "": lambda option: bar(_together_s(option) / slowest_s if slowest_s > 0 else 0.0, BAR_WIDTH),
    }
    first: Columns = {"fleet": _named, "engines": lambda option: option["instances"] or None}
    shown = {title: of_feasible(text) for title, text in columns.items()}
    return table("Alternatives", {**first, **shown, "note": note}, [*feasible, *ruled_out])


def instances_table(title: str, instances: Iterable[dict[str, Any]]) -> "Table":
    """Return a table of instances. If there are many, the kept instances of each configuration share one row, and the
    new instances of each configuration share another. Such a row shows the times of its slowest instance."""
    engines = sorted(instances, key=lambda each: (each["configuration"], not each["kept"], -_ends_s(each)))
    few = len(engines) <= ENGINES_SHOWN
    alike = groupby(engines, key=lambda each: each["engine_id"] if few else (each["configuration"], each["kept"]))
    columns = ("configuration", "engines", "", "requests", "decoding", "moves", "switch", "ends", "GPUs")
    return cells_table(title, columns, (_instances_row(list(group), few) for _, group in alike))


def _instances_row(group: list[dict[str, Any]], few: bool) -> tuple[object, ...]:
    slowest, requests = group[0], [each["requests_count"] for each in group]
    runs = ranges(sorted(gpu for each in group for gpu in each["gpus"])).split(", ")
    more = f" and {len(runs) - RANGES_SHOWN} more ranges" if len(runs) > RANGES_SHOWN else ""
    return (
        slowest["configuration"],
        slowest["engine_id"] if few else len(group),
        "kept" if slowest["kept"] else "new",
        count(min(requests)) if min(requests) == max(requests) else f"{min(requests):,}-{max(requests):,}",
        seconds(slowest["decode_s"]),
        duration(slowest["migration_s"]),
        duration(slowest["switch_s"]),
        seconds(_ends_s(slowest)),
        ", ".join(runs[:RANGES_SHOWN]) + more,
    )


def proposed_s(plan: dict[str, Any]) -> float | None:
    """Return the predicted time in seconds until the step ends under the plan's proposal, including the costs of the
    change. Return None if the plan has no proposal."""
    if plan["proposed_makespan_s"] is None:
        return None
    return float(plan["proposed_makespan_s"] + plan["redeploy_cost_s"] + plan["migration_cost_s"])


def predictions(plan: dict[str, Any]) -> list[str]:
    """Return lines about the lower bound of the makespan, and about the predicted and the actual makespan."""
    bound = f"lower bound for any fleet, if all lengths were known: {seconds(plan['lower_bound_s'])}"
    if plan["gap"] is not None:
        bound += f"; the fastest alternative takes {percent(plan['gap'])} more"
    lines = [bound] if plan["lower_bound_s"] > 0 else []  # 0: no bound was computed
    if plan["correction"] not in (0.0, 1.0):
        lines.append(
            f"predicted decoding times are the profiles' times {plan['correction']:.2f}, calibrated on earlier steps"
        )
    actual_s, predicted_s = plan["actual_makespan_s"], plan["predicted_s"]
    if actual_s is None:
        return [*lines, "predicted vs. actual: the step has not ended"]
    if not predicted_s:
        return [*lines, f"predicted vs. actual: no prediction, actual {seconds(actual_s)}"]
    off = f"{(actual_s - predicted_s) / predicted_s * 100:+.1f} %"
    return [*lines, f"predicted vs. actual: {seconds(predicted_s)}, {seconds(actual_s)} ({off})"]


def calibration(found: dict[str, Any] | None) -> str:
    """Return a line about the mean error and the bias of past predictions. If `found` is None or has no error, the line
    states that no step has ended yet."""
    if found is None or found["error"] is None:
        return "predictions: no step has ended yet"
    steps = "step" if found["steps"] == 1 else "steps"
    words = f"predictions: mean error {percent(found['error'])} over {found['steps']} {steps}"
    if abs(found["bias"]) >= 0.005:
        words += f", {percent(abs(found['bias']))} too {'long' if found['bias'] > 0 else 'short'} on average"
    return words


def histogram(plan: dict[str, Any]) -> list[str]:
    bars = chart(plan["bin_tokens"], plan["remaining_counts"])
    return ["remaining tokens, requests:", *(f"  {line}" for line in bars)] if bars else []


def _forecast(plan: dict[str, Any]) -> str:
    words: str = plan["forecast_method"] or "none"
    if plan["knowledge"] not in ("", "forecast"):
        words += f", but planned with the {plan['knowledge']}'s lengths"
    return f"{words}, {plan['scenarios']} samples" if plan["scenarios"] > 1 else words


def _named(option: dict[str, Any]) -> str:
    name: str = option["name"] or option["configuration"]
    if len(option["parts"]) > 1:
        name += " (" + ", ".join(f"{part['instances']} x {part['configuration']}" for part in option["parts"]) + ")"
    return name


def _deployed(option: dict[str, Any], plan: dict[str, Any]) -> bool:
    if option["decision"]:
        return bool(option["decision"] == "keep")
    return bool(option["configuration"] == plan["current_configuration"])


def _between(option: dict[str, Any]) -> str | None:
    if option["high_s"] - option["low_s"] < 0.005:
        return None
    return f"{option['low_s']:,.1f}-{option['high_s']:,.1f} s"


def _together_s(option: dict[str, Any]) -> float:
    return float(option["makespan_s"] + option["redeploy_cost_s"] + option["migration_cost_s"])


def _ends_s(engine: dict[str, Any]) -> float:
    return float(engine["decode_s"] + engine["migration_s"] + engine["switch_s"])
