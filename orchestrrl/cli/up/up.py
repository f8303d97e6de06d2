"""`orchestrrl up`: run a daemon, a gateway and an agent on one machine, and keep them running."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from socket import gethostname
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrrl.cli.command import DAEMON_VARIABLE, listen_address, with_flags
from orchestrrl.cli.daemon import NO_CONFIG, ConfigOption, ModeOverride
from orchestrrl.cli.gateway import GatewayFlags, ServingFlags
from orchestrrl.cli.output import print_line, raise_faults
from orchestrrl.cli.running import LEAVE_SIGNALS, until_stopped
from orchestrrl.core.addresses import http_url

if TYPE_CHECKING:
    from planner.model import EngineId

NAME_CHARACTERS = len("gateway")


@dataclass(frozen=True, kw_only=True)
class UpFlags(ServingFlags):
    """The options of `orchestrrl up`, before validation."""

    config: ConfigOption = NO_CONFIG
    mode: ModeOverride = None
    daemon: Annotated[
        str | None,
        typer.Option(
            "--daemon",
            envvar=DAEMON_VARIABLE,
            metavar="ADDRESS",
            help="Daemon address: HOST:PORT. Default: `listen.address` of the file.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses on which the gateway and the daemon listen."""

    gateway: str
    daemon: str


@with_flags(UpFlags)
def up(flags: UpFlags) -> None:
    """Run a daemon, a gateway and an agent on this machine, as separate processes, and restart those that end.

    Requests continue while the daemon or the agent is down. The engines may start later. Without `--config`, the daemon
    runs in mode advise and keeps its journal in the working folder. The log of all processes is written to standard
    error.

    On SIGTERM or Ctrl-C, running requests have `--drain-s` seconds to finish, and the exit status is 0. The exit status
    is 1 if a process cannot be kept running. If this command is killed, the processes exit in the same way.

    Example: `orchestrrl up --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002`
    """
    # Imported here so that help and completion are fast.
    from orchestrrl.core.engine_arguments import parse_engines

    addresses = _free_addresses(flags)
    engines = parse_engines(flags.engines or [], [])
    print_line(f"gateway: http://{addresses.gateway}")
    print_line(f"daemon: {addresses.daemon}")
    until_stopped(_run(replace(flags, listen=addresses.gateway), addresses.daemon, engines), LEAVE_SIGNALS)


def _free_addresses(flags: UpFlags) -> Addresses:
    """Return the addresses to listen on, with free ports in place of port 0. Raises ProblemFaults if flags or the
    configuration file are invalid, and Permanent if a port is in use."""
    from orchestrrl.cli.gateway_options import read_options
    from orchestrrl.core.config.schema import Config
    from orchestrrl.core.errors import ProblemFaults
    from orchestrrl.daemon.configuration import load_config
    from orchestrrl.gateway.service import check_free, listening

    faults: list[str] = []
    config = Config()
    try:
        config = load_config(flags.config, with_parts=True)
    except ProblemFaults as error:
        faults += error.faults
    try:
        serving = {each.name: getattr(flags, each.name) for each in fields(ServingFlags)}
        options = read_options(GatewayFlags(**serving, daemon=config.listen.address))
    except ProblemFaults as error:
        faults += error.faults
    allow_remote = flags.allow_remote or config.listen.allow_remote
    host, port = listen_address("--daemon", flags.daemon or config.listen.address, allow_remote, faults)
    if not flags.engines and flags.config == NO_CONFIG:
        faults.append("--engine: is required without --config")
    raise_faults(faults)
    with listening("listen", options.host, options.port):
        gateway = _joined(options.host, check_free(options.host, options.port))
    with listening("operator", options.operator_host, options.operator_port):
        check_free(options.operator_host, options.operator_port)
    with listening("daemon", host, port):
        return Addresses(gateway, _joined(host, check_free(host, port)))


def _joined(host: str, port: int) -> str:
    return http_url(host, port).removeprefix("http://")


async def _run(flags: UpFlags, daemon: str, engines: "Mapping[EngineId, str]") -> None:
    import asyncio

    from orchestrrl.cli.up.children import agent_command, daemon_command, gateway_command
    from orchestrrl.cli.up.reports import report_engine, report_ready
    from orchestrrl.cli.up.supervisor import SupervisedProcess, keep_running
    from orchestrrl.core.clock import WallClock, stop

    clock, name = WallClock(), f"{gethostname()}-{flags.listen.rpartition(':')[2]}"
    stopping = f"stopping: running requests have {flags.drain_s:g} s to finish; a second signal ends them at once"
    mode = None if flags.mode is None else flags.mode.value
    gateway = SupervisedProcess(gateway_command(flags, daemon), _log, clock)
    agents = [SupervisedProcess(agent_command(flags, daemon, f"agent-{name}"), _log, clock)] if engines else []
    keeper = SupervisedProcess(daemon_command(flags, daemon, flags.config, mode), _log, clock)
    reports = [
        asyncio.create_task(report_engine(flags.engine_kind, engine, url, print_line, clock))
        for engine, url in engines.items()
    ]
    reports.append(asyncio.create_task(report_ready(gateway.ready, f"http://{flags.listen}", print_line, clock)))
    try:
        # The gateway is stopped first, so that its requests finish while the daemon and the agent still run. It is
        # started last, so that it serves no requests if the daemon cannot start.
        await keep_running([gateway, *agents, keeper], lambda: _log("up", stopping))
    finally:
        await stop(*reports)


def _log(name: str, line: str) -> None:
    with suppress(OSError):  # the terminal may be closed; the processes must go on
        sys.stderr.write(f"{name:<{NAME_CHARACTERS}} | {line}\n")
        sys.stderr.flush()
