"""`orchestrrl ocs conformance`: the suite of all drivers against one's own switch, on ports that one names."""

import logging
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Columns, Output, choice_faults, note, raise_faults, stderr, table, yaml_values
from orchestrrl.cli.running import LEAVE_SIGNALS, until_stopped
from orchestrrl.core.errors import Permanent, ProblemFaults

# Of the device, in errors and tables.
DEVICE = "lab"
# Drivers beside which nothing else can make circuits, and why.
ALONE = {
    "grpc": "what any client of a driver process makes belongs to that process",
    "virtual": "a virtual switch lives in its driver, and each driver has one of its own",
}


@command
def conformance(
    driver: Annotated[
        str, typer.Option(metavar="NAME", help="As in `ocs[].driver`; an unknown name lists the known ones.")
    ],
    ports: Annotated[
        str,
        typer.Option(
            metavar="INGRESS:EGRESS",
            help="At least four on either side, such as 1-4:17-20. Only these are touched; they must be free, and are "
            "free again afterwards.",
        ),
    ],
    address: Annotated[str | None, typer.Option(metavar="HOST[:PORT]", help="Where the switch is.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another option of the driver; repeat it. Values are YAML's; an unknown name lists the known ones.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEST", help="This one only, as the table names it; repeat it.")
    ] = None,
) -> Output:
    """Check that a driver does with your switch what every driver must do.

    It runs by itself, without a daemon, and moves mirrors: use a switch in a lab, or ports that nobody needs. Faults
    that nobody injects into real glass are skipped, and the reason is told. However it ends, Ctrl-C, SIGTERM and SIGHUP
    included, the ports are freed; what could not be freed is named, with the way to do it. Exit status 0: nothing
    failed; 1: something did, or the ports are not free; 2: malformed; 128 and the signal's number: stopped by one.

    Examples:

    `orchestrrl ocs conformance --driver scpi --address 192.0.2.7 --ports 1-4:17-20`

    `orchestrrl ocs conformance --driver virtual --ports 1-4:17-20 --option command_timeout_s=0.5`
    """
    from ocs_drivers.conformance_run import (
        LabConformance,
        LabTestOutcome,
        LabTestState,
        parse_ports,
        run_suite,
        tests_of,
    )
    from ocs_drivers.errors import DriverError, InvalidOptions
    from ocs_drivers.registry import make_driver

    faults: list[str] = []
    options = yaml_values("--option", option or (), faults)
    if address is not None:
        options["target" if driver == "grpc" else "address"] = address
    try:
        pairs = parse_ports(ports)
    except ValueError as error:
        pairs = ()
        faults.append(f"--ports: {error}, got {ports!r}")
    known = [_short(name) for name in tests_of(LabConformance)]
    chosen = [_short(name) for name in only or ()]
    faults += [fault for name in chosen for fault in choice_faults("--only", name, known)]
    make = partial(make_driver, driver, DEVICE, options)
    try:
        make()  # opens nothing
    except InvalidOptions as error:
        faults += [_as_flag(fault) for fault in error.faults]
    raise_faults(faults)
    cannot = {"make_foreign": ALONE[driver]} if driver in ALONE else {}
    suite = LabConformance(make, pairs, cannot)

    logging.getLogger("ocs_drivers").setLevel(logging.ERROR)  # of changes that revert themselves, as they must

    outcomes: list[LabTestOutcome] = []

    async def run() -> None:
        with stderr().status("the first test") as status:
            async with aclosing(run_suite(suite, [f"test_{name}" for name in chosen])) as ended:
                async for outcome in ended:
                    status.update(f"{len(outcomes) + 1} of {len(chosen or known)}: after {_short(outcome.name)}")
                    outcomes.append(outcome)

    def announce_stop() -> None:
        note("stopping: the ports are freed first; Ctrl-C or SIGTERM, a second or more from now, stops that too")

    try:
        stopped_by = until_stopped(run(), LEAVE_SIGNALS, announce_stop)
    except InvalidOptions as error:
        raise ProblemFaults([_as_flag(fault) for fault in error.faults]) from error
    except DriverError as error:
        raise Permanent(str(error)) from error
    finally:
        if suite.leftover:  # before anything else that could fail
            stderr().print(str(suite.leftover), markup=False, soft_wrap=True)
    counts = {state: sum(outcome.state is state for outcome in outcomes) for state in LabTestState}
    document: dict[str, Any] = {
        "driver": driver,
        **{state.value: count for state, count in counts.items()},
        "stopped_by": stopped_by.name if stopped_by is not None else None,
        "left": {name: [str(pair) for pair in getattr(suite.leftover, name)] for name in ("up", "gone")},
        "tests": [asdict(outcome) for outcome in outcomes],
    }
    view = table(f"{driver}: {', '.join(f'{count} {state}' for state, count in counts.items())}", COLUMNS, outcomes)
    if stopped_by is not None:
        freed = "" if suite.leftover else ": the ports are free again"
        return Output(document, view, f"stopped by {stopped_by.name}{freed}", 128 + stopped_by)
    return Output(document, view, failure="" if counts[LabTestState.FAILED] else None)


def _short(name: str) -> str:
    """A test as people call it."""
    return name.removeprefix("test_")


COLUMNS: Columns = {
    "test": lambda outcome: _short(outcome.name),
    "": "state",
    "took": lambda outcome: duration(outcome.elapsed_s),
    "why": "detail",
}


def _as_flag(fault: str) -> str:
    """A fault of the driver's options, by what was typed."""
    for path, flag in (
        ("options.address:", "--address:"),
        ("options.target:", "--address:"),
        ("options.", "--option "),
        ("driver:", "--driver:"),
        ("ports[", "--ports["),
    ):
        if fault.startswith(path):
            return flag + fault.removeprefix(path)
    return fault
