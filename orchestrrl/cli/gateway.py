"""`orchestrrl gateway`: serve OpenAI's endpoints in front of the engines."""

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer

from orchestrrl.cli.output import reporting_errors
from orchestrrl.clock import WallClock
from orchestrrl.engines.base import Engine, connect
from orchestrrl.errors import Permanent, ProblemFaults
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.fleet import Fleet
from orchestrrl.gateway.link import GatewayLink
from orchestrrl.gateway.relay import Limits
from orchestrrl.gateway.routing import Policy
from orchestrrl.gateway.server import Server
from orchestrrl.operations import Route
from planner.model import EngineId, NodeId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The flags, understood."""

    host: str
    port: int
    node: NodeId
    engines: tuple[Route, ...]
    engine_kind: str
    daemon: str | None
    policy: Policy
    limits: Limits
    report_interval_s: float
    drain_s: float


def register(app: typer.Typer) -> None:
    app.command(name="gateway", rich_help_panel="Services")(gateway)


def gateway(
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one.")] = "127.0.0.1:8000",
    engine: Annotated[
        list[str] | None, typer.Option(help="ID=URL of an engine; repeat it. The daemon's routes replace these.")
    ] = None,
    daemon: Annotated[str | None, typer.Option(help="The daemon's address, HOST:PORT or unix:PATH.")] = None,
    policy: Annotated[str, typer.Option(help="load_index | round_robin")] = Policy.LOAD_INDEX.value,
    engine_kind: Annotated[str, typer.Option(help="Which engine product the URLs are.")] = "vllm",
    gateway_id: Annotated[str, typer.Option("--id", help="This gateway's name. Default: host name and port.")] = "",
    engine_wait_s: Annotated[float, typer.Option(help="Wait this long for any engine before an error.")] = 30.0,
    stall_s: Annotated[float, typer.Option(help="Leave an engine that makes no token for this long.")] = 120.0,
    report_interval_s: Annotated[float, typer.Option(help="Report to the daemon this often.")] = 0.25,
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, let requests finish for this long.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error")] = "info",
) -> None:
    """Serve `/v1/completions` and `/v1/chat/completions` in front of engines.

    Example: `orchestrrl gateway --engine e0=http://10.0.0.1:8000 --engine e1=http://10.0.0.2:8000`

    The first line on standard output is the URL that it serves.
    """
    with reporting_errors():
        options = read_options(
            listen=listen,
            engines=engine or [],
            daemon=daemon,
            policy=policy,
            engine_kind=engine_kind,
            gateway_id=gateway_id,
            engine_wait_s=engine_wait_s,
            stall_s=stall_s,
            report_interval_s=report_interval_s,
            drain_s=drain_s,
            log_level=log_level,
        )
        logging.basicConfig(
            stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        asyncio.run(serve(options))


def read_options(
    *,
    listen: str,
    engines: list[str],
    daemon: str | None,
    policy: str,
    engine_kind: str,
    gateway_id: str,
    engine_wait_s: float,
    stall_s: float,
    report_interval_s: float,
    drain_s: float,
    log_level: str,
) -> GatewayOptions:
    """Raises ProblemFaults that names every bad flag."""
    faults: list[str] = []
    host, port = _address(listen, faults)
    routes = _routes(engines, faults)
    if not engines and daemon is None:
        faults.append("--engine: is missing, and there is no --daemon to name engines either")
    if daemon is not None and not daemon.startswith("unix:") and not daemon.rpartition(":")[2].isdecimal():
        faults.append(f"--daemon: must be HOST:PORT or unix:PATH, got {daemon!r}")
    if policy not in list(Policy):
        faults.append(f"--policy: must be one of {', '.join(Policy)}, got {policy!r}")
    durations = {"engine-wait-s": engine_wait_s, "stall-s": stall_s, "report-interval-s": report_interval_s}
    faults += [f"--{name}: must be > 0, got {value:g}" for name, value in durations.items() if not value > 0]
    if not drain_s >= 0:
        faults.append(f"--drain-s: must be >= 0, got {drain_s:g}")
    if log_level not in ("debug", "info", "warning", "error"):
        faults.append(f"--log-level: must be one of debug, info, warning, error, got {log_level!r}")
    try:
        connect(engine_kind, "http://127.0.0.1:1")
    except Permanent as error:
        faults.append(f"--engine-kind: {error}")
    if faults:
        raise ProblemFaults(faults)
    return GatewayOptions(
        host=host,
        port=port,
        node=NodeId(gateway_id),
        engines=tuple(routes),
        engine_kind=engine_kind,
        daemon=daemon,
        policy=Policy(policy),
        limits=Limits(engine_wait_s=engine_wait_s, stall_s=stall_s),
        report_interval_s=report_interval_s,
        drain_s=drain_s,
    )


def _address(listen: str, faults: list[str]) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        faults.append(f"--listen: must be HOST:PORT, got {listen!r}")
        return "", 0
    return host.strip("[]"), int(port)


def _routes(engines: list[str], faults: list[str]) -> list[Route]:
    routes: list[Route] = []
    for item in engines:
        name, separator, url = item.partition("=")
        parts = urlsplit(url)
        if not name or not separator or parts.scheme not in ("http", "https") or not parts.netloc:
            faults.append(f"--engine: must be ID=URL with an http URL, got {item!r}")
        elif any(route.engine == name for route in routes):
            faults.append(f"--engine: {name!r} is given twice")
        else:
            routes.append(Route(EngineId(name), url.rstrip("/")))
    return routes


async def serve(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    clock = WallClock()

    def connect_engine(url: str) -> Engine:
        return connect(options.engine_kind, url)

    fleet = Fleet(connect_engine, clock=clock, policy=options.policy)
    core = Gateway(options.node, fleet, limits=options.limits, clock=clock)
    server = Server(core)
    try:
        core.url = await server.start(options.host, options.port)
    except OSError as error:
        raise Permanent(f"--listen {options.host}:{options.port}: {error.strerror or error}") from error
    core.node = core.node or NodeId(f"gateway-{socket.gethostname()}-{core.url.rpartition(':')[2]}")
    core.set_routes(options.engines)
    tasks = [asyncio.create_task(core.watch())]
    if options.daemon is not None:
        link = GatewayLink(core, options.daemon, report_interval_s=options.report_interval_s, clock=clock)
        tasks.append(asyncio.create_task(link.run()))
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    sys.stdout.write(core.url + "\n")
    sys.stdout.flush()
    ending = asyncio.create_task(stopping.wait())
    # A task that ends is a defect: nothing here ends by itself.
    await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    left = await server.drain(options.drain_s)
    if left:
        logger.warning("cutting %d requests that did not finish within %g s", left, options.drain_s)
    await server.close()
    for task in (ending, *tasks):
        task.cancel()
    with suppress(asyncio.CancelledError):
        for task in tasks:
            await task
    await fleet.close()
