"""`orchestrrl ocs verify`: circuits and cables as they are, against the site's file."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import fabric_pb2
from orchestrrl.cli.output import EXIT_FAILURE, JsonFlag, print_json, print_lines, print_table, stderr
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

# A robotic patch panel takes minutes for each fibre.
WALK_TIMEOUT_S = 24 * 3600.0
LOOK_TIMEOUT_S = 60.0


def verify(
    walk: Annotated[
        bool, typer.Option("--walk", help="Light every free fibre for a moment, and see where it ends.")
    ] = False,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Compare what the switches and ToRs see with the site: which circuit or cable is not where it should be?

    Circuits on the switches are held against what the daemon has left there. Where light comes out, and who answers
    there, the ToRs say (`fabric.routers`). Light that is there anyway shows the fibres that are in use; `--walk` shows
    the others, one cross-connect after the other, and leaves alone what is up, failed or masked. It wants the fabric
    paused, and leads no packets over what it lights. Exit status 1 if anything is wrong.

    Examples:

    `orchestrrl ocs verify`

    `orchestrrl fabric pause --reason "checking cables" && orchestrrl ocs verify --walk; orchestrrl fabric resume`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        request = fabric_pb2.VerifyFabricRequest(walk=walk)
        limit_s = WALK_TIMEOUT_S if walk else LOOK_TIMEOUT_S
        return await answer(client, client.fabric.VerifyFabric, request, limit_s)

    with stderr().status("walking the fibres" if walk else "looking"):
        seen = call_daemon(daemon, conversation)
    if as_json:
        print_json(seen)
    else:
        _print(seen)
    if seen["faults"]:
        raise typer.Exit(EXIT_FAILURE)


def _print(seen: dict[str, Any]) -> None:
    if seen["faults"]:
        rows = ((each["kind"].replace("_", " "), each["where"], each["what"]) for each in seen["faults"])
        print_table("Not as it should be", ("fault", "where", "what"), rows, left=("where", "what"))
    lines = [
        f"{seen['cross_connects']} cross-connects of the site are up, {seen['links']} links of ToRs over them",
        f"{seen['fibres']} of {seen['fibres_of_site']} ports have the fibre that the site says",
    ]
    print_lines([*lines, *(f"not known: {escape(each)}" for each in seen["not_seen"])])
    if not seen["faults"]:
        print_lines(["nothing is wrong with what was seen"])


def register(app: typer.Typer) -> None:
    ocs = group(app, "ocs")
    ocs.command("verify")(verify)
