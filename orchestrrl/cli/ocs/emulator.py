"""Create the emulated switch of `orchestrrl ocs emulate` from its flags, serve it, and print its events."""

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.text import Text

from ocs_drivers.driver import within
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, Emulator
from ocs_drivers.errors import InvalidOptions
from ocs_drivers.faults import FaultSchedule, parse_schedule
from ocs_drivers.model import BootBehaviour, Connectivity, SwitchFacts
from orchestrrl.cli.command import listen_address
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import choice_faults, fields, number_faults, stdout, yaml_values
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.lab.emulated_switch import EMULATED, PROTOCOLS, driver_of, make_switch

if TYPE_CHECKING:
    from orchestrrl.cli.ocs.emulate import EmulatorFlags

SHOWN_CHARS = 400  # maximum characters shown of a setter


def run(flags: "EmulatorFlags") -> None:
    """Serve the emulated switch until the process receives a stop signal. Raises ProblemFaults if a flag is invalid."""
    wrong: list[str] = []
    schedule = _schedule(flags.faults, wrong)
    panel = _panel(wrong, flags, schedule)
    host, port = listen_address("--listen", flags.listen, flags.allow_remote, wrong)
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
    """Return the reason for a failed bind without the address, which the command's error message already contains."""
    return os.strerror(error.errno) if error.errno is not None and error.filename is None else str(error)


async def _show(device: EmulatedDevice) -> None:
    """Print the device's events and received commands as they occur. Scheduled faults take effect on time, even without
    client requests."""

    def line(at_s: float, kind: str, style: str, text: str) -> None:
        text = " ".join(text.split())  # XML spans several lines
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"
        age_s = at_s - device.switched_on_s
        stdout().print(Text.assemble(f"{age_s:9.3f}  ", (f"{kind:8}", style), shown), soft_wrap=True)

    device.on_setter = lambda command: line(device.clock.now_s(), "setter", "bold", command)
    events = device.listen()
    try:
        while True:
            try:
                event = await within(device.clock, min(device.advance(), 3600.0), events.get())
            except TimeoutError:
                continue
            line(event.at_s, event.kind, "cyan", event.text)
    finally:
        device.unlisten(events)
        device.on_setter = None
        while not events.empty():  # events queued before the end
            event = events.get_nowait()
            line(event.at_s, event.kind, "cyan", event.text)


def _sides(facts: SwitchFacts) -> str:
    ingress, egress = facts.ingress_ports, facts.egress_ports
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        return f"ports {ingress[0]}..{ingress[-1]}, any to any"
    return f"ingress {ingress[0]}..{ingress[-1]}, egress {egress[0]}..{egress[-1]}"


def _configured(protocol: str, address: str) -> str:
    """Return the switch as an item of `ocs` in the daemon's configuration, in YAML flow style."""
    driver, options = driver_of(protocol, address)
    item = {"id": EMULATED, "driver": driver, "options": options}
    return yaml.safe_dump(item, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _made(protocol: str, panel: DevicePanel, quirks: dict[str, Any], wrong: list[str]) -> Emulator | None:
    try:
        return make_switch(protocol, panel, **quirks)
    except InvalidOptions as error:
        if protocol not in PROTOCOLS:
            wrong += choice_faults("--protocol", protocol, PROTOCOLS)
        else:
            wrong += [f"--{'' if fault.startswith('protocol: ') else 'quirk '}{fault}" for fault in error.faults]
        return None


def _panel(wrong: list[str], flags: "EmulatorFlags", schedule: FaultSchedule) -> DevicePanel:
    """Return the parameters of the emulated device. Errors in the flags are appended to `wrong`, and invalid values are
    replaced by valid ones."""
    ingress, cross, egress = flags.ports.partition("x")
    sizes = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in (ingress, egress)]
    if not cross or 0 in sizes:
        wrong.append(f"--ports: must be INGRESSxEGRESS, each 1..99999, got {flags.ports!r}")
        sizes = [1, 1]
    delays_ms = fields(flags, "delay_ms jitter_ms")
    wrong += number_faults("a number >= 0", lambda value: 0 <= value < inf, **delays_ms)
    delay_s, jitter_s = (0.0 if wrong else value / 1000 for value in delays_ms.values())
    return DevicePanel(sizes[0], sizes[1], delay_s, jitter_s, BootBehaviour(flags.boot), flags.seed, schedule)


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
    """Return an error message for each scheduled fault of a port that the device does not have."""
    return [
        f"--faults: port must be one of the device's ({_sides(facts)}), got {fault.port}"
        for _, fault in schedule.due
        if fault.port is not None and fault.port not in facts.ingress_ports and fault.port not in facts.egress_ports
    ]
