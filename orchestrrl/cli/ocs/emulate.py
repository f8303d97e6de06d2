"""`orchestrrl ocs emulate`: a switch that speaks a protocol of real ones, to try drivers, sites and faults on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ocs_drivers.emulators.registry import EMULATORS
from orchestrrl.cli.command import with_flags

PROTOCOLS = (*sorted(EMULATORS), "grpc")


@dataclass(frozen=True, kw_only=True)
class EmulatorFlags:
    """The options of `orchestrrl ocs emulate`, as they are given."""

    protocol: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(PROTOCOLS)}.")] = "scpi"
    ports: Annotated[str, typer.Option(metavar="INGRESSxEGRESS", help="How many on each side.")] = "32x32"
    delay_ms: Annotated[float, typer.Option(help="What it takes to move the mirrors of a circuit.")] = 25.0
    jitter_ms: Annotated[float, typer.Option(help="At most so much more, at random.")] = 0.0
    boot: Annotated[Literal["dark", "restore"], typer.Option(help="What becomes of circuits when it restarts.")] = (
        "dark"
    )
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")] = "127.0.0.1:0"
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Permit a --listen that is not loopback: anybody may move circuits.")
    ] = False
    faults: Annotated[
        Path | None,
        typer.Option(help="YAML with what goes wrong when: a list of at_s, kind, and port, items, silent or delay_s."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0
    quirk: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A peculiarity; repeat it. An unknown name lists the known ones."),
    ] = None


@with_flags(EmulatorFlags)
def emulate(flags: EmulatorFlags) -> None:
    """Serve an emulated switch until SIGTERM. Its address is the first line of output, then how to configure it.

    What follows are the setters that it is sent and what becomes of them, as they come, in seconds since it was
    switched on. A fault is written as `[{at_s: 12, kind: fail_port, port: 7}, {at_s: 20, kind: restart}]`; its kinds
    are fail_port, disable_port, mend_port, stick_mirror, unplug, partial_commit, drop_connection, drop_command,
    slow_answer and restart.

    Examples:

    `orchestrrl ocs emulate --protocol scpi --ports 32x32 --delay-ms 25`

    `orchestrrl ocs emulate --protocol scpi-dicon --quirk one_session=true --faults faults.yaml`
    """
    from orchestrrl.cli.ocs.emulator import run

    run(flags)
