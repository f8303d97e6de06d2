"""`orchestrrl ocs verify`: circuits and cables as they are, against the site's file."""

from typing import Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import daemon_command
from orchestrrl.cli.control import answer
from orchestrrl.cli.lazy import ControlClient, fabric_pb2
from orchestrrl.cli.output import Columns, Output, View, stderr, table

# A robotic patch panel takes minutes for each fibre.
WALK_TIMEOUT_S = 24 * 3600.0
LOOK_TIMEOUT_S = 60.0


@daemon_command
async def verify(
    client: ControlClient,
    walk: Annotated[
        bool, typer.Option("--walk", help="Light every free fibre for a moment, and see where it ends.")
    ] = False,
) -> Output:
    """Compare what the switches and ToRs see with the site: which circuit or cable is not where it should be?

    Circuits on the switches are held against what the daemon has left there. Where light comes out, and who answers
    there, the ToRs say (`fabric.routers`). Light that is there anyway shows the fibres that are in use; `--walk` shows
    the others, one cross-connect after the other, and leaves alone what is up, failed or masked. It wants the fabric
    paused, and leads no packets over what it lights. Exit status 1 if anything is wrong.

    Examples:

    `orchestrrl ocs verify`

    `orchestrrl fabric pause --reason "checking cables" && orchestrrl ocs verify --walk; orchestrrl fabric resume`
    """

    with stderr().status("walking the fibres" if walk else "looking"):
        request, limit_s = fabric_pb2.VerifyFabricRequest(walk=walk), WALK_TIMEOUT_S if walk else LOOK_TIMEOUT_S
        seen = await answer(client, client.fabric.VerifyFabric, request, limit_s)
    return Output(seen, _view(seen), failure="" if seen["faults"] else None)


def _view(seen: dict[str, Any]) -> View:
    if seen["faults"]:
        columns: Columns = {"fault": lambda each: each["kind"].replace("_", " "), "where": "where", "what": "what"}
        yield table("Not as it should be", columns, seen["faults"])
    yield f"{seen['cross_connects']} cross-connects of the site are up, {seen['links']} links of ToRs over them"
    yield f"{seen['fibres']} of {seen['fibres_of_site']} ports have the fibre that the site says"
    yield from (f"not known: {escape(each)}" for each in seen["not_seen"])
    if not seen["faults"]:
        yield "nothing is wrong with what was seen"
