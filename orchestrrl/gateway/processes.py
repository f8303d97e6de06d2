"""Several gateway processes on one port: each is a gateway of its own, and the daemon sees them all as its nodes.

The kernel spreads trainers' connections over them (SO_REUSEPORT). Each has an operator API of its own, which shows its
own requests. A process that dies takes its requests with it and is started again; when this one dies, they end too.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from orchestrrl.core.errors import Permanent
from orchestrrl.gateway.http.server import url_of
from orchestrrl.gateway.service import GatewayOptions, ProcessPlace, listening, log_to_stderr, print_urls, serve

logger = logging.getLogger(__name__)

RESTART_AFTER_S = 1.0
END_WITHIN_S = 10.0  # beyond what draining takes

# A fork would take threads and sockets along.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class _Child:
    process: SpawnProcess
    line: Connection  # it writes its URLs; it ends when our end is closed
    place: ProcessPlace


def serve_many(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. The shared URL is the first line of output, once all listen, then that of each
    process's operator API. Raises Permanent when one of them cannot."""
    with _reserved(options.host, options.port) as port, _signals() as told:
        places = [ProcessPlace(index, port) for index in range(options.processes)]
        for place in places:
            operator_port = options.operator_port_at(place)
            with listening("operator", options.operator_host, operator_port):
                _check_free(options.operator_host, operator_port)
        children = [_started(options, place) for place in places]
        try:
            operator_urls = [_await_operator_url(child) for child in children]
            print_urls(url_of(options.host, port), *operator_urls)
            _keep_running(options, children, told)
        finally:
            _end(children, options.drain_s)


def _keep_running(options: GatewayOptions, children: list[_Child], told: int) -> None:
    """Until a signal comes."""
    while True:
        ready = wait([told, *(child.process.sentinel for child in children)])
        if told in ready:
            return
        for index, child in enumerate(children):
            if child.process.sentinel in ready:
                logger.error("gateway process %d ended with %s and is started again", index, child.process.exitcode)
                child.line.close()
                if wait([told], RESTART_AFTER_S):
                    return
                children[index] = _started(options, child.place)


def _started(options: GatewayOptions, place: ProcessPlace) -> _Child:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(options, place, theirs), name=f"gateway-{place.index}")
    process.start()
    theirs.close()
    return _Child(process, ours, place)


def _run(options: GatewayOptions, place: ProcessPlace, line: Connection) -> None:
    """One of the processes."""
    log_to_stderr(options.log_level)
    try:
        asyncio.run(serve(options, lambda *urls: line.send(urls), place, line.fileno()))
    except Permanent as error:
        logger.error("gateway process %d: %s", place.index, error)
        sys.exit(1)


def _await_operator_url(child: _Child) -> str:
    wait([child.line, child.process.sentinel])
    if not child.line.poll():
        raise Permanent(f"gateway process {child.place.index} ended with {child.process.exitcode} before it listened")
    try:
        url, operator_url = child.line.recv()
        logger.info("gateway process %d listens on %s too", child.place.index, url)
        return str(operator_url)
    except EOFError as error:
        raise Permanent(f"gateway process {child.place.index} ended before it listened") from error


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
    """The port, kept from others' use: one that is taken is told before anything starts. Raises Permanent."""
    with socket.socket(_family(host)) as holder:
        with listening("listen", host, port):
            # Other processes of ours would let us share their port: one that does not share finds them.
            _check_free(host, port)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((host, port))
        bound_port: int = holder.getsockname()[1]
        yield bound_port


def _check_free(host: str, port: int) -> None:
    """Raises OSError where another process listens there."""
    with socket.socket(_family(host)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextmanager
def _signals() -> Iterator[int]:
    """A file descriptor that can be read once SIGTERM or SIGINT has come."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    handlers = {name: signal.signal(name, lambda *_: None) for name in (signal.SIGTERM, signal.SIGINT)}
    before = signal.set_wakeup_fd(tell)
    try:
        yield told
    finally:
        signal.set_wakeup_fd(before)
        for name, handler in handlers.items():
            signal.signal(name, handler)
        os.close(told)
        os.close(tell)
