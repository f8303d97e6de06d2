"""What the daemon sees, and what it may do: status, workers, requests, mode, move."""

import contextlib
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fleet.pause_text import barrier_lines
from orchestrrl.cli.formats import UNKNOWN, count, duration, load_index, percent, rate, time_of_day
from orchestrrl.cli.lazy import control_pb2, redeploy_text, weights_pb2
from orchestrrl.cli.output import JsonFlag, fail, print_json, print_lines, print_table, stdout
from orchestrrl.cli.plan.explain import calibration
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import Permanent

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

MOVE_TIMEOUT_S = 120.0  # a move waits for the destination's first token

WORKER_COLUMNS = (
    *("worker", "health", "run", "wait", "max", "KV used", "KV tokens", "decode", "load", "seen", "step times"),
    *("runs as", "pool"),
)


class ModeOption(StrEnum):
    """The planner's modes, without its model."""

    ADVISE = "advise"
    ACT = "act"


def status(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Say how the fleet is: mode, workers, nodes, requests, moves, the plan.

    Example: `orchestrrl status`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return {**await fetch_status(client), "weights": await fetch_weights(client)}

    seen = call_daemon(daemon, conversation)
    if as_json:
        print_json(seen)
        return
    print_lines([*summary(seen), *weights_summary(seen["weights"], seen["now_unix_s"])])
    _print_workers(seen["workers"])
    print_table(
        "Nodes",
        ("node", "kind", "attached", "heard", "url"),
        (
            (
                node["node_id"],
                node["kind"],
                "yes" if node["attached"] else "no",
                ago(node["age_s"]),
                node["url"] or None,
            )
            for node in seen["nodes"]
        ),
    )


def workers(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """List the engines with their load, room, health and what they offer.

    Example: `orchestrrl workers --json`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(client, client.control.ListWorkers, control_pb2.ListWorkersRequest())

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    _print_workers(found["workers"])
    print_lines([f"[yellow]{escape(remark)}[/yellow]" for remark in remarks(found["workers"])])
    print_table(
        "What they are",
        ("worker", "engine", "models", "max length", "preemptions", "url", "step times"),
        (_identity(worker) for worker in found["workers"]),
    )


def requests(
    engine: Annotated[str, typer.Option("--engine", help="Only those on this engine.", metavar="ENGINE")] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most this many; 0 is all.")] = 50,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """List the requests in flight: where each is, how far, whether it may move.

    Example: `orchestrrl requests --engine vllm-0 --limit 20`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        wanted = control_pb2.ListRequestsRequest(engine_id=engine, limit=limit)
        return await answer(client, client.control.ListRequests, wanted)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    print_table(
        f"Requests: {len(found['requests'])} of {found['total']}",
        ("request", "engine", "state", "prompt", "generated", "limit", "moves", "age", "movable", "group", "tag"),
        (_request_row(request) for request in found["requests"]),
        optional={"limit", "group", "tag"},
    )


def mode(
    wanted: Annotated[ModeOption | None, typer.Argument(metavar="[advise|act]", help="Leave out to ask.")] = None,
    reason: Annotated[str, typer.Option(help="Who and why, for the journal.")] = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Say or set whether the daemon acts, or only decides and explains.

    Example: `orchestrrl mode act --reason "advice looked right for a day"`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        if wanted is None:
            return {"mode": (await fetch_status(client))["mode"]}
        order = control_pb2.SetModeRequest(mode=control_pb2.Mode.Value(f"MODE_{wanted.name}"), reason=reason)
        return await answer(client, client.control.SetMode, order)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
    elif "previous" in found:
        stdout().print(f"mode {found['mode']}, was {found['previous']}")
    else:
        stdout().print(f"mode {found['mode']}")


def move(
    request: Annotated[str, typer.Argument(help="The request's id.", metavar="REQUEST")],
    to: Annotated[str, typer.Option("--to", help="The engine that shall continue it.", metavar="ENGINE")],
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Move one request to another engine, as the balancer would, whatever the mode.

    Example: `orchestrrl move req-17 --to vllm-1`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.MoveRequestRequest(request_id=request, to_engine_id=to)
        return await answer(client, client.control.MoveRequest, order, timeout_s=MOVE_TIMEOUT_S)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
    elif found["done"]:
        stdout().print(escape(f"{request} continues on {to}"))
    if not found["done"]:
        fail(f"{request} was not moved: {found['detail']}")


async def fetch_status(client: "ControlClient") -> dict[str, Any]:
    return await answer(client, client.control.GetStatus, control_pb2.GetStatusRequest())


async def fetch_weights(client: "ControlClient") -> dict[str, Any] | None:
    """None of a daemon that brings no weights."""
    with contextlib.suppress(Permanent):
        return await answer(client, client.weights.GetWeights, weights_pb2.GetWeightsRequest())
    return None


def summary(seen: dict[str, Any]) -> list[str]:
    """The state of the whole in a few lines."""
    lines = [
        f"OrchestrRL {seen['version']}, mode [bold]{seen['mode']}[/bold], generation {seen['generation']}, "
        f"up {duration(seen['uptime_s'])}",
        *trouble(seen),
        f"requests: {count(seen['requests_running'])} running, {count(seen['requests_waiting'])} waiting, "
        f"{count(seen['requests_finished'])} finished",
        f"moves: {count(seen['moves_done'])} done, {count(seen['moves_failed'])} failed, "
        f"{count(seen['tokens_recomputed'])} tokens recomputed, {count(seen['tokens_loaded'])} moved as KV",
        f"failovers: {count(seen['failovers'])} requests went on after their engine failed, "
        f"{count(seen['failover_requests_recomputed'])} of them recomputed "
        f"({count(seen['failover_tokens_recomputed'])} tokens)",
        f"fast loop: {escape(seen['balance_reason'])}",
        *policy_summary(seen["balance_policy"], seen["balance_policy_reason"]),
        f"plan: {escape(seen['plan_id'] or 'none yet')}; planner {control_text(seen['plan_control'])}",
        calibration(seen["plan_calibration"]),
        *barrier_summary(seen["barrier"]),
        *redeploy_text.redeployment_summary(seen["redeployment"]),
        *fabric_summary(seen),
        *(
            f"[yellow]{pause['part']} is paused[/yellow]: {escape(operator_pause_text(pause))}"
            for pause in seen["pauses"]
        ),
    ]
    lines += [f"[yellow]{escape(remark)}[/yellow]" for remark in remarks(seen["workers"], seen["remarks"])]
    sick = [worker for worker in seen["workers"] if worker["reported"] and worker["health"] != "ok"]
    lines += [
        f"[red]{escape(w['engine_id'])} is {w['health']}[/red]: {escape(w['health_detail'] or 'no reason given')}"
        for w in sick
    ]
    return lines


def policy_summary(policy: str, reason: str) -> list[str]:
    """How moves are chosen and why, e.g. `policy: load_index: no step times for e0: ...`; nothing before a decision."""
    return [f"policy: [bold]{policy}[/bold]: {escape(reason)}"] if policy else []


def trouble(seen: dict[str, Any]) -> list[str]:
    """Why the mode is not the configured one, damage of the journal, and defects; nothing where all is well."""
    lines = [f"mode: {escape(seen['mode_reason'])}"] if seen["mode_reason"] and not seen["journal_damage"] else []
    lines += [f"[red]the journal is damaged[/red]: {escape(text)}" for text in seen["journal_damage"]]
    if seen["journal_damage"]:
        lines.append('`orchestrrl mode act --reason "..."` confirms the damage and lets the daemon act again')
    lines += [
        f"[yellow]entry {entry['sequence']} of the journal is left out[/yellow]: {escape(entry['detail'])}"
        for entry in seen["journal_set_aside"]
    ]
    return [*lines, *(defect_text(defect, seen["now_unix_s"]) for defect in seen["defects"])]


def defect_text(defect: dict[str, Any], now_unix_s: float) -> str:
    """E.g. `fast_loop: 3 turns running ended by KeyError at balancer/balance.py:88: 'e0' (last 1 s ago)`."""
    running = f"{defect['running']} turns running ended by" if defect["running"] else "goes on after"
    what = escape(f"{defect['type']} at {defect['place']}: {defect['message']}")
    last = f"last {ago(now_unix_s - defect['last_unix_s'])}, {count(defect['total'])} in all"
    return f"[{'red' if defect['running'] else 'yellow'}]{defect['part']}[/]: {running} {what} ({last})"


def remarks(workers: Iterable[dict[str, Any]], nodes: Iterable[str] = ()) -> list[str]:
    """Faults in how engines and nodes are named and reported, one sentence each."""
    return [*nodes, *(remark for worker in workers for remark in worker["remarks"])]


def barrier_summary(barrier: dict[str, Any] | None) -> list[str]:
    """Nothing where it is open and nobody has told a policy version."""
    if barrier is None or (barrier["phase"] in ("", "open") and barrier["policy_version"] is None):
        return []
    lines = barrier_lines(barrier)
    return lines[:1] if barrier["phase"] in ("", "open") else lines


def fabric_summary(seen: dict[str, Any]) -> list[str]:
    """Nothing without an optical fabric."""
    control, period = seen["fabric_control"], seen["fabric_period"]
    if control is None:
        return []
    lines = [] if period is None else [f"fabric: {escape(period_text(period))}"]
    return lines if control["state"] == "free" else [*lines, f"fabric: {escape(fabric_control_text(control))}"]


def period_text(period: dict[str, Any]) -> str:
    """How a period stands, e.g. `gradients kept: no_window: none by the deadline`."""
    why = ": ".join(filter(None, (period["code"] if period["code"] != period["state"] else "", period["detail"])))
    return f"{name_of_period(period)} {period['state']}{f': {why}' if why else ''}"


def name_of_period(report: dict[str, Any]) -> str:
    """`gradients`, or `gradients of trainer` where its job has a name."""
    return f"{report['period']} of {job}" if (job := report.get("job")) else str(report["period"])


def fabric_control_text(control: dict[str, Any]) -> str:
    """How the operator has bound circuits."""
    until = "" if control["expires_unix_s"] is None else f" until {time_of_day(control['expires_unix_s'])}"
    because = f" ({control['reason']})" if control["reason"] else ""
    match control["state"]:
        case "pinned":
            which = ", ".join(control["cross_connects"]) or "all circuits"
            return f"{which} pinned{until}{because}"
        case "overridden":
            return f"circuits of {name_of_period(control)}, whatever else its job announces{until}{because}"
        case _:
            return f"free{because}"


def weights_summary(weights: dict[str, Any] | None, now_unix_s: float) -> list[str]:
    """Nothing where they were never brought."""
    if weights is None:
        return []
    told = [] if weights["committed_version"] is None else [f"version {weights['committed_version']}"]
    sync = weights["sync"]
    if sync is not None and sync["ended_unix_s"] is None:
        told.append(f"version {sync['version']} is {sync['state']} for {duration(now_unix_s - sync['began_unix_s'])}")
    if weights["quarantined"]:
        names = ", ".join(engine["engine_id"] for engine in weights["quarantined"])
        told.append(f"[red]quarantined[/red]: {escape(names)}, see `orchestrrl sync status`")
    return [f"weights: {'; '.join(told)}"] if told else []


def operator_pause_text(pause: dict[str, Any]) -> str:
    """Since when, why and for how long."""
    until = "" if pause["expires_unix_s"] is None else f", until {time_of_day(pause['expires_unix_s'])}"
    return f"{pause['reason'] or 'no reason given'} (since {time_of_day(pause['since_unix_s'])}{until})"


def control_text(control: dict[str, Any] | None, now_unix_s: float | None = None) -> str:
    """How the operator has bound the planner, e.g. `pinned for 4 min 10 s more (step 12 is precious)`."""
    if control is None or control["state"] in ("", "free"):
        return "free"
    words = control["state"]
    if control["configuration"]:
        words += f" to {control['configuration']}"
    if control["expires_unix_s"] is None:
        words += " until released"
    elif now_unix_s is not None:
        words += f" for {duration(max(0.0, control['expires_unix_s'] - now_unix_s))} more"
    if control["reason"]:
        words += f" ({control['reason']})"
    return escape(words)


def worker_row(worker: dict[str, Any]) -> tuple[object, ...]:
    return (
        worker["engine_id"],
        health_text(worker),
        worker["running"],
        worker["waiting"],
        worker["max_sequences"] or None,
        percent(kv_used(worker)),
        count(worker["kv_capacity_tokens"] or None),
        rate(worker["decode_tokens_per_s"]),
        load_index(worker["load_index"]),
        ago(worker["age_s"]),
        worker["step_times_source"] or None,
        worker["configuration"] or None,
        worker["pool"] or None,
    )


def health_text(worker: dict[str, Any]) -> str:
    """Its health, as far as the daemon knows it, and that an operator drains it."""
    health = worker["health"] or UNKNOWN if worker["reported"] else "no agent"
    return f"{health}, draining" if worker["draining"] else str(health)


def kv_used(worker: dict[str, Any]) -> float | None:
    """Fraction of the KV cache in use; None where its size is unknown."""
    capacity = worker["kv_capacity_tokens"]
    return 1.0 - worker["kv_free_tokens"] / capacity if capacity else None


def ago(age_s: float | None) -> str:
    return "never" if age_s is None else f"{duration(age_s)} ago"


def _print_workers(listed: list[dict[str, Any]]) -> None:
    print_table(
        "Workers", WORKER_COLUMNS, (worker_row(worker) for worker in listed), optional={"step times", "runs as", "pool"}
    )


def _identity(worker: dict[str, Any]) -> tuple[object, ...]:
    offers = worker["capabilities"]
    step_times = worker["step_times_detail"] or None
    if offers is None:
        return (
            worker["engine_id"],
            "not asked yet",
            None,
            None,
            worker["preemptions_total"],
            worker["url"],
            step_times,
        )
    return (
        worker["engine_id"],
        f"{offers['engine']} {offers['version']}",
        ", ".join(offers["models"]),
        count(offers["max_model_len_tokens"]),
        worker["preemptions_total"],
        worker["url"],
        step_times,
    )


def _request_row(request: dict[str, Any]) -> tuple[object, ...]:
    return (
        request["request_id"],
        request["engine_id"] or "gateway",
        request["state"],
        count(request["prompt_tokens"]),
        count(request["generated_tokens"]),
        count(request["max_tokens"]) if request["max_tokens"] is not None else None,
        request["moves"],
        duration(request["age_s"]),
        "yes" if request["movable"] else request["movable_detail"] or "no",
        request["group_id"] or None,
        request["tag"] or None,
    )


def register(app: typer.Typer) -> None:
    for command in (status, workers, requests, mode, move):
        app.command()(command)
