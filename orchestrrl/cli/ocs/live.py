"""`orchestrrl ocs`: inspect and operate the optical circuit switches of a daemon."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Annotated, Any

import typer
from rich.markup import escape

from ocs_drivers.model import ChangeMode, CrossConnect
from orchestrrl.cli.command import answer, daemon_command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.lazy import ControlClient, control_pb2, fabric_pb2, ocs_pb2
from orchestrrl.cli.output import Columns, Output, View, note, raise_faults, stderr, table
from orchestrrl.rpc.plain_values import plain

# Robotic patch panels take minutes.
CHANGE_TIMEOUT_S = 1800.0
WALK_TIMEOUT_S = 24 * 3600.0  # a walk can take minutes per fibre
LOOK_TIMEOUT_S = 60.0

SwitchArgument = Annotated[str, typer.Argument(metavar="SWITCH", help="The switch's id, as in the daemon's config.")]
PairsArgument = Annotated[
    list[str], typer.Argument(metavar="INGRESS:EGRESS...", help="Pairs of port numbers, in the device's numbering.")
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Print the changes, including evictions, and send nothing.")
]

RevertOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Revert the change after this many seconds unless `orchestrrl ocs confirm` confirms it.",
    ),
]

_AFTER_RESTART = {"dark": "lost", "restore": "restored", "unknown": "unknown"}


@daemon_command
async def ocs_list(client: ControlClient) -> Output:
    """List the switches with their driver, model, ports and state.

    Example: `orchestrrl ocs list`
    """
    listed = _readable(await answer(client, client.switches.ListSwitches, control_pb2.ListSwitchesRequest()))[
        "switches"
    ]
    document = {"switches": [_summary(switch) for switch in listed]}
    return Output(document, table("Optical circuit switches", SWITCH_COLUMNS, listed))


@daemon_command
async def ocs_show(client: ControlClient, switch: SwitchArgument) -> Output:
    """Show one switch: its circuits with their states, and the ports that cannot be used.

    Example: `orchestrrl ocs show ocs1`
    """
    message = await client.call(client.switches.ShowSwitch, control_pb2.ShowSwitchRequest(switch_id=switch))
    seen = _readable(plain(message))
    trial = seen["unconfirmed"]
    document = {
        **_summary(seen),
        "circuits": seen["circuits"],
        "ports": seen["port_states"],
        "unconfirmed": trial and {name: value for name, value in trial.items() if name != "revision"},
    }
    if seen["reachable"]:
        return Output(document, _switch_view(message, seen))
    return Output(document, [], failure=f"{switch} is {_why_not(seen)}")


@daemon_command
async def connect(
    client: ControlClient,
    switch: SwitchArgument,
    pairs: PairsArgument,
    change_mode: Annotated[
        ChangeMode,
        typer.Option(
            help="`safe` fails if a port is in use; `update` evicts the circuits on the given ports; "
            "`overwrite` evicts every circuit that is not given."
        ),
    ] = ChangeMode.SAFE,
    revert_in_s: RevertOption = None,
    dry_run: DryRunFlag = False,
) -> Output:
    """Connect pairs of ports. If one pair cannot be connected, none is connected.

    The command also takes effect in mode `advise`, which restricts only the daemon's own decisions. The circuits to
    evict are printed first. If the switch changes before the command is sent, nothing is sent. A circuit that does not
    come up is retried once. If the retry fails, the change is rolled back. Circuits that the daemon does not own are
    never evicted. The exit status is 0 if the pairs are connected, 1 if the change is refused or rolled back, and 2 for
    malformed arguments.

    Examples:

    `orchestrrl ocs connect ocs1 3:17 5:19`

    `orchestrrl ocs connect ocs1 3:17 --change-mode update --dry-run`

    `orchestrrl ocs connect ocs1 3:17 --revert-in-s 60`
    """
    wanted = _parsed(pairs, revert_in_s)

    def request(**more: Any) -> "control_pb2.ConnectPortsRequest":
        return control_pb2.ConnectPortsRequest(
            switch_id=switch, cross_connects=wanted, mode=change_mode, revert_in_s=revert_in_s, **more
        )

    if dry_run:
        return _outcome(await client.call(client.switches.ConnectPorts, request(dry_run=True)))
    revision: dict[str, Any] = {}
    if change_mode is not ChangeMode.SAFE:
        plan = _readable(await answer(client, client.switches.ConnectPorts, request(dry_run=True)))
        revision = {"expect_revision": plan["revision"]}
        if plan["evicted"]:
            note(f"{switch}: evicting {' '.join(plan['evicted'])}")
    with stderr().status(f"{switch}: moving mirrors"):
        return _outcome(await client.call(client.switches.ConnectPorts, request(**revision), CHANGE_TIMEOUT_S))


@daemon_command
async def disconnect(
    client: ControlClient,
    switch: SwitchArgument,
    pairs: PairsArgument,
    revert_in_s: RevertOption = None,
    dry_run: DryRunFlag = False,
) -> Output:
    """Disconnect pairs of ports. The command fails if a port of a pair is connected to a port outside the pair.

    A pair that is already disconnected is not an error. The command also takes effect in mode `advise`.

    Example: `orchestrrl ocs disconnect ocs1 3:17 5:19`
    """
    request = control_pb2.DisconnectPortsRequest(
        switch_id=switch, cross_connects=_parsed(pairs, revert_in_s), dry_run=dry_run, revert_in_s=revert_in_s
    )
    with stderr().status(f"{switch}: moving mirrors"):
        return _outcome(await client.call(client.switches.DisconnectPorts, request, CHANGE_TIMEOUT_S))


@daemon_command
async def confirm(client: ControlClient, switch: SwitchArgument) -> Output:
    """Confirm a change made with --revert-in-s. The command fails if no change is pending or the change was already
    reverted.

    Example: `orchestrrl ocs confirm ocs1`
    """
    request = control_pb2.ConfirmPortsRequest(switch_id=switch)
    return _outcome(await client.call(client.switches.ConfirmPorts, request, CHANGE_TIMEOUT_S))


@daemon_command
async def take_over(client: ControlClient, switch: SwitchArgument, pairs: PairsArgument) -> Output:
    """Take over circuits that another client made. The daemon may then evict these circuits and take them down.

    Nothing is sent to the switch. Each pair must be an existing circuit. If any circuit does not exist, none is taken
    over.

    Example: `orchestrrl ocs take-over ocs1 3:17`
    """
    request = control_pb2.TakeOverPortsRequest(switch_id=switch, cross_connects=_parsed(pairs))
    return _outcome(await client.call(client.switches.TakeOverPorts, request, CHANGE_TIMEOUT_S))


@daemon_command
async def verify(
    client: ControlClient,
    walk: Annotated[
        bool, typer.Option("--walk", help="Light each free fibre briefly and check where it ends.")
    ] = False,
) -> Output:
    """Compare switches and ToRs with the site file, and report circuits and cables that are in the wrong place.

    Circuits on the switches are compared with the daemon's last commands. ToRs (`fabric.routers`) report which ports
    receive light and which neighbour is connected. Circuits that are up verify the fibres in use. `--walk` verifies all
    other fibres, one cross-connect at a time, and skips ports that are up, failed or masked. This option requires a
    paused fabric and routes no packets over the fibres that it lights. The exit status is 1 if there are faults.

    Examples:

    `orchestrrl ocs verify`

    `orchestrrl fabric pause --reason "checking cables" && orchestrrl ocs verify --walk; orchestrrl fabric resume`
    """
    with stderr().status("walking the fibres" if walk else "verifying"):
        request, limit_s = fabric_pb2.VerifyFabricRequest(walk=walk), WALK_TIMEOUT_S if walk else LOOK_TIMEOUT_S
        seen = await answer(client, client.fabric.VerifyFabric, request, limit_s)
    return Output(seen, _verified_view(seen), failure="" if seen["faults"] else None)


def _verified_view(seen: dict[str, Any]) -> View:
    if seen["faults"]:
        columns: Columns = {"fault": lambda each: each["kind"].replace("_", " "), "where": "where", "what": "what"}
        yield table("Faults", columns, seen["faults"])
    yield f"{seen['cross_connects']} cross-connects of the site are up, with {seen['links']} links between ToRs"
    yield f"{seen['fibres']} of {seen['fibres_of_site']} ports have the fibre of the site file"
    yield from (f"not verified: {escape(each)}" for each in seen["not_seen"])
    if not seen["faults"]:
        yield "no faults found"


def _parsed(pairs: Iterable[str], revert_in_s: float | None = None) -> "list[ocs_pb2.CrossConnect]":
    """Return `pairs` as cross-connects. Raises ProblemFaults if a pair is malformed or `revert_in_s` is invalid, with
    an error for each fault."""
    from orchestrrl.rpc.codecs.ocs import PAIR

    parsed, faults = [], []
    for index, text in enumerate(pairs):
        try:
            parsed.append(PAIR.to_pb(CrossConnect.parse(text)))
        except ValueError as error:
            faults.append(f"pairs[{index}]: {error}, got {text!r}")
    if revert_in_s is not None and not 0 < revert_in_s < inf:
        faults.append(f"--revert-in-s: must be a number > 0, got {revert_in_s:g}")
    raise_faults(faults)
    return parsed


def _readable(value: Any) -> Any:
    """Return `value` with each cross-connect in it replaced by text such as `3:17`."""
    match value:
        case {"ingress_port": ingress, "egress_port": egress}:
            return f"{ingress}:{egress}"
        case dict():
            return {name: _readable(each) for name, each in value.items()}
        case list():
            return [_readable(each) for each in value]
    return value


def _outcome(message: "control_pb2.SwitchChange") -> Output:
    """Return the command's output for a change of a switch. If the change was not made, the output includes an error
    message and an exit status."""
    change = _readable(plain(message))
    document = {
        **{name: change[name] for name in ("done", "dry_run", "rolled_back", "detail", "revision")},
        "switch": change["switch_id"],
        "operation": change["operation_id"],
        **{name: change[name] for name in ("evicted", "results", "revert_at_unix_s")},
    }
    failed = f"{change['switch_id']}: {change['detail'] or 'not done'}"
    return Output(document, _change_view(change), None if change["done"] or change["dry_run"] else failed)


def _change_view(change: dict[str, Any]) -> View:
    switch, dry_run, evicted = change["switch_id"], change["dry_run"], change["evicted"]
    title = "would change" if dry_run else "changed" if change["done"] else "attempted"
    columns: Columns = {
        "change": lambda result: f"{result['action']} {result['cross_connect']}",
        "": lambda result: "evicted" if result["action"] == "remove" and result["cross_connect"] in evicted else None,
        "done": lambda result: None if dry_run else "yes" if result["done"] else "NO",
        "commanded": lambda result: duration(result["commanded_s"]),
        "tuned": lambda result: duration(result["tuned_s"]),
        "link up": lambda result: duration(result["link_up_s"]),
        "detail": "detail",
    }
    if change["results"]:
        yield table(f"{switch}: {title}", columns, change["results"])
    if change["done"] or dry_run:
        yield f"{switch}: {change['detail'] or ('not sent' if dry_run else 'done')}"


def _switch_view(message: "control_pb2.Switch", switch: dict[str, Any]) -> View:
    from orchestrrl.rpc.codecs.ocs import UNCONFIRMED

    after_restart = _AFTER_RESTART.get(switch["boot_behaviour"], switch["boot_behaviour"])
    yield "{switch_id}: {vendor} {model}, serial {serial}, software {software}".format(**switch)
    ingress, egress = _range(switch["ingress_ports"]), _range(switch["egress_ports"])
    yield (
        f"{switch['connectivity']}, ingress {ingress}, egress {egress}; moves in "
        f"{duration(switch['reconfiguration_s'])}; circuits after a restart: {after_restart}; "
        f"revision {switch['revision']}"
    )
    if switch["unconfirmed"] is not None:
        yield str(UNCONFIRMED.from_pb(message.unconfirmed))
    yield table("Circuits", CIRCUIT_COLUMNS, switch["circuits"])
    if odd := [port for port in switch["port_states"] if port["state"] != "enabled"]:
        yield table("Ports that cannot be used", {"port": "port", "state": "state", "power dBm": "power_dbm"}, odd)


def _why_not(switch: dict[str, Any]) -> str:
    of_switch = f"{switch['switch_id']}: "
    return f"not usable: {switch['detail'].removeprefix(of_switch)}"


def _summary(switch: dict[str, Any]) -> dict[str, Any]:
    names = ("driver", "reachable", "detail", "vendor", "model", "serial", "software", "connectivity")
    more = ("ports", "reconfiguration_s", "boot_behaviour", "revision")
    return {
        **{name: switch[name] for name in names},
        "switch": switch["switch_id"],
        **{name: switch[name] if switch["reachable"] else None for name in more},
        "cross_connects": switch["cross_connects"],
    }


def _range(ports: dict[str, int]) -> str:
    return f"{ports['first']}..{ports['first'] + ports['count'] - 1}"


def _of_reachable(get: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda switch: get(switch) if switch["reachable"] else None


SWITCH_COLUMNS: Columns = {
    "switch": "switch_id",
    "driver": "driver",
    "vendor": "vendor",
    "model": "model",
    "ports": _of_reachable(lambda switch: switch["ports"]),
    "circuits": _of_reachable(lambda switch: len(switch["cross_connects"])),
    "failed ports": _of_reachable(lambda switch: sum(port["state"] == "failed" for port in switch["port_states"])),
    "moves in": _of_reachable(lambda switch: duration(switch["reconfiguration_s"])),
    "state": lambda switch: "ok" if switch["reachable"] else _why_not(switch),
}
CIRCUIT_COLUMNS: Columns = {
    "ingress:egress": "cross_connect",
    "state": "state",
    "light": lambda circuit: {True: "up", False: "dark", None: None}[circuit["link_up"]],
    "owner": lambda circuit: "daemon" if circuit["ours"] else "other",
}
