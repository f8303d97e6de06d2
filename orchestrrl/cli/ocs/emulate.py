"""`orchestrrl ocs emulate`: a switch that speaks a protocol of real ones, to try drivers, sites and faults on."""

import os
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from ocs_drivers.driver import within
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, Emulator
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.errors import InvalidOptions
from ocs_drivers.faults import FaultSchedule, parse_schedule
from ocs_drivers.model import BootBehaviour, Connectivity, SwitchFacts
from orchestrrl.cli.command import with_flags
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import fields, number_faults, stdout, yaml_values
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.addresses import remote_fault
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.lab.emulated_switch import EMULATED, GRPC, PROTOCOLS, GrpcEmulator, driver_of

SHOWN_CHARS = 400  # of a setter, when it is shown


class Boot(StrEnum):
    DARK = "dark"
    RESTORE = "restore"


@dataclass(frozen=True, kw_only=True)
class EmulatorFlags:
    """The options of `orchestrrl ocs emulate`, as they are given."""

    protocol: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(PROTOCOLS)}.")] = "scpi"
    ports: Annotated[str, typer.Option(metavar="INGRESSxEGRESS", help="How many on each side.")] = "32x32"
    delay_ms: Annotated[float, typer.Option(help="What it takes to move the mirrors of a circuit.")] = 25.0
    jitter_ms: Annotated[float, typer.Option(help="At most so much more, at random.")] = 0.0
    boot: Annotated[Boot, typer.Option(help="What becomes of circuits when it restarts.")] = Boot.DARK
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
    wrong: list[str] = []
    schedule = _schedule(flags.faults, wrong)
    panel = _panel(wrong, flags, schedule)
    host, port = _address(flags.listen, flags.allow_remote, wrong)
    emulator = _made(flags.protocol, panel, yaml_values("--quirk", flags.quirk or (), wrong), wrong)
    if emulator is not None:
        wrong += _beyond(schedule, emulator.device.facts)
    if wrong or emulator is None:
        raise ProblemFaults(wrong)
    until_stopped(_serve(emulator, flags.protocol, host, port))


async def _serve(emulator: Emulator, protocol: str, host: str, port: int) -> None:
    try:
        address = await emulator.start(host, port)
    except OSError as error:
        raise Permanent(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    try:
        facts = emulator.device.facts
        device = f"{facts.vendor} {facts.model}, {_sides(facts)}, moves in {duration(facts.reconfiguration_s)}"
        for text in (address, f"# {device}", f"ocs: [{_configured(protocol, address)}]"):
            stdout().print(text, markup=False, soft_wrap=True)
        await _show(emulator.device)
    finally:
        await emulator.stop()


def _reason(error: OSError) -> str:
    """Of a failed bind, without the address that is said already."""
    return os.strerror(error.errno) if error.errno is not None and error.filename is None else str(error)


async def _show(device: EmulatedDevice) -> None:
    """What happens, as it comes. What the schedule has due comes about even if nobody else is asking."""

    def line(at_s: float, kind: str, style: str, text: str) -> None:
        text = " ".join(text.split())  # XML comes in lines
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"
        age_s = at_s - device.switched_on_s
        stdout().print(Text.assemble(f"{age_s:9.3f}  ", (f"{kind:8}", style), shown), soft_wrap=True)

    device.on_setter = lambda command: line(device.clock.now_s(), "setter", "bold", command)
    events = device.model.listen()
    try:
        while True:
            try:
                event = await within(device.clock, min(device.model.advance(), 3600.0), events.get())
            except TimeoutError:
                continue
            line(event.at_s, event.kind, "cyan", event.text)
    finally:
        device.model.unlisten(events)
        device.on_setter = None
        while not events.empty():  # what happened before the end
            event = events.get_nowait()
            line(event.at_s, event.kind, "cyan", event.text)


def _sides(facts: SwitchFacts) -> str:
    ingress, egress = facts.ingress_ports, facts.egress_ports
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        return f"ports {ingress[0]}..{ingress[-1]}, any to any"
    return f"ingress {ingress[0]}..{ingress[-1]}, egress {egress[0]}..{egress[-1]}"


def _configured(protocol: str, address: str) -> str:
    """The switch as an item of the configuration's `ocs`, in YAML's short form."""
    driver, options = driver_of(protocol, address)
    item = {"id": EMULATED, "driver": driver, "options": options}
    return yaml.safe_dump(item, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _made(protocol: str, panel: DevicePanel, quirks: dict[str, Any], wrong: list[str]) -> Emulator | None:
    try:
        if protocol == GRPC:
            if quirks:
                raise InvalidOptions([f"{name}: grpc has no quirks" for name in quirks])
            return GrpcEmulator(panel)
        return make_emulator(protocol, panel, **quirks)
    except InvalidOptions as error:
        if protocol not in PROTOCOLS:
            wrong.append(f"--protocol: must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
        else:
            wrong += [f"--{'' if fault.startswith('protocol: ') else 'quirk '}{fault}" for fault in error.faults]
        return None


def _panel(wrong: list[str], flags: EmulatorFlags, schedule: FaultSchedule) -> DevicePanel:
    """What is wrong is replaced by the default, so that the rest can be looked at."""
    ingress, cross, egress = flags.ports.partition("x")
    sizes = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in (ingress, egress)]
    if not cross or 0 in sizes:
        wrong.append(f"--ports: must be INGRESSxEGRESS, each 1..99999, got {flags.ports!r}")
        sizes = [1, 1]
    delays_ms = fields(flags, "delay_ms jitter_ms")
    wrong += number_faults("a number >= 0", lambda value: 0 <= value < inf, **delays_ms)
    delay_s, jitter_s = (0.0 if wrong else value / 1000 for value in delays_ms.values())
    return DevicePanel(sizes[0], sizes[1], delay_s, jitter_s, BootBehaviour(flags.boot), flags.seed, schedule)


def _address(listen: str, allow_remote: bool, wrong: list[str]) -> tuple[str, int]:
    host, _, digits = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not digits.isdecimal() or int(digits) > 65535:
        wrong.append(f"--listen: must be HOST:PORT, got {listen!r}")
        return "127.0.0.1", 0
    if not allow_remote and (fault := remote_fault(host, "add --allow-remote")):
        wrong.append(f"--listen: {fault}, got {listen!r}")
    return host, int(digits)


def _schedule(path: Path | None, wrong: list[str]) -> FaultSchedule:
    if path is None:
        return FaultSchedule()
    try:
        schedule, faults = parse_schedule(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        wrong.append(f"--faults: cannot be read: {error}")
        return FaultSchedule()
    wrong += [f"--{fault}" for fault in faults]
    return schedule


def _beyond(schedule: FaultSchedule, facts: SwitchFacts) -> list[str]:
    """Faults of ports that the device does not have."""
    return [
        f"--faults: port must be one of the device's ({_sides(facts)}), got {fault.port}"
        for _, fault in schedule.due
        if fault.port is not None and fault.port not in facts.ingress_ports and fault.port not in facts.egress_ports
    ]
