"""`orchestrrl pause`, `renew`, `resume`, `barrier`, `cancel`: pause the fleet for new weights, and cancel requests."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from orchestrrl.cli.command import Reason, answer, daemon_command
from orchestrrl.cli.formats import count, time_of_day
from orchestrrl.cli.lazy import ControlClient, agent_pb2, control_pb2
from orchestrrl.cli.output import Columns, Output, View, note, table

POLL_EVERY_S = 0.5
USUAL_S = 60.0  # the daemon's default lease
ANSWER_S = 30.0  # time for the daemon's response after the deadline


# The values of the enumerations in core/operations.py, repeated because that module is slow to import.
PauseModeOption = Literal["keep", "wait", "abort"]
FrozenRequestsOption = Literal["recompute", "continue", "restart", "taken_back"]
WeightsOption = Annotated[
    str, typer.Option(metavar="FOLDER", help="Folder of these weights. Engines that start later load them from it.")
]
LeaseSeconds = Annotated[
    float, typer.Option("--lease-s", min=0.0, help="Seconds until the fleet resumes unless the lease is renewed.")
]


@daemon_command
async def pause(
    client: ControlClient,
    running: Annotated[
        PauseModeOption, typer.Option(help="Running requests: keep freezes, wait finishes, abort ends them.")
    ] = "keep",
    frozen: Annotated[FrozenRequestsOption, typer.Option(help="How frozen requests continue.")] = "recompute",
    lease_s: LeaseSeconds = USUAL_S,
    deadline_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds within which every engine must be quiet. 0: as --lease-s.")
    ] = 0.0,
    holder: Annotated[str, typer.Option(help="Name and purpose of the holder, shown to other operators.")] = "",
) -> Output:
    """Pause every engine and wait until the fleet is quiet. The fleet resumes when the lease expires.

    Renew the lease with `orchestrrl renew`. If the fleet is not quiet by the deadline, it resumes, and the exit status
    is 1.

    Example: `orchestrrl pause --running wait --deadline-s 300 --holder "weights of step 12"`
    """
    import asyncio

    order = control_pb2.PauseFleetRequest(
        mode=agent_pb2.PauseMode.Value(f"PAUSE_MODE_{running.upper()}"),
        frozen=agent_pb2.FrozenRequests.Value(f"FROZEN_REQUESTS_{frozen.upper()}"),
        holder=holder,
        lease_s=lease_s,
        deadline_s=deadline_s,
    )
    patience_s = (deadline_s or lease_s or USUAL_S) + ANSWER_S
    asked = asyncio.create_task(answer(client, client.control.PauseFleet, order, timeout_s=patience_s))
    printed = ""
    while not (await asyncio.wait({asked}, timeout=POLL_EVERY_S))[0]:
        words = progress(await _seen(client))
        if words and words != printed:
            note(words)
            printed = words
    found = await asked
    advice = f"resume with [bold]orchestrrl resume {escape(found['lease_id'])}[/bold]"
    return Output(found, [*barrier_lines(found), advice, *_troubles(found)])


@daemon_command
async def renew(
    client: ControlClient,
    lease: Annotated[str, typer.Argument(help="The lease id that `pause` printed.", metavar="LEASE")],
    lease_s: LeaseSeconds = USUAL_S,
) -> Output:
    """Renew the lease of a pause. The command fails if the lease has expired, because requests have run since then.

    Example: `orchestrrl renew g1795274800-1 --lease-s 120`
    """
    order = control_pb2.RenewPauseRequest(lease_id=lease, lease_s=lease_s)
    found = await answer(client, client.control.RenewPause, order)
    return Output(found, barrier_lines(found))


@daemon_command
async def resume(
    client: ControlClient,
    lease: Annotated[str, typer.Argument(help="The lease to end. Default: the current one.", metavar="[LEASE]")] = "",
    policy_version: Annotated[
        int | None, typer.Option(min=0, help="Version of the weights that engines have now. Default: unchanged.")
    ] = None,
    weights: WeightsOption = "",
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="ENGINE", help="Engine without the new weights; it stays paused. Can be repeated."),
    ] = None,
    reason: Reason = "",
) -> Output:
    """End a pause, so that requests continue with the weights that the engines have now.

    Example: `orchestrrl resume --policy-version 13 --weights /shared/weights/13`
    """
    order = control_pb2.ResumeFleetRequest(
        lease_id=lease,
        policy_version=policy_version,
        weights_source=weights,
        without_engine_ids=without or [],
        reason=reason,
    )
    found = await answer(client, client.control.ResumeFleet, order)
    return Output(found, [*barrier_lines(found), *_troubles(found)])


@daemon_command
async def barrier(client: ControlClient) -> Output:
    """Show the pause barrier: its phase, lease and holder, and the weights of each engine.

    Example: `orchestrrl barrier`
    """
    found = await _seen(client)
    return Output(found, _barrier_view(found))


def _barrier_view(found: dict[str, Any]) -> View:
    yield from barrier_lines(found)
    yield table("Gateways", GATEWAY_COLUMNS, found["gateways"])
    yield table("Engines", ENGINE_COLUMNS, found["engines"])


@daemon_command
async def set_version(
    client: ControlClient,
    policy_version: Annotated[int, typer.Argument(min=0, help="Version of the weights.", metavar="N")],
    engines: Annotated[list[str], typer.Argument(metavar="ENGINE...", help="The engines with this version.")],
    weights: WeightsOption = "",
    reason: Reason = "",
) -> Output:
    """Set the weight version of engines that received weights without the pause barrier, for example after a restart.

    Example: `orchestrrl engines set-version 13 vllm-1`
    """
    order = control_pb2.SetPolicyVersionRequest(
        engine_ids=engines, policy_version=policy_version, reason=reason, weights_source=weights
    )
    found = await answer(client, client.control.SetPolicyVersion, order)
    words = f"{', '.join(engines)}: policy version {policy_version}, the fleet's is {found['policy_version']}"
    return Output(found, [escape(words)])


@daemon_command
async def cancel(
    client: ControlClient,
    group: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help="Cancel all requests of this group. Can be repeated.")
    ] = None,
    request: Annotated[
        list[str] | None, typer.Option(metavar="REQUEST", help="Cancel this request. Can be repeated.")
    ] = None,
    reason: Annotated[str, typer.Option(help="The stop_reason of the responses.")] = "",
) -> Output:
    """Cancel requests. Their clients receive the tokens generated so far, with finish_reason `abort`.

    Example: `orchestrrl cancel --group prompt-17 --reason "reward is known"`
    """
    order = control_pb2.CancelRequestsRequest(request_ids=request or [], group_ids=group or [], reason=reason)
    found = await answer(client, client.control.CancelRequests, order)
    ended, silent = found["cancelled_ids"], ", ".join(found["silent_node_ids"])
    lines = [escape(f"{len(ended)} requests cancelled{': ' if ended else ''}{', '.join(ended)}")]
    return Output(found, lines, f"no response from {silent}: more requests may be cancelled there" if silent else None)


async def _seen(client: ControlClient) -> dict[str, Any]:
    return await answer(client, client.control.GetPauseBarrier, control_pb2.GetPauseBarrierRequest())


def _remark(engine: dict[str, Any]) -> str:
    return engine["detail"] or ("" if engine["done"] else "not done")


def _reported(field: str) -> Callable[[dict[str, Any]], object]:
    return lambda gateway: gateway["report"] and gateway["report"][field]


GATEWAY_COLUMNS: Columns = {
    "gateway": "node_id",
    "phase": lambda gateway: gateway["report"] and (gateway["report"]["phase"] or "open"),
    **{field: _reported(field) for field in ("running", "frozen", "held")},
}
ENGINE_COLUMNS: Columns = {"engine": "engine_id", "weights": "policy_version", "remark": _remark}


def _troubles(barrier: dict[str, Any]) -> list[str]:
    return [
        f"[yellow]{escape(engine['engine_id'])}[/yellow]: {escape(_remark(engine))}"
        for engine in barrier["engines"]
        if not engine["done"]
    ]


# --- the barrier as text


def barrier_lines(barrier: dict[str, Any]) -> list[str]:
    """Return lines that describe the state of the pause barrier."""
    version = "" if barrier["policy_version"] is None else f", policy version {barrier['policy_version']}"
    if barrier["phase"] in ("", "open"):
        lines = [f"barrier: open{version}", *_source(barrier)]
        return lines if not barrier["detail"] else [*lines, f"last opened: {escape(barrier['detail'])}"]
    until = time_of_day(barrier["lease_until_unix_s"])
    holder = f" for {barrier['holder']}" if barrier["holder"] else ""
    lines = [
        f"barrier: [bold]{barrier['phase']}[/bold]{version}, mode {barrier['mode']},"
        f" frozen requests {barrier['frozen']}",
        escape(f"lease {barrier['lease_id']}{holder}: expires at {until}, then the fleet resumes"),
        *_source(barrier),
    ]
    words = progress(barrier)
    return [*lines, words] if words else lines


def _source(barrier: dict[str, Any]) -> list[str]:
    return [escape(f"weights are in {barrier['weights_source']}")] if barrier["weights_source"] else []


def progress(barrier: dict[str, Any]) -> str:
    """Return the numbers of running, frozen and held requests as text. Return an empty string if the barrier is open,
    or if the gateways' reports are missing or outdated."""
    reports = [gateway["report"] for gateway in barrier["gateways"] if gateway["report"]]
    old = barrier["phase"] == "quiet" and any(report["phase"] != "quiet" for report in reports)
    if barrier["phase"] in ("", "open") or not reports or old:
        return ""
    running, frozen, held = (sum(report[name] for report in reports) for name in ("running", "frozen", "held"))
    return f"requests: {count(running)} running, {count(frozen)} frozen, {count(held)} held"
