"""`orchestrrl ocs conformance`: run the drivers' conformance suite against a switch, on ports that the operator
chooses."""

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

# The name of the device in errors and tables.
DEVICE = "lab"
# Drivers whose circuits cannot be made by another client, and the reason.
ALONE = {
    "grpc": "circuits made by any client of a driver process belong to that process",
    "virtual": "each driver has its own virtual switch",
}


@command
def conformance(
    driver: Annotated[
        str, typer.Option(metavar="NAME", help="The driver, as in `ocs[].driver`. An unknown name lists known ones.")
    ],
    free_ports: Annotated[
        str,
        typer.Option(
            metavar="INGRESS:EGRESS",
            help="At least four free ports on each side, such as 1-4:17-20. Only these are used, and they are freed "
            "at the end.",
        ),
    ],
    address: Annotated[str | None, typer.Option(metavar="HOST[:PORT]", help="Address of the switch.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the driver, with a YAML value. Can be repeated. An unknown name lists the known ones.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this test of the table. Can be repeated.")
    ] = None,
) -> Output:
    """Run the drivers' conformance suite against your switch.

    The suite runs without a daemon. It moves mirrors, so use a switch in a lab, or unused ports. Tests that inject
    faults which a real switch cannot simulate are skipped, and the reason is printed. The ports are freed at the end,
    even after Ctrl-C, SIGTERM or SIGHUP. Circuits that could not be removed are listed with instructions. The exit
    status is 0 if no test failed, 1 if a test failed or the ports are in use, and 2 for invalid options. After a
    signal, it is 128 plus the signal number.

    Examples:

    `orchestrrl ocs conformance --driver scpi --address 192.0.2.7 --free-ports 1-4:17-20`

    `orchestrrl ocs conformance --driver virtual --free-ports 1-4:17-20 --option command_timeout_s=0.5`
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
        pairs = parse_ports(free_ports)
    except ValueError as error:
        pairs = ()
        faults.append(f"--free-ports: {error}, got {free_ports!r}")
    known = [_short(name) for name in tests_of(LabConformance)]
    chosen = [_short(name) for name in only or ()]
    faults += [fault for name in chosen for fault in choice_faults("--only", name, known)]
    make = partial(make_driver, driver, DEVICE, options)
    try:
        make()  # opens no connection
    except InvalidOptions as error:
        faults += [_as_flag(fault) for fault in error.faults]
    raise_faults(faults)
    cannot = {"make_foreign": ALONE[driver]} if driver in ALONE else {}
    suite = LabConformance(make, pairs, cannot)

    logging.getLogger("ocs_drivers").setLevel(logging.ERROR)  # no warnings on changes that revert as tested

    outcomes: list[LabTestOutcome] = []

    async def run() -> None:
        with stderr().status("the first test") as status:
            async with aclosing(run_suite(suite, [f"test_{name}" for name in chosen])) as ended:
                async for outcome in ended:
                    status.update(f"{len(outcomes) + 1} of {len(chosen or known)}: after {_short(outcome.name)}")
                    outcomes.append(outcome)

    def announce_stop() -> None:
        note("stopping: freeing the ports first; press Ctrl-C again after one second to stop immediately")

    try:
        stopped_by = until_stopped(run(), LEAVE_SIGNALS, announce_stop)
    except InvalidOptions as error:
        raise ProblemFaults([_as_flag(fault) for fault in error.faults]) from error
    except DriverError as error:
        raise Permanent(str(error)) from error
    finally:
        if suite.leftover:  # printed first, because later code could fail
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
        freed = "" if suite.leftover else ": the ports are freed"
        return Output(document, view, f"stopped by {stopped_by.name}{freed}", 128 + stopped_by)
    return Output(document, view, failure="" if counts[LabTestState.FAILED] else None)


def _short(name: str) -> str:
    """Return the name of a test without its prefix `test_`."""
    return name.removeprefix("test_")


COLUMNS: Columns = {
    "test": lambda outcome: _short(outcome.name),
    "": "state",
    "took": lambda outcome: duration(outcome.elapsed_s),
    "why": "detail",
}


def _as_flag(fault: str) -> str:
    """Return an error in the driver's options with its path replaced by the command-line flag."""
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
