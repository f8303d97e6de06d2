"""Hold an engine's port and read the end of its log, on its machine.

The standard library alone: Ray's workers, which need not have OrchestrRL, are sent this module.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TAIL_LINES = 15
TAIL_BYTES = 16_384


def hold_port(host: str, tries: Sequence[tuple[int, bool]]) -> socket.socket:
    """Return a socket that is bound to the first of the ports that is free and never listens: others keep away, and a
    server that sets SO_REUSEADDR, as vLLM does, can bind beside it. 0 stands for any port. Raises OSError.

    Bound without that option a port goes to one holder only, whoever else tries; but one with connections that have
    just been closed (TIME_WAIT) is refused too. True: such a one will do.
    """
    for port, reuse in tries[:-1]:
        with suppress(OSError):
            return _bound(host, port, reuse)
    return _bound(host, *tries[-1])


def log_tail(path: Path, begin: int = 0) -> str:
    """Return the last lines of what was written from byte `begin` on. Raises OSError."""
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
