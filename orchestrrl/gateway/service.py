"""One gateway as a process: its parts wired together, from its first line of output to its end."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from orchestrrl.core.clock import WallClock, stop
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import connect
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.pause import PauseEndpoints
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from orchestrrl.gateway.link import GatewayLink, ask_daemon, move_elsewhere
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from planner.model import EngineId, NodeId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where one of several processes belongs: which it is, and the port that all of them listen on."""

    index: int
    shared_port: int


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The flags, understood."""

    host: str
    port: int
    operator_host: str
    operator_port: int  # with several processes, of the first; 0: a free one for each
    node: NodeId
    engines: tuple[EngineRoute, ...]
    engine_kind: str
    daemon: str | None
    routing: RoutingPolicy
    queue_depth: int
    pools: Mapping[EngineId, str]
    limits: RelayLimits
    report_interval_s: float
    drain_s: float
    processes: int
    log_level: str
    keep: RetentionPolicy | None = None  # what is generated for requests that their clients named

    def operator_port_at(self, place: ProcessPlace | None) -> int:
        """Return the process's own: a shared port would lead to the ledger of any of them."""
        return self.operator_port + place.index if place is not None and self.operator_port else self.operator_port


def log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def print_urls(*urls: str) -> None:
    sys.stdout.writelines(f"{url}\n" for url in urls)
    sys.stdout.flush()


async def serve(
    options: GatewayOptions,
    ready: Callable[[str, str], None] = print_urls,
    place: ProcessPlace | None = None,
    stop_on: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the file descriptor `stop_on` can be read, then drain. `ready` is given
    the URLs of the trainers' listener and of the operator API. With a `place` they are of this process alone, which
    listens on the shared port too."""
    # A request has two connections, and the usual limit of 1,024 is only a default.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    clock = WallClock()

    connect_engine = partial(connect, options.engine_kind)
    fleet = EngineBackends(
        connect_engine, clock=clock, routing=options.routing, queue_depth=options.queue_depth, pools=options.pools
    )
    store = None if options.keep is None else LedgerStore(options.keep, clock)
    if store is not None:
        store.start()
    core = Gateway(options.node, fleet, limits=options.limits, store=store)
    daemon = None if options.daemon is None else partial(ask_daemon, options.daemon)
    elsewhere = partial(move_elsewhere, options.daemon) if options.daemon is not None and place is not None else None
    barrier = PauseEndpoints(core, daemon, alone=place is None)
    server = GatewayServer(core, barrier=barrier, elsewhere=elsewhere)
    with listening("listen", options.host, options.port):
        core.url = await server.start(options.host, 0 if place else options.port)
    operator_port = options.operator_port_at(place)
    with listening("operator", options.operator_host, operator_port):
        operator_url = await server.start_operator(options.operator_host, operator_port)
    logger.info("the operator API is at %s", operator_url)
    core.node = _node(options, core.url, place)
    core.set_routes(options.engines)
    tasks = [asyncio.create_task(core.watch())]
    if options.daemon is not None:
        link = GatewayLink(core, options.daemon, report_interval_s=options.report_interval_s)
        tasks.append(asyncio.create_task(link.run()))
    if place is not None:
        await server.trainers.listen(options.host, place.shared_port, shared=True)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    if stop_on is not None:
        loop.add_reader(stop_on, stopping.set)
    ready(core.url, operator_url)
    ending = asyncio.create_task(stopping.wait())
    # A task that ends is a defect: nothing here ends by itself.
    await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    if stop_on is not None:
        loop.remove_reader(stop_on)
    if options.daemon is None:
        await core.barrier.stop()
    left = await server.drain(options.drain_s)
    if left:
        logger.warning("cutting %d requests that did not finish within %g s", left, options.drain_s)
    await server.close()
    if store is not None:
        await store.close()
    await stop(ending, *tasks)
    await fleet.close()
    for task in tasks:
        if not task.cancelled():
            task.result()


@contextmanager
def listening(flag: str, host: str, port: int) -> Iterator[None]:
    """Raise Permanent, with the flag, where the block cannot listen at its address."""
    try:
        yield
    except OSError as error:
        raise Permanent(f"--{flag} {host}:{port}: {error.strerror or error}") from error


def _node(options: GatewayOptions, url: str, place: ProcessPlace | None) -> NodeId:
    if place is None:
        return options.node or NodeId(f"gateway-{socket.gethostname()}-{url.rpartition(':')[2]}")
    name = options.node or f"gateway-{socket.gethostname()}-{place.shared_port}"
    return NodeId(f"{name}-{place.index}")
