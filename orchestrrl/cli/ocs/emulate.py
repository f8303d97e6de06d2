"""`orchestrrl ocs emulate`: serve an emulated switch with a real protocol, to test drivers, sites and faults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ocs_drivers.emulators.registry import EMULATORS
from orchestrrl.cli.command import with_flags

PROTOCOLS = (*sorted(EMULATORS), "grpc")


@dataclass(frozen=True, kw_only=True)
class EmulatorFlags:
    """The options of `orchestrrl ocs emulate`, before validation."""

    protocol: Annotated[str, typer.Option(metavar="NAME", help=f"Protocol of the switch: {', '.join(PROTOCOLS)}.")] = (
        "scpi"
    )
    ports: Annotated[str, typer.Option(metavar="INGRESSxEGRESS", help="Number of ports on each side.")] = "32x32"
    delay_ms: Annotated[float, typer.Option(help="Milliseconds to move the mirrors of a circuit.")] = 25.0
    jitter_ms: Annotated[float, typer.Option(help="Maximum additional delay in milliseconds, at random.")] = 0.0
    boot: Annotated[Literal["dark", "restore"], typer.Option(help="State of the circuits after a restart.")] = "dark"
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on. Port 0 selects a free port.")
    ] = "127.0.0.1:0"
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote", help="Allow a --listen other than loopback. Any client can then change circuits."
        ),
    ] = False
    faults: Annotated[
        Path | None,
        typer.Option(help="YAML schedule of faults: a list of at_s, kind, and port, items, silent or delay_s."),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of the jitter.")] = 0
    quirk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A quirk of the device. Can be repeated. An unknown name lists the known ones."
        ),
    ] = None


@with_flags(EmulatorFlags)
def emulate(flags: EmulatorFlags) -> None:
    """Serve an emulated switch until SIGTERM. The first lines of output are its address and its configuration.

    The following lines are the setters (commands that change the switch) that it receives and their effects, with the
    time in seconds since power-on. A schedule of faults has the form `[{at_s: 12, kind: fail_port, port: 7}, {at_s: 20,
    kind: restart}]`. The kinds of faults are fail_port, disable_port, mend_port, stick_mirror, unplug, partial_commit,
    drop_connection, drop_command, slow_answer and restart.

    Examples:

    `orchestrrl ocs emulate --protocol scpi --ports 32x32 --delay-ms 25`

    `orchestrrl ocs emulate --protocol scpi-dicon --quirk one_session=true --faults faults.yaml`
    """
    from orchestrrl.cli.ocs.emulator import run

    run(flags)
