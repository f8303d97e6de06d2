"""`orchestrrl pause`, `renew`, `resume`, `barrier`: bring the fleet to rest while weights change. And `cancel`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fleet.pause_text import barrier_lines, progress
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import agent_pb2, control_pb2
from orchestrrl.cli.output import JsonFlag, fail, print_json, print_lines, print_table, stderr, stdout
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

POLL_EVERY_S = 0.5
USUAL_S = 60.0  # as the daemon has it
ANSWER_S = 30.0  # beyond what is waited for


class PauseModeOption(StrEnum):
    """Those of engines.base, which loads more."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class FrozenRequestsOption(StrEnum):
    """Those of operations.py, which loads more."""

    RECOMPUTE = "recompute"
    CONTINUE = "continue"
    RESTART = "restart"
    TAKEN_BACK = "taken_back"


WeightsOption = Annotated[
    str, typer.Option(metavar="FOLDER", help="Where these weights are: engines that are started later load them there.")
]
ReasonOption = Annotated[str, typer.Option(help="Who and why, for the journal.")]
LeaseSeconds = Annotated[float, typer.Option("--lease-s", min=0.0, help="Seconds until all goes on by itself.")]


def pause(
    mode: Annotated[PauseModeOption, typer.Option(help="What becomes of what runs: frozen, finished first, ended.")] = (
        PauseModeOption.KEEP
    ),
    frozen: Annotated[FrozenRequestsOption, typer.Option(help="How frozen requests go on.")] = (
        FrozenRequestsOption.RECOMPUTE
    ),
    lease_s: LeaseSeconds = USUAL_S,
    deadline_s: Annotated[float, typer.Option(min=0.0, help="All must be at rest by then; 0: as the lease.")] = 0.0,
    holder: Annotated[str, typer.Option(help="Who asks and why, for others to see.")] = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Bring every engine to rest, and say when all is quiet. Renew the lease, or all goes on when it ends.

    Where it is not quiet in time, all goes on as before, and the exit status is 1.

    Example: `orchestrrl pause --mode wait --deadline-s 300 --holder "weights of step 12"`
    """

    import asyncio

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.PauseFleetRequest(
            mode=agent_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.name}"),
            frozen=agent_pb2.FrozenRequests.Value(f"FROZEN_REQUESTS_{frozen.name}"),
            holder=holder,
            lease_s=lease_s,
            deadline_s=deadline_s,
        )
        patience_s = (deadline_s or lease_s or USUAL_S) + ANSWER_S
        asked = asyncio.create_task(answer(client, client.control.PauseFleet, order, timeout_s=patience_s))
        told = ""
        while not (await asyncio.wait({asked}, timeout=POLL_EVERY_S))[0]:
            words = progress(await _seen(client))
            if words and words != told:
                stderr().print(words)
                told = words
        return await asked

    barrier = call_daemon(daemon, conversation)
    if as_json:
        print_json(barrier)
        return
    print_lines([*barrier_lines(barrier), f"go on with [bold]orchestrrl resume {escape(barrier['lease_id'])}[/bold]"])
    print_lines(_troubles(barrier))


def renew(
    lease: Annotated[str, typer.Argument(help="As `pause` told it.", metavar="LEASE")],
    lease_s: LeaseSeconds = USUAL_S,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Keep the fleet at rest for longer. Refused when the lease has ended: requests have gone on since.

    Example: `orchestrrl renew g1795274800-1 --lease-s 120`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(
            client, client.control.RenewPause, control_pb2.RenewPauseRequest(lease_id=lease, lease_s=lease_s)
        )

    barrier = call_daemon(daemon, conversation)
    if as_json:
        print_json(barrier)
    else:
        print_lines(barrier_lines(barrier))


def resume(
    lease: Annotated[str, typer.Argument(help="Left out: whoever's it is.", metavar="[LEASE]")] = "",
    policy_version: Annotated[
        int | None, typer.Option(min=0, help="Of the weights that engines have now; left out: the same as before.")
    ] = None,
    weights: WeightsOption = "",
    without: Annotated[
        list[str] | None, typer.Option(metavar="ENGINE", help="Did not get them, stays at rest; repeat it.")
    ] = None,
    reason: ReasonOption = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Let requests go on, under the weights that engines have now.

    Example: `orchestrrl resume --policy-version 13 --weights /shared/weights/13`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.ResumeFleetRequest(
            lease_id=lease,
            policy_version=policy_version,
            weights_source=weights,
            without_engine_ids=without or [],
            reason=reason,
        )
        return await answer(client, client.control.ResumeFleet, order)

    barrier = call_daemon(daemon, conversation)
    if as_json:
        print_json(barrier)
    else:
        print_lines([*barrier_lines(barrier), *_troubles(barrier)])


def status(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Say whether requests stand still, for whom and how long, and which weights engines have.

    Example: `orchestrrl barrier`
    """
    barrier = call_daemon(daemon, _seen)
    if as_json:
        print_json(barrier)
        return
    print_lines(barrier_lines(barrier))
    print_table(
        "Gateways",
        ("gateway", "phase", "running", "frozen", "held"),
        (_gateway_row(gateway) for gateway in barrier["gateways"]),
    )
    print_table(
        "Engines",
        ("engine", "weights", "remark"),
        ((engine["engine_id"], _version(engine), _remark(engine)) for engine in barrier["engines"]),
    )


def set_version(
    policy_version: Annotated[int, typer.Argument(min=0, help="Of the weights.", metavar="N")],
    engine: Annotated[list[str], typer.Option(metavar="ENGINE", help="That has them; repeat it.")],
    weights: WeightsOption = "",
    reason: ReasonOption = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Tell which weights engines have that got them without the pause barrier, e.g. after a restart.

    Example: `orchestrrl engines set-version 13 --engine vllm-1`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.SetPolicyVersionRequest(
            engine_ids=engine, policy_version=policy_version, reason=reason, weights_source=weights
        )
        return await answer(client, client.control.SetPolicyVersion, order)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    words = f"{', '.join(engine)}: policy version {policy_version}, the fleet's is {found['policy_version']}"
    stdout().print(escape(words), soft_wrap=True)


def cancel(
    group_id: Annotated[
        list[str] | None, typer.Option("--group", metavar="GROUP", help="All of its requests; repeat it.")
    ] = None,
    request: Annotated[list[str] | None, typer.Option(metavar="REQUEST", help="This one; repeat it.")] = None,
    reason: Annotated[str, typer.Option(help="Becomes the answers' stop_reason.")] = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """End answers where they are: their clients get what there is, with finish_reason `abort`.

    Example: `orchestrrl cancel --group prompt-17 --reason "reward is known"`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.CancelRequestsRequest(request_ids=request or [], group_ids=group_id or [], reason=reason)
        return await answer(client, client.control.CancelRequests, order)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
    else:
        ended = found["cancelled_ids"]
        stdout().print(escape(f"{len(ended)} requests ended{': ' if ended else ''}{', '.join(ended)}"), soft_wrap=True)
    if found["silent_node_ids"]:
        fail(f"no answer from {', '.join(found['silent_node_ids'])}: more may have ended there")


async def _seen(client: "ControlClient") -> dict[str, Any]:
    return await answer(client, client.control.GetPauseBarrier, control_pb2.GetPauseBarrierRequest())


def _gateway_row(gateway: dict[str, Any]) -> tuple[object, ...]:
    report = gateway["report"]
    if report is None:
        return gateway["node_id"], None, None, None, None
    return gateway["node_id"], report["phase"] or "open", report["running"], report["frozen"], report["held"]


def _version(engine: dict[str, Any]) -> str | None:
    return None if engine["policy_version"] is None else str(engine["policy_version"])


def _remark(engine: dict[str, Any]) -> str:
    return engine["detail"] or ("" if engine["done"] else "not done")


def _troubles(barrier: dict[str, Any]) -> list[str]:
    return [
        f"[yellow]{escape(engine['engine_id'])}[/yellow]: {escape(_remark(engine))}"
        for engine in barrier["engines"]
        if not engine["done"]
    ]


def register(app: typer.Typer) -> None:
    for command in (cancel, pause, renew, resume):
        app.command()(command)
    app.command("barrier")(status)
    group(app, "engines").command("set-version")(set_version)
