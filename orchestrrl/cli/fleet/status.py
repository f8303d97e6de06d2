"""Commands that show the state of the daemon and control it: status, workers, requests, mode, move and moves, and the
commands that pause and resume the balancer, the fabric and weight syncs."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.text import Text

from orchestrrl.cli.command import Command, Reason, TimeToLive, answer, daemon_command
from orchestrrl.cli.commands import summary as summary_of
from orchestrrl.cli.fleet.pause import barrier_lines
from orchestrrl.cli.formats import UNKNOWN, count, duration, load_index, percent, rate, time_of_day
from orchestrrl.cli.lazy import ControlClient, control_pb2, redeploy_text, weights_pb2
from orchestrrl.cli.output import Columns, Output, View, raise_faults, table
from orchestrrl.cli.plan.explain import calibration
from orchestrrl.core.errors import Permanent
from orchestrrl.core.ttl import lifetime_faults

MOVE_TIMEOUT_S = 120.0  # a move waits for the first token on its destination
ModeOption = Literal["advise", "act"]  # the values of planner.model.Mode, repeated to avoid its import


@daemon_command
async def status(client: ControlClient) -> Output:
    """Show the state of the fleet: mode, workers, nodes, requests, moves and the plan.

    Example: `orchestrrl status`
    """
    seen = {**await fetch_status(client), "weights": await fetch_weights(client)}
    return Output(seen, _status_view(seen))


def _status_view(seen: dict[str, Any]) -> View:
    yield from summary(seen)
    yield from weights_summary(seen["weights"], seen["now_unix_s"])
    yield table("Workers", WORKER_COLUMNS, seen["workers"])
    yield table("Nodes", NODE_COLUMNS, seen["nodes"])


@daemon_command
async def workers(client: ControlClient) -> Output:
    """List the engines with their load, free KV cache, health and capabilities.

    Example: `orchestrrl workers --json`
    """
    found = await answer(client, client.control.ListWorkers, control_pb2.ListWorkersRequest())
    return Output(found, _workers_view(found["workers"]))


def _workers_view(listed: list[dict[str, Any]]) -> View:
    yield table("Workers", WORKER_COLUMNS, listed)
    yield from (f"[yellow]{escape(remark)}[/yellow]" for remark in remarks(listed))
    yield table("Engines", IDENTITY_COLUMNS, listed)


@daemon_command
async def requests(
    client: ControlClient,
    on_engine: Annotated[str, typer.Option(help="List only the requests on this engine.", metavar="ENGINE")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of requests. 0: all.")] = 50,
) -> Output:
    """List the requests in flight: their engine, state and generated tokens, and whether they can move.

    Example: `orchestrrl requests --on-engine vllm-0 --limit 20`
    """
    wanted = control_pb2.ListRequestsRequest(engine_id=on_engine, limit=limit)
    found = await answer(client, client.control.ListRequests, wanted)
    title = f"Requests: {len(found['requests'])} of {found['total']}"
    return Output(found, table(title, REQUEST_COLUMNS, found["requests"]))


@daemon_command
async def mode(
    client: ControlClient,
    wanted: Annotated[
        ModeOption | None, typer.Argument(metavar="[advise|act]", help="The new mode. Default: show the current one.")
    ] = None,
    reason: Reason = "",
) -> Output:
    """Show or set the mode. In mode act, the daemon carries out its decisions; in mode advise, it only records and
    explains them.

    Example: `orchestrrl mode act --reason "advice looked right for a day"`
    """
    if wanted is None:
        found = {"mode": (await fetch_status(client))["mode"]}
        return Output(found, [f"mode {found['mode']}"])
    order = control_pb2.SetModeRequest(mode=control_pb2.Mode.Value(f"MODE_{wanted.upper()}"), reason=reason)
    found = await answer(client, client.control.SetMode, order)
    return Output(found, [f"mode {found['mode']}, was {found['previous']}"])


@daemon_command
async def move(
    client: ControlClient,
    request: Annotated[str, typer.Argument(help="The request's id.", metavar="REQUEST")],
    to: Annotated[str, typer.Option(help="The destination engine.", metavar="ENGINE")],
) -> Output:
    """Move one request to another engine, as the balancer would. The request is moved even in mode advise.

    Example: `orchestrrl move req-17 --to vllm-1`
    """
    order = control_pb2.MoveRequestRequest(request_id=request, to_engine_id=to)
    found = await answer(client, client.control.MoveRequest, order, timeout_s=MOVE_TIMEOUT_S)
    if not found["done"]:
        return Output(found, [], failure=f"{request} not moved: {found['detail']}")
    return Output(found, [escape(f"{request} continues on {to}")])


@daemon_command
async def moves(client: ControlClient) -> Output:
    """Show the fast loop's last decision, with load indices, moves and reasons, and the outcome of recent moves.

    Example: `orchestrrl moves`
    """
    found = await answer(client, client.control.GetBalance, control_pb2.GetBalanceRequest())
    return Output(found, _moves_view(found))


def _moves_view(found: dict[str, Any]) -> View:
    yield table("Load index (equation 5)", LOAD_COLUMNS, found["load_index"])
    if found["moves"]:
        yield table("Moves, in order", MOVE_COLUMNS, found["moves"])
    yield from balance_reasons(found)
    if found["ended_moves"]:
        yield table("Latest moves", ENDED_COLUMNS, found["ended_moves"])


def balance_reasons(found: dict[str, Any]) -> list[str]:
    """Return lines about a decision of the fast loop: its time and reason, its effect on the spread of load, and its
    policy."""
    spread = f"spread {_index(found['spread_before'])} before, {_index(found['spread_after'])} after"
    return [
        f"decided at {time_of_day(found['decided_unix_s'])} on inputs at most {duration(found['inputs_age_s'])} old: "
        f"{escape(found['verdict_reason'])}",
        f"{spread}, theta {load_index(found['theta'])}; {len(found['moves'])} moves, "
        f"stopped because {escape(found['stopped_because'] or 'no move was needed')}",
        *policy_summary(found["policy"], found["policy_reason"]),
    ]


def _index(value: float | None) -> str:
    return "stalled" if value is None else load_index(value)


def _method(move: dict[str, Any]) -> str:
    """Return the method of a move. If another method was ordered, append it, as in `recompute, not transfer`."""
    method, ordered = move["method"], move["ordered_method"]
    return str(method) if method in ("", ordered) else f"{method}, not {ordered}"


def _pause_commands(part: str) -> tuple[Command, Command]:
    async def pause(client: ControlClient, reason: Reason = "", ttl_s: TimeToLive = 0.0) -> Output:
        raise_faults(lifetime_faults(ttl_s, "--ttl-s", until="resumed"))
        return await _set_pause(client, control_pb2.SetPauseRequest(part=part, paused=True, reason=reason, ttl_s=ttl_s))

    async def resume(client: ControlClient, reason: Reason = "") -> Output:
        return await _set_pause(client, control_pb2.SetPauseRequest(part=part, paused=False, reason=reason))

    example = f'Example: `orchestrrl {part} pause --reason "maintenance" --ttl-s 600`'
    pause.__doc__ = f"{summary_of(f'{part} pause')}\n\n{example}"
    resume.__doc__ = f"{summary_of(f'{part} resume')}\n\nExample: `orchestrrl {part} resume`"
    return daemon_command(pause), daemon_command(resume)


async def _set_pause(client: ControlClient, order: "control_pb2.SetPauseRequest") -> Output:
    found = await answer(client, client.control.SetPause, order)
    part, in_force = order.part, {pause["part"]: pause for pause in found["pauses"]}
    if part in in_force:
        return Output(found, [escape(f"{part} is paused: {operator_pause_text(in_force[part])}")])
    return Output(found, [f"{part} resumed" if found["changed"] else f"{part} was not paused"])


balancer_pause, balancer_resume = _pause_commands("balancer")
fabric_pause, fabric_resume = _pause_commands("fabric")
sync_pause, sync_resume = _pause_commands("sync")


async def fetch_status(client: ControlClient) -> dict[str, Any]:
    return await answer(client, client.control.GetStatus, control_pb2.GetStatusRequest())


async def fetch_weights(client: ControlClient) -> dict[str, Any] | None:
    """Return the status of the fleet's weights, or None if the daemon does not manage weights."""
    with contextlib.suppress(Permanent):
        return await answer(client, client.weights.GetWeights, weights_pb2.GetWeightsRequest())
    return None


