"""`orchestrrl ocs conformance`: the suite of all drivers against one's own switch, on ports that one names."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import EXIT_FAILURE, JsonFlag, fail, print_json, print_table, reporting_errors, stderr
from orchestrrl.cli.running import LEAVE_SIGNALS, until_stopped
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from ocs_drivers.base import OcsDriver

# Of the device, in errors and tables.
DEVICE = "lab"
OF_THE_PROCESS = {"make_foreign": "what any client of a driver process makes belongs to that process"}


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
    as_json: JsonFlag = False,
) -> None:
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
        VirtualConformance,
        parse_ports,
        run_suite,
        tests_of,
    )
    from ocs_drivers.errors import DriverError, InvalidOptions

    faults: list[str] = []
    options = _options(option or (), faults)
    if address is not None:
        options["target" if driver == "grpc" else "address"] = address
    try:
        pairs = parse_ports(ports)
    except ValueError as error:
        pairs = ()
        faults.append(f"--ports: {error}, got {ports!r}")
    known = [_short(name) for name in tests_of(LabConformance(partial(_made, driver, options), pairs))]
    chosen = [_short(name) for name in only or ()]
    faults += [f"--only: must be one of {', '.join(known)}, got {name!r}" for name in chosen if name not in known]
    with reporting_errors():
        try:
            _made(driver, options)  # opens nothing
        except InvalidOptions as error:
            faults += [_as_flag(fault) for fault in error.faults]
        if faults:
            raise ProblemFaults(faults)
    suite: LabConformance
    if driver == "virtual":
        sides = 1 if options.get("connectivity") == "any_to_any" else 2
        suite = VirtualConformance(
            partial(_made, driver, options), pairs, lambda size: _made(driver, {**options, "ports": size * sides})
        )
    else:
        suite = LabConformance(partial(_made, driver, options), pairs, OF_THE_PROCESS if driver == "grpc" else None)

    logging.getLogger("ocs_drivers").setLevel(logging.ERROR)  # of changes that revert themselves, as they must

    outcomes: list[LabTestOutcome] = []

    async def run() -> None:
        with stderr().status("the first test") as status:
            async with aclosing(run_suite(suite, [f"test_{name}" for name in chosen])) as ended:
                async for outcome in ended:
                    status.update(f"{len(outcomes) + 1} of {len(chosen or known)}: after {_short(outcome.name)}")
                    outcomes.append(outcome)

    def announce_stop() -> None:
        stderr().print(
            "stopping: the ports are freed first; Ctrl-C or SIGTERM, a second or more from now, stops that too"
        )

    stopped_by, stop = None, ""
    try:
        stopped_by = until_stopped(run(), LEAVE_SIGNALS, announce_stop)
    except InvalidOptions as error:
        with reporting_errors():
            raise ProblemFaults([_as_flag(fault) for fault in error.faults]) from error
    except DriverError as error:
        stop = str(error)
    finally:
        if suite.leftover:  # before anything else that could fail
            stderr().print(str(suite.leftover), markup=False, soft_wrap=True)
    if stop:
        fail(stop)
    counts = {state: sum(outcome.state is state for outcome in outcomes) for state in LabTestState}
    if as_json:
        left = {name: [str(pair) for pair in getattr(suite.leftover, name)] for name in ("up", "gone")}
        signal_name = stopped_by.name if stopped_by is not None else None
        tests = [asdict(outcome) for outcome in outcomes]
        print_json({"driver": driver, **counts, "stopped_by": signal_name, "left": left, "tests": tests})
    else:
        rows = [(_short(each.name), each.state, duration(each.elapsed_s), each.detail) for each in outcomes]
        title = f"{driver}: {', '.join(f'{count} {state}' for state, count in counts.items())}"
        print_table(title, ("test", "", "took", "why"), rows, left=("", "why"))
    if stopped_by is not None:
        fail(f"stopped by {stopped_by.name}{'' if suite.leftover else ': the ports are free again'}", 128 + stopped_by)
    if counts[LabTestState.FAILED]:
        raise typer.Exit(EXIT_FAILURE)


def register(app: typer.Typer) -> None:
    group(app, "ocs").command("conformance")(conformance)


def _short(name: str) -> str:
    """A test as people call it."""
    return name.removeprefix("test_")


def _as_flag(fault: str) -> str:
    """A fault of the driver's options, by what was typed."""
    for path, flag in (
        ("options.address:", "--address:"),
        ("options.target:", "--address:"),
        ("options.", "--option "),
        ("driver:", "--driver:"),
        ("ports:", "--ports:"),
    ):
        if fault.startswith(path):
            return flag + fault.removeprefix(path)
    return fault


def _made(driver: str, options: dict[str, Any]) -> "OcsDriver":
    from ocs_drivers.registry import make_driver

    return make_driver(driver, DEVICE, options)


def _options(given: Sequence[str], faults: list[str]) -> dict[str, Any]:
    import yaml

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals or not name.isidentifier():
                raise ValueError("must be NAME=VALUE")
            options[name] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError) as error:
            faults.append(f"--option: {error}, got {text!r}")
    return options
