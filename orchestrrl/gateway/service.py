"""Run the gateway as one process, or as several processes that share a port.

Each of several processes is a separate gateway and a separate node of the daemon. The kernel distributes trainers'
connections over the processes (SO_REUSEPORT). Each process has its own operator API, which shows the requests of that
process. A process that dies loses its requests and is restarted. If the parent process dies, its child processes exit.
"""

import asyncio
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from orchestrrl.core.clock import WallClock, stop
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import connect
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.pause import PauseEndpoints
from orchestrrl.gateway.http.server import GatewayServer, url_of
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from orchestrrl.gateway.link import GatewayLink, ask_daemon, move_elsewhere
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from planner.model import NodeId

logger = logging.getLogger(__name__)

RESTART_AFTER_S = 1.0
END_WITHIN_S = 10.0  # beyond the drain time

# A fork would copy threads and sockets.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The index of one of several gateway processes, and the port on which all of these processes listen."""

    index: int
    shared_port: int


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The parsed command-line flags."""

    host: str
    port: int
    operator_host: str
    operator_port: int  # the port of the first process, if there are several; 0: a free port for each
    node: NodeId
    engines: tuple[EngineRoute, ...]
    engine_kind: str
    daemon: str | None
    routing: RoutingPolicy
    limits: RelayLimits
    report_interval_s: float
    drain_s: float
    processes: int
    log_level: str
    reseed: bool = False  # seeded requests may continue with another seed
    keep: RetentionPolicy | None = None  # for answers to requests with a client's id; None: they are not stored

    def operator_port_at(self, place: ProcessPlace | None) -> int:
        """Return the operator port of one process. Processes do not share an operator port, because a call to a shared
        port would reach an arbitrary process."""
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
    """Serve until SIGTERM or SIGINT arrives or the file descriptor `stop_on` becomes readable, then drain. `ready` is
    called with the URLs of the trainers' listener and of the operator API. If `place` is given, these URLs reach only
    this process, which also listens on the shared port."""
    # A request needs two connections, and the usual soft limit of 1,024 descriptors is too low.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    clock = WallClock()

    connect_engine = partial(connect, options.engine_kind)
    fleet = EngineBackends(connect_engine, clock=clock, routing=options.routing)
    store = None if options.keep is None else LedgerStore(options.keep, clock)
    if store is not None:
        store.start()
    core = Gateway(options.node, fleet, limits=options.limits, store=store)
    daemon = None if options.daemon is None else partial(ask_daemon, options.daemon)
    elsewhere = partial(move_elsewhere, options.daemon) if options.daemon is not None and place is not None else None
    barrier = PauseEndpoints(core, daemon, alone=place is None)
    server = GatewayServer(core, barrier=barrier, elsewhere=elsewhere, reseed=options.reseed)
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
    # These tasks run until they are cancelled: one that ends is a defect.
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
    """Convert an OSError of the enclosed block into Permanent. The message contains the flag and the address."""
    try:
        yield
    except OSError as error:
        raise Permanent(f"--{flag}: cannot listen on {host}:{port}: {error.strerror or error}") from error


def _node(options: GatewayOptions, url: str, place: ProcessPlace | None) -> NodeId:
    port = url.rpartition(":")[2] if place is None else place.shared_port
    name = options.node or f"gateway-{socket.gethostname()}-{port}"
    return NodeId(name if place is None else f"{name}-{place.index}")


# --- several processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Child:
    process: SpawnProcess
    line: Connection  # the child sends its URLs; it exits when the parent closes its end
    place: ProcessPlace


def serve_many(options: GatewayOptions) -> None:
    """Serve with several processes until SIGTERM or SIGINT arrives. Once all processes listen, the shared URL is
    printed, followed by the URL of each process's operator API. Raises Permanent if a process cannot listen."""
    with _reserved(options.host, options.port) as port, _signals() as signalled:
        places = [ProcessPlace(index, port) for index in range(options.processes)]
        for place in places:
            operator_port = options.operator_port_at(place)
            with listening("operator", options.operator_host, operator_port):
                check_free(options.operator_host, operator_port)
        children = [_started(options, place) for place in places]
        try:
            operator_urls = [_await_operator_url(child) for child in children]
            print_urls(url_of(options.host, port), *operator_urls)
            _keep_running(options, children, signalled)
        finally:
            _end(children, options.drain_s)


def _keep_running(options: GatewayOptions, children: list[_Child], signalled: int) -> None:
    """Restart processes that end, until a signal makes the file descriptor `signalled` readable."""
    while True:
        ready = wait([signalled, *(child.process.sentinel for child in children)])
        if signalled in ready:
            return
        for index, child in enumerate(children):
            if child.process.sentinel in ready:
                logger.error("gateway process %d exited with code %s, restarting it", index, child.process.exitcode)
                child.line.close()
                if wait([signalled], RESTART_AFTER_S):
                    return
                children[index] = _started(options, child.place)


def _started(options: GatewayOptions, place: ProcessPlace) -> _Child:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(options, place, theirs), name=f"gateway-{place.index}")
    process.start()
    theirs.close()
    return _Child(process, ours, place)


def _run(options: GatewayOptions, place: ProcessPlace, line: Connection) -> None:
    """Serve in a child process. `line` is the connection to the parent process."""
    log_to_stderr(options.log_level)
    try:
        asyncio.run(serve(options, lambda *urls: line.send(urls), place, line.fileno()))
    except Permanent as error:
        logger.error("gateway process %d: %s", place.index, error)
        sys.exit(1)


def _await_operator_url(child: _Child) -> str:
    wait([child.line, child.process.sentinel])
    if not child.line.poll():
        code = child.process.exitcode
        raise Permanent(f"gateway process {child.place.index} exited with code {code} before it started listening")
    try:
        url, operator_url = child.line.recv()
        logger.info("gateway process %d also listens on %s", child.place.index, url)
        return str(operator_url)
    except EOFError as error:
        raise Permanent(f"gateway process {child.place.index} exited before it started listening") from error


def _end(children: list[_Child], drain_s: float) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            if child.process.pid is not None:
                os.kill(child.process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + drain_s + END_WITHIN_S
    for child in children:
        child.process.join(max(0.0, deadline_s - time.monotonic()))
        if child.process.exitcode is None:
            child.process.kill()
            child.process.join()
        child.line.close()


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Reserve the port before any process starts, and yield it. Raises Permanent if the port is in use."""
    with socket.socket(_family(host)) as holder:
        with listening("listen", host, port):
            # With SO_REUSEPORT, the bind would succeed on another gateway's port, so check without it first.
            check_free(host, port)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((host, port))
        bound_port: int = holder.getsockname()[1]
        yield bound_port


def check_free(host: str, port: int) -> int:
    """Return the port, or a free port if `port` is 0. Raises OSError if another process is listening on the address."""
    with socket.socket(_family(host)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        found: int = holder.getsockname()[1]
        return found


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a file descriptor that becomes readable when SIGTERM or SIGINT arrives."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    handlers = {name: signal.signal(name, lambda *_: None) for name in (signal.SIGTERM, signal.SIGINT)}
    before = signal.set_wakeup_fd(writable)
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(before)
        for name, handler in handlers.items():
            signal.signal(name, handler)
        os.close(readable)
        os.close(writable)
