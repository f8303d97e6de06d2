"""A plan in words: what was decided, on what, against which alternatives, and how it came out."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from orchestrrl.cli.formats import chart, count, duration, seconds, time_of_day

ALTERNATIVE_COLUMNS = ("configuration", "instances", "decoding", "switch", "together", "against current", "note")


def headline(plan: dict[str, Any], now_unix_s: float) -> list[str]:
    """The decision, its reason, what it rests on."""
    age = duration(max(0.0, now_unix_s - plan["created_unix_s"]))
    acted = "acted on" if plan["acted"] else "not acted on"
    lines = [
        f"[bold]{escape(plan['plan_id'])}[/bold]: {plan['decision']}, {acted}",
        f"why: {escape(plan['reason'])} ({plan['reason_code']})",
        f"made at {time_of_day(plan['created_unix_s'])}, {age} ago, in {duration(plan['solve_s'])}",
        f"inputs: at most {duration(plan['inputs_age_s'])} old; {count(plan['requests_running'])} requests running, "
        f"{count(plan['requests_waiting'])} waiting; forecast: {plan['forecast_method'] or 'none'}",
    ]
    now, then = plan["current_configuration"] or "unknown", plan["proposed_configuration"] or "none"
    deployed = f"deployed: {now}, predicted {seconds(plan['current_makespan_s'])}"
    proposed = f"best found: {plan['proposed_instances']} x {then}, predicted {seconds(plan['proposed_makespan_s'])}"
    lines.append(escape(f"{deployed}; {proposed} and {duration(plan['switch_cost_s'])} to switch"))
    return lines


def alternative_rows(plan: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """Feasible ones first, the fastest at the top, each against what is deployed."""
    feasible = [option for option in plan["alternatives"] if not option["infeasible_because"]]
    ruled_out = [option for option in plan["alternatives"] if option["infeasible_because"]]
    current_s = plan["current_makespan_s"]
    for option in sorted(feasible, key=_together_s):
        against = None if current_s is None else f"{_together_s(option) - current_s:+,.2f} s"
        notes = [
            note
            for note, name in (("deployed", "current_configuration"), ("best", "proposed_configuration"))
            if option["configuration"] == plan[name]
        ]
        yield (
            option["configuration"],
            option["instances"],
            seconds(option["makespan_s"]),
            duration(option["switch_cost_s"]),
            seconds(_together_s(option)),
            against,
            ", ".join(notes) or None,
        )
    for option in ruled_out:
        words = f"infeasible: {option['infeasible_because']}"
        yield (option["configuration"], option["instances"], None, None, None, None, words)


def predictions(plan: dict[str, Any]) -> list[str]:
    """The bound, and what was predicted against what happened."""
    lines = [f"no plan of this kind can end before {seconds(plan['lower_bound_s'])}"]
    actual_s = plan["actual_makespan_s"]
    predicted_s = plan["proposed_makespan_s"] if plan["acted"] else plan["current_makespan_s"]
    if actual_s is None:
        return [*lines, "predicted against actual: the step is not over"]
    if not predicted_s:
        return [*lines, f"predicted against actual: nothing was predicted, it took {seconds(actual_s)}"]
    off = f"{(actual_s - predicted_s) / predicted_s * 100:+.1f} %"
    return [*lines, f"predicted against actual: {seconds(predicted_s)}, {seconds(actual_s)} ({off})"]


def histogram(plan: dict[str, Any]) -> list[str]:
    bars = chart(plan["bin_tokens"], plan["remaining_counts"])
    return ["remaining tokens, requests:", *(f"  {line}" for line in bars)] if bars else []


def _together_s(option: dict[str, Any]) -> float:
    return float(option["makespan_s"] + option["switch_cost_s"])
