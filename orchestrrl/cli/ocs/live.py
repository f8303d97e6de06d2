"""`orchestrrl ocs`: the optical circuit switches that the daemon drives."""

from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ocs_drivers.model import ChangeMode, CrossConnect
from orchestrrl.cli.control import DaemonOption, call_daemon
from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import control_pb2, ocs_pb2
from orchestrrl.cli.output import EXIT_FAILURE, JsonFlag, print_json, print_table, reporting_errors, stderr, stdout
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

# Robotic patch panels take minutes.
CHANGE_TIMEOUT_S = 1800.0

SwitchArgument = Annotated[str, typer.Argument(metavar="SWITCH", help="The switch's id, as in the daemon's config.")]
PairsArgument = Annotated[
    list[str], typer.Argument(metavar="INGRESS:EGRESS...", help="Port numbers as the device numbers them.")
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change, evictions included; send nothing.")
]

RevertOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Undo it by itself so long after it was carried out, unless `orchestrrl ocs confirm` keeps it.",
    ),
]

_AFTER_RESTART = {"dark": "gone", "restore": "restored", "unknown": "not known"}

Change = Callable[["ControlClient"], Coroutine[Any, Any, "control_pb2.SwitchChange"]]


def list_switches(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """List the switches: what they are, and whether they answer.

    Example: `orchestrrl ocs list`
    """
    request = control_pb2.ListSwitchesRequest()
    switches = call_daemon(daemon, lambda client: client.call(client.switches.ListSwitches, request)).switches
    if as_json:
        print_json({"switches": [_summary(switch) for switch in switches]})
        return
    columns = ("switch", "driver", "vendor", "model", "ports", "circuits", "failed ports", "moves in", "state")
    print_table("Optical circuit switches", columns, [_row(switch) for switch in switches], left=("state",))


def show_switch(switch: SwitchArgument, daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Show one switch: its circuits with their state, and the ports that are not as they should be.

    Example: `orchestrrl ocs show ocs1`
    """
    request = control_pb2.ShowSwitchRequest(switch_id=switch)
    shown = call_daemon(daemon, lambda client: client.call(client.switches.ShowSwitch, request))
    if as_json:
        ports = [{"port": p.port, "state": p.state, "power_dbm": _optional(p, "power_dbm")} for p in shown.port_states]
        circuits = [_circuit(circuit) for circuit in shown.circuits]
        print_json({**_summary(shown), "circuits": circuits, "ports": ports, "unconfirmed": _unconfirmed(shown)})
    elif shown.reachable:
        _print_switch(shown)
    if not shown.reachable:
        stderr().print(f"{switch} is {_why_not(shown)}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILURE)


def connect(
    switch: SwitchArgument,
    pairs: PairsArgument,
    mode: Annotated[
        ChangeMode,
        typer.Option(
            help="`safe` refuses if a port is in use; `update` evicts the circuits in the way; "
            "`overwrite` evicts every circuit that is not named."
        ),
    ] = ChangeMode.SAFE,
    revert_in_s: RevertOption = None,
    dry_run: DryRunFlag = False,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Connect ports, all of them or none.

    It is your order, so it is carried out in mode `advise` too: that mode binds the daemon's own decisions. What has to
    be evicted is shown first; if the switch has changed by the time of sending, nothing is sent. What does not take is
    tried once more and then rolled back. Circuits that are not ours are never evicted. Exit status 0: done; 1: refused,
    or rolled back; 2: malformed.

    Examples:

    `orchestrrl ocs connect ocs1 3:17 5:19`

    `orchestrrl ocs connect ocs1 3:17 --mode update --dry-run`

    `orchestrrl ocs connect ocs1 3:17 --revert-in-s 60`
    """
    wanted = _parsed(pairs, revert_in_s)

    def request(**more: Any) -> "control_pb2.ConnectPortsRequest":
        return control_pb2.ConnectPortsRequest(
            switch_id=switch, cross_connects=wanted, mode=mode, revert_in_s=revert_in_s, **more
        )

    async def order(client: "ControlClient") -> "control_pb2.SwitchChange":
        if mode is ChangeMode.SAFE and not dry_run:
            return await client.call(client.switches.ConnectPorts, request(), CHANGE_TIMEOUT_S)
        plan = await client.call(client.switches.ConnectPorts, request(dry_run=True))
        if dry_run:
            return plan
        if plan.evicted:
            stderr().print(f"{switch}: evicting {_listed(plan.evicted)}")
        return await client.call(client.switches.ConnectPorts, request(expect_revision=plan.revision), CHANGE_TIMEOUT_S)

    _report(_waiting(daemon, switch, order), as_json)


def disconnect(
    switch: SwitchArgument,
    pairs: PairsArgument,
    revert_in_s: RevertOption = None,
    dry_run: DryRunFlag = False,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Disconnect ports. Each pair must name the circuit as it is; one that is gone already is no fault.

    It is your order, so it is carried out in mode `advise` too.

    Example: `orchestrrl ocs disconnect ocs1 3:17 5:19`
    """
    request = control_pb2.DisconnectPortsRequest(
        switch_id=switch, cross_connects=_parsed(pairs, revert_in_s), dry_run=dry_run, revert_in_s=revert_in_s
    )

    async def order(client: "ControlClient") -> "control_pb2.SwitchChange":
        return await client.call(client.switches.DisconnectPorts, request, CHANGE_TIMEOUT_S)

    _report(_waiting(daemon, switch, order), as_json)


def confirm(switch: SwitchArgument, daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Keep what was changed with --revert-in-s. Exit status 1 where nothing is on trial, or it was undone already.

    Example: `orchestrrl ocs confirm ocs1`
    """
    request = control_pb2.ConfirmPortsRequest(switch_id=switch)

    async def order(client: "ControlClient") -> "control_pb2.SwitchChange":
        return await client.call(client.switches.ConfirmPorts, request, CHANGE_TIMEOUT_S)

    _report(call_daemon(daemon, order), as_json)


def take_over(
    switch: SwitchArgument, pairs: PairsArgument, daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False
) -> None:
    """Make circuits ours that somebody else made. From then on they may be evicted and taken down.

    Nothing is sent to the switch. Each pair must name a circuit as it is; with one that is not there, none is taken
    over.

    Example: `orchestrrl ocs take-over ocs1 3:17`
    """
    request = control_pb2.TakeOverPortsRequest(switch_id=switch, cross_connects=_parsed(pairs))

    async def order(client: "ControlClient") -> "control_pb2.SwitchChange":
        return await client.call(client.switches.TakeOverPorts, request, CHANGE_TIMEOUT_S)

    _report(call_daemon(daemon, order), as_json)


def register(app: typer.Typer) -> None:
    ocs = group(app, "ocs")
    ocs.command("list")(list_switches)
    ocs.command("show")(show_switch)
    ocs.command("connect")(connect)
    ocs.command("disconnect")(disconnect)
    ocs.command("confirm")(confirm)
    ocs.command("take-over")(take_over)


def _parsed(pairs: Iterable[str], revert_in_s: float | None = None) -> "list[ocs_pb2.CrossConnect]":
    from orchestrrl.rpc.codecs.ocs import pair_to_pb

    """The arguments as cross-connects, or every fault of them at once."""
    parsed, faults = [], []
    for index, text in enumerate(pairs):
        try:
            parsed.append(pair_to_pb(CrossConnect.parse(text)))
        except ValueError as error:
            faults.append(f"pairs[{index}]: {error}, got {text!r}")
    if revert_in_s is not None and not 0 < revert_in_s < inf:
        faults.append(f"--revert-in-s: must be a number > 0, got {revert_in_s:g}")
    with reporting_errors():
        if faults:
            raise ProblemFaults(faults)
    return parsed


def _waiting(daemon: str, switch: str, order: Change) -> "control_pb2.SwitchChange":
    with stderr().status(f"{switch}: moving mirrors"):
        return call_daemon(daemon, order)


def _report(change: "control_pb2.SwitchChange", as_json: bool) -> None:
    """What became of a change; exit status 1 if it was not done."""
    if as_json:
        print_json(_change(change))
    else:
        _print_change(change)
    if not change.done and not change.dry_run:
        raise typer.Exit(EXIT_FAILURE)


def _print_change(change: "control_pb2.SwitchChange") -> None:
    title = "would change" if change.dry_run else "changed" if change.done else "tried"
    evicted = {_text(pair) for pair in change.evicted}
    if change.results:
        rows = [
            (
                f"{result.action} {_text(result.cross_connect)}",
                "evicted" if _text(result.cross_connect) in evicted and result.action == "remove" else "",
                None if change.dry_run else "yes" if result.done else "NO",
                *(_time(_optional(result, name)) for name in ("commanded_s", "tuned_s", "link_up_s")),
                result.detail,
            )
            for result in change.results
        ]
        print_table(
            f"{change.switch_id}: {title}",
            ("change", "", "done", "commanded", "tuned", "link up", "detail"),
            rows,
            left=("detail",),
        )
    if change.done or change.dry_run:
        stdout().print(f"{change.switch_id}: {change.detail or ('not sent' if change.dry_run else 'done')}")
    else:
        stderr().print(f"{change.switch_id}: {change.detail or 'not done'}")


def _print_switch(switch: "control_pb2.Switch") -> None:
    from orchestrrl.rpc.codecs.ocs import unconfirmed_from_pb

    after_restart = _AFTER_RESTART.get(switch.boot_behaviour, switch.boot_behaviour)
    stdout().print(
        f"{switch.switch_id}: {switch.vendor} {switch.model}, serial {switch.serial}, software {switch.software}\n"
        f"{switch.connectivity}, ingress {_range(switch.ingress_ports)}, egress {_range(switch.egress_ports)}; "
        f"moves in {duration(switch.reconfiguration_s)}; circuits after a restart: {after_restart}; "
        f"revision {switch.revision}"
    )
    if switch.HasField("unconfirmed"):
        stdout().print(str(unconfirmed_from_pb(switch)))
    circuits = [
        (_text(c.cross_connect), _state(c), _link(c), "ours" if c.ours else "not ours") for c in switch.circuits
    ]
    print_table("Circuits", ("ingress:egress", "state", "light", "whose"), circuits)
    odd = [port for port in switch.port_states if port.state != "enabled"]
    if odd:
        ports = [(port.port, port.state, _optional(port, "power_dbm")) for port in odd]
        print_table("Ports that cannot be used", ("port", "state", "power dBm"), ports)


def _row(switch: "control_pb2.Switch") -> tuple[object, ...]:
    if not switch.reachable:
        return (switch.switch_id, switch.driver, None, None, None, None, None, None, _why_not(switch))
    failed = sum(port.state == "failed" for port in switch.port_states)
    return (
        switch.switch_id,
        switch.driver,
        switch.vendor,
        switch.model,
        switch.ports,
        len(switch.cross_connects),
        failed,
        duration(switch.reconfiguration_s),
        "ok",
    )


def _why_not(switch: "control_pb2.Switch") -> str:
    return f"not usable: {switch.detail.removeprefix(f'{switch.switch_id}: ')}"


def _summary(switch: "control_pb2.Switch") -> dict[str, Any]:
    names = ("switch_id", "driver", "reachable", "detail", "vendor", "model", "serial", "software", "connectivity")
    more = ("ports", "reconfiguration_s", "boot_behaviour", "revision")
    return {
        **{name.removesuffix("_id"): getattr(switch, name) for name in names},
        **{name: getattr(switch, name) if switch.reachable else None for name in more},
        "cross_connects": [_text(pair) for pair in switch.cross_connects],
    }


def _change(change: "control_pb2.SwitchChange") -> dict[str, Any]:
    return {
        "switch": change.switch_id,
        "done": change.done,
        "dry_run": change.dry_run,
        "rolled_back": change.rolled_back,
        "detail": change.detail,
        "evicted": [_text(pair) for pair in change.evicted],
        "results": [
            {
                "cross_connect": _text(result.cross_connect),
                "action": result.action,
                "done": result.done,
                "detail": result.detail,
                **{name: _optional(result, name) for name in ("commanded_s", "tuned_s", "link_up_s")},
            }
            for result in change.results
        ],
        "revision": change.revision,
        "revert_at_unix_s": _optional(change, "revert_at_unix_s"),
        "operation": change.operation_id,
    }


def _state(circuit: "ocs_pb2.Circuit") -> str | None:
    words = {
        ocs_pb2.CIRCUIT_STATE_TUNING: "tuning",
        ocs_pb2.CIRCUIT_STATE_TUNED: "tuned",
        ocs_pb2.CIRCUIT_STATE_FAILED: "failed",
    }
    return words.get(circuit.state)


def _circuit(circuit: "ocs_pb2.Circuit") -> dict[str, Any]:
    return {
        "cross_connect": _text(circuit.cross_connect),
        "state": _state(circuit),
        "link_up": _optional(circuit, "link_up"),
        "ours": circuit.ours,
    }


def _unconfirmed(switch: "control_pb2.Switch") -> dict[str, Any] | None:
    """What is on trial there."""
    if not switch.HasField("unconfirmed"):
        return None
    trial = switch.unconfirmed
    return {
        "until_unix_s": _optional(trial, "until_unix_s"),
        "removed": [_text(pair) for pair in trial.removed],
        "added": [_text(pair) for pair in trial.added],
        "failure": trial.failure,
    }


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _text(pair: "ocs_pb2.CrossConnect") -> str:
    return f"{pair.ingress_port}:{pair.egress_port}"


def _listed(pairs: "Iterable[ocs_pb2.CrossConnect]") -> str:
    return " ".join(_text(pair) for pair in pairs)


def _range(ports: "ocs_pb2.PortNumbers") -> str:
    return f"{ports.first}..{ports.first + ports.count - 1}"


def _time(value_s: float | None) -> str | None:
    return None if value_s is None else duration(value_s)


def _link(circuit: "ocs_pb2.Circuit") -> str | None:
    return None if not circuit.HasField("link_up") else "up" if circuit.link_up else "dark"