def summary(seen: dict[str, Any]) -> list[str]:
    """Return lines about the state of the daemon and the fleet, one line per topic."""
    lines = [
        f"OrchestrRL {seen['version']}, mode [bold]{seen['mode']}[/bold], generation {seen['generation']}, "
        f"up {duration(seen['uptime_s'])}",
        *trouble(seen),
        f"requests: {count(seen['requests_running'])} running, {count(seen['requests_waiting'])} waiting, "
        f"{count(seen['requests_finished'])} finished",
        f"moves: {count(seen['moves_done'])} done, {count(seen['moves_failed'])} failed, "
        f"{count(seen['tokens_recomputed'])} tokens recomputed, {count(seen['tokens_loaded'])} moved as KV",
        f"failovers: {count(seen['failovers'])} requests continued after their engine failed, "
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
    """Return a list with a line such as `policy: load_index: no step times for e0: ...`. The list is empty before the
    first decision."""
    return [f"policy: [bold]{policy}[/bold]: {escape(reason)}"] if policy else []


def trouble(seen: dict[str, Any]) -> list[str]:
    """Return lines about a mode that differs from the configured mode, damage to the journal, ignored journal entries,
    and defects."""
    lines = [f"mode: {escape(seen['mode_reason'])}"] if seen["mode_reason"] and not seen["journal_damage"] else []
    lines += [f"[red]the journal is damaged[/red]: {escape(text)}" for text in seen["journal_damage"]]
    if seen["journal_damage"]:
        lines.append('`orchestrrl mode act --reason "..."` acknowledges the damage and allows the daemon to act again')
    lines += [
        f"[yellow]journal entry {entry['sequence']} is ignored[/yellow]: {escape(entry['detail'])}"
        for entry in seen["journal_set_aside"]
    ]
    return [*lines, *(defect_text(defect, seen["now_unix_s"]) for defect in seen["defects"])]


def defect_text(defect: dict[str, Any], now_unix_s: float) -> str:
    """Return a line about a defect, such as `fast_loop: 3 consecutive failures: KeyError at ...: 'e0' (...)`."""
    running = f"{defect['running']} consecutive failures:" if defect["running"] else "recovered from"
    what = escape(f"{defect['type']} at {defect['place']}: {defect['message']}")
    last = f"last {ago(now_unix_s - defect['last_unix_s'])}, {count(defect['total'])} in total"
    return f"[{'red' if defect['running'] else 'yellow'}]{defect['part']}[/]: {running} {what} ({last})"


def remarks(workers: Iterable[dict[str, Any]], nodes: Iterable[str] = ()) -> list[str]:
    """Return remarks about the names and reports of nodes and engines, one sentence each. `nodes` contains the remarks
    about nodes."""
    return [*nodes, *(remark for worker in workers for remark in worker["remarks"])]


def barrier_summary(barrier: dict[str, Any] | None) -> list[str]:
    """Return lines about the pause barrier. The list is empty if `barrier` is None, or if the barrier is open and no
    policy version is set."""
    if barrier is None or (barrier["phase"] in ("", "open") and barrier["policy_version"] is None):
        return []
    lines = barrier_lines(barrier)
    return lines[:1] if barrier["phase"] in ("", "open") else lines


def fabric_summary(seen: dict[str, Any]) -> list[str]:
    """Return lines about the latest period and the operator's control of circuits. The list is empty if there is no
    optical fabric."""
    control, period = seen["fabric_control"], seen["fabric_period"]
    if control is None:
        return []
    lines = [] if period is None else [f"fabric: {escape(period_text(period))}"]
    return lines if control["state"] == "free" else [*lines, f"fabric: {escape(fabric_control_text(control))}"]


def period_text(period: dict[str, Any]) -> str:
    """Return the name and state of a period, such as `gradients kept: no_window: none by the deadline`."""
    why = ": ".join(filter(None, (period["code"] if period["code"] != period["state"] else "", period["detail"])))
    return f"{name_of_period(period)} {period['state']}{f': {why}' if why else ''}"


def name_of_period(report: dict[str, Any]) -> str:
    """Return the name of a period, such as `gradients`, or `gradients of trainer` if its job has a name."""
    return f"{report['period']} of {job}" if (job := report.get("job")) else str(report["period"])


def fabric_control_text(control: dict[str, Any]) -> str:
    """Return the operator's control of circuits as text, such as `all circuits pinned until 14:30:00 (measuring)`."""
    until = "" if control["expires_unix_s"] is None else f" until {time_of_day(control['expires_unix_s'])}"
    because = f" ({control['reason']})" if control["reason"] else ""
    match control["state"]:
        case "pinned":
            which = ", ".join(control["cross_connects"]) or "all circuits"
            return f"{which} pinned{until}{because}"
        case "overridden":
            return f"circuits of {name_of_period(control)}, regardless of its job's other periods{until}{because}"
        case _:
            return f"free{because}"


def weights_summary(weights: dict[str, Any] | None, now_unix_s: float) -> list[str]:
    """Return a list with one line about the committed version, the running sync and quarantined engines. The list is
    empty if there is nothing to report."""
    if weights is None:
        return []
    parts = [] if weights["committed_version"] is None else [f"version {weights['committed_version']}"]
    sync = weights["sync"]
    if sync is not None and sync["ended_unix_s"] is None:
        parts.append(f"version {sync['version']} is {sync['state']} for {duration(now_unix_s - sync['began_unix_s'])}")
    if weights["quarantined"]:
        names = ", ".join(engine["engine_id"] for engine in weights["quarantined"])
        parts.append(f"[red]quarantined[/red]: {escape(names)}, see `orchestrrl sync status`")
    return [f"weights: {'; '.join(parts)}"] if parts else []


def operator_pause_text(pause: dict[str, Any]) -> str:
    """Return the reason for an operator's pause, with its start and expiry, as text."""
    until = "" if pause["expires_unix_s"] is None else f", until {time_of_day(pause['expires_unix_s'])}"
    return f"{pause['reason'] or 'no reason given'} (since {time_of_day(pause['since_unix_s'])}{until})"


def control_text(control: dict[str, Any] | None, now_unix_s: float | None = None) -> str:
    """Return the operator's control of the planner, such as `pinned for 4 min 10 s more (benchmark running)`. The
    remaining time is omitted if `now_unix_s` is None."""
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


def health_text(worker: dict[str, Any]) -> Text:
    """Return a coloured text with the worker's health, as judged by the daemon, and whether the worker is draining."""
    health = worker["health"] or UNKNOWN if worker["reported"] else "no agent"
    colour = HEALTH_COLOURS.get(worker["health"] or "", "yellow")
    return Text(f"{health}, draining" if worker["draining"] else str(health), colour)


def kv_used(worker: dict[str, Any]) -> float | None:
    """Return the fraction of the KV cache in use, or None if the size of the cache is unknown."""
    capacity = worker["kv_capacity_tokens"]
    return 1.0 - worker["kv_free_tokens"] / capacity if capacity else None


def ago(age_s: float | None) -> str:
    return "never" if age_s is None else f"{duration(age_s)} ago"


HEALTH_COLOURS = {"ok": "green", "slow": "yellow", "gone": "red", "nonsense": "red"}
WORKER_COLUMNS: Columns = {
    "worker": "engine_id",
    "health": health_text,
    "run": "running",
    "wait": "waiting",
    "max": lambda worker: worker["max_sequences"] or None,
    "KV used": lambda worker: percent(kv_used(worker)),
    "KV tokens": lambda worker: count(worker["kv_capacity_tokens"] or None),
    "decode": lambda worker: rate(worker["decode_tokens_per_s"]),
    "load": lambda worker: load_index(worker["load_index"]),
    "seen": lambda worker: ago(worker["age_s"]),
    "step times": "step_times_source",
    "configuration": "configuration",
    "pool": "pool",
}
NODE_COLUMNS: Columns = {
    "node": "node_id",
    "kind": "kind",
    "attached": "attached",
    "last report": lambda node: ago(node["age_s"]),
    "url": "url",
}
REQUEST_COLUMNS: Columns = {
    "request": "request_id",
    "engine": lambda request: request["engine_id"] or "gateway",
    "state": "state",
    "prompt": lambda request: count(request["prompt_tokens"]),
    "generated": lambda request: count(request["generated_tokens"]),
    "limit": lambda request: count(request["max_tokens"]),
    "moves": "moves",
    "age": lambda request: duration(request["age_s"]),
    "movable": lambda request: request["movable"] or request["movable_detail"] or "no",
    "group": "group_id",
    "tag": "tag",
}
IDENTITY_COLUMNS: Columns = {
    "worker": "engine_id",
    "engine": lambda worker: _offer(worker, lambda it: f"{it['engine']} {it['version']}") or "not queried yet",
    "models": lambda worker: _offer(worker, lambda offers: ", ".join(offers["models"])),
    "max length": lambda worker: _offer(worker, lambda offers: count(offers["max_model_len_tokens"])),
    "preemptions": "preemptions_total",
    "url": "url",
    "step times": "step_times_detail",
}


def _offer(worker: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> str | None:
    return None if worker["capabilities"] is None else text(worker["capabilities"])


MOVE_COLUMNS: Columns = {"request": "request_id", "from": "from_engine_id", "to": "to_engine_id", "state": "state"}
LOAD_COLUMNS: Columns = {
    "worker": "engine_id",
    "before": lambda load: _index(load["before"]),
    "after": lambda load: _index(load["after"]),
}
ENDED_COLUMNS: Columns = {
    "ended": lambda move: time_of_day(move["ended_unix_s"]),
    "request": "request_id",
    "from": "from_engine_id",
    "to": "to_engine_id",
    "by": _method,
    "predicted": lambda move: duration(move["predicted_s"] or None),
    "actual": lambda move: duration(move["actual_s"] or None),
    "loaded": lambda move: f"{move['loaded_tokens']:,}",
    "recomputed": lambda move: f"{move['recomputed_tokens']:,}",
}
