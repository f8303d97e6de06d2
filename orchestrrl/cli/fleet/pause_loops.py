"""`orchestrrl balancer|fabric|sync pause|resume`: let a part of the control plane stand still, and go on."""

from rich.markup import escape

from orchestrrl.cli.command import Command, Reason, TimeToLive, daemon_command
from orchestrrl.cli.commands import summary
from orchestrrl.cli.control import answer
from orchestrrl.cli.fleet.status import operator_pause_text
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.output import Output, raise_faults
from orchestrrl.core.ttl import lifetime_faults


def _commands(part: str) -> tuple[Command, Command]:
    async def pause(client: ControlClient, reason: Reason = "", ttl_s: TimeToLive = 0.0) -> Output:
        raise_faults(lifetime_faults(ttl_s, "--ttl-s", until="resumed"))
        return await _set(client, control_pb2.SetPauseRequest(part=part, paused=True, reason=reason, ttl_s=ttl_s))

    async def resume(client: ControlClient, reason: Reason = "") -> Output:
        return await _set(client, control_pb2.SetPauseRequest(part=part, paused=False, reason=reason))

    example = f'Example: `orchestrrl {part} pause --reason "looking at it" --ttl-s 600`'
    pause.__doc__ = f"{summary(f'{part} pause')}\n\n{example}"
    resume.__doc__ = f"{summary(f'{part} resume')}\n\nExample: `orchestrrl {part} resume`"
    return daemon_command(pause), daemon_command(resume)


async def _set(client: ControlClient, order: "control_pb2.SetPauseRequest") -> Output:
    found = await answer(client, client.control.SetPause, order)
    part, in_force = order.part, {pause["part"]: pause for pause in found["pauses"]}
    if part in in_force:
        return Output(found, [escape(f"{part} is paused: {operator_pause_text(in_force[part])}")])
    return Output(found, [f"{part} goes on" if found["changed"] else f"{part} was not paused"])


balancer_pause, balancer_resume = _commands("balancer")
fabric_pause, fabric_resume = _commands("fabric")
sync_pause, sync_resume = _commands("sync")
