"""Reserve an engine's port and read the end of its log, on the engine's machine.

The module imports only the standard library, because it is sent to Ray's workers, where OrchestrRL may not be
installed.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TAIL_LINES = 15
TAIL_BYTES = 16_384


def hold_port(host: str, tries: Sequence[tuple[int, bool]]) -> socket.socket:
    """Return a socket bound to the first free port of `tries`. The socket never listens. It prevents other programs
    from binding the port, while a server that sets SO_REUSEADDR, as vLLM does, still can. Port 0 means any free port.
    Raises OSError if no port is free.

    The flag of each port in `tries` determines whether the port is bound with SO_REUSEADDR. Without SO_REUSEADDR, only
    one holder can bind the port, but a port with recently closed connections (TIME_WAIT) is refused.
    """
    for port, reuse in tries[:-1]:
        with suppress(OSError):
            return _bound(host, port, reuse)
    return _bound(host, *tries[-1])


def log_tail(path: Path, begin: int = 0) -> str:
    """Return at most the last `TAIL_LINES` lines of the file, excluding its first `begin` bytes. Raises OSError if the
    file cannot be read."""
    with path.open("rb") as log:
        log.seek(max(begin, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def _bound(host: str, port: int, reuse: bool) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holder = socket.socket(family, kind)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        holder.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder
