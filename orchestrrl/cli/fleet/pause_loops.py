"""`orchestrrl balancer|fabric|sync pause|resume`: let a part of the control plane stand still, and go on."""

from typing import TYPE_CHECKING, Any

import typer

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fleet.status import operator_pause_text
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.output import JsonFlag, print_json, stdout
from orchestrrl.cli.plan.live import Reason, TimeToLive
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.ttl import lifetime_faults

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

_WHAT = {
    "balancer": "the fast loop's moves; an operator's own go on",
    "fabric": "every change of circuits that periods ask for",
    "sync": "weight syncs: none begins, and no circuits are changed for one; what is under way goes on",
}


def _add(commands: typer.Typer, part: str) -> None:
    def pause(
        reason: Reason = "", ttl_s: TimeToLive = 0.0, daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False
    ) -> None:
        _set(part, True, reason, ttl_s, daemon, as_json)

    def resume(reason: Reason = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
        _set(part, False, reason, 0.0, daemon, as_json)

    example = f'Example: `orchestrrl {part} pause --reason "looking at it" --ttl-s 600`'
    commands.command("pause", help=f"Hold {_WHAT[part]}, until resumed or expired.\n\n{example}")(pause)
    commands.command("resume", help=f"Let it go on.\n\nExample: `orchestrrl {part} resume`")(resume)


def _set(part: str, paused: bool, reason: str, ttl_s: float, daemon: str, as_json: bool) -> None:
    async def conversation(client: "ControlClient") -> dict[str, Any]:
        if faults := lifetime_faults(ttl_s, "--ttl-s", until="resumed"):
            raise ProblemFaults(faults)
        order = control_pb2.SetPauseRequest(part=part, paused=paused, reason=reason, ttl_s=ttl_s)
        return await answer(client, client.control.SetPause, order)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    in_force = {pause["part"]: pause for pause in found["pauses"]}
    if part in in_force:
        stdout().print(f"{part} is paused: {operator_pause_text(in_force[part])}", markup=False)
    else:
        stdout().print(f"{part} goes on" if found["changed"] else f"{part} was not paused")


def register(app: typer.Typer) -> None:
    for part in _WHAT:
        _add(group(app, part), part)
