"""TCP flows between the hosts of a box. Bytes are counted at the receiver."""

import asyncio
import itertools
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.box.namespaces import make_socket

CHUNK = bytes(1 << 16)
CONNECT_WITHIN_S = 30.0
SEND_BUFFER_BYTES = 1 << 17
FIRST_PORT = 20_000
# `struct tcp_info`: size, and offset of tcpi_total_retrans, the number of retransmitted segments.
_TCP_INFO_BYTES, _RETRANSMITTED_AT = 104, 100

Ends = tuple[str, str]  # a namespace, and an address in it
_ports = itertools.count(FIRST_PORT)


@dataclass(slots=True)
class Flow:
    """One TCP connection that sends at full rate. Each pair in `arrivals` contains a monotonic time and the number of
    bytes received by that time."""

    source: Ends
    sink: Ends
    window_bytes: int | None = None  # receive buffer; None: the kernel's default
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    retransmitted: int = 0  # segments so far

    async def run(self) -> None:
        """Run the flow until it is cancelled or the connection ends. Raises Permanent if the connection cannot be
        established."""
        loop, port = asyncio.get_running_loop(), next(_ports)
        with (
            make_socket(self.sink[0], socket.AF_INET, socket.SOCK_STREAM) as door,
            make_socket(self.source[0], socket.AF_INET, socket.SOCK_STREAM) as out,
        ):
            if self.window_bytes is not None:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.window_bytes)
            door.bind((self.sink[1], port))
            door.listen(1)
            out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            out.bind((self.source[1], 0))
            for each in (door, out):
                each.setblocking(False)
            try:
                (came, _), _ = await asyncio.wait_for(
                    asyncio.gather(loop.sock_accept(door), loop.sock_connect(out, (self.sink[1], port))),
                    CONNECT_WITHIN_S,
                )
            except (TimeoutError, OSError) as error:
                raise Permanent(f"no connection from {self.source} to {self.sink}: {error or 'no answer'}") from error
            with came:
                came.setblocking(False)
                self.arrivals.append((time.monotonic(), 0))
                sending = asyncio.ensure_future(self.send(out))
                try:
                    await self._receive(came)
                finally:
                    self.retransmitted = _retransmitted(out)
                    sending.cancel()
                    with suppress(asyncio.CancelledError, OSError):
                        await sending

    def bytes_at(self, at_s: float) -> float:
        """Return the number of bytes received by the time `at_s`, interpolated linearly between arrivals."""
        place = bisect_right(self.arrivals, at_s, key=lambda arrival: arrival[0])
        if place == 0 or place == len(self.arrivals):
            return self.arrivals[-1][1] if place else 0.0
        (before_s, before), (after_s, after) = self.arrivals[place - 1], self.arrivals[place]
        return before + (after - before) * (at_s - before_s) / (after_s - before_s)

    def longest_pause_s(self, since_s: float, until_s: float) -> float:
        """Return the longest time in seconds without an arrival of data between `since_s` and `until_s`."""
        times = [since_s, *(at_s for at_s, _ in self.arrivals if since_s < at_s < until_s), until_s]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    async def send(self, out: socket.socket) -> None:
        """Send data at full rate until cancelled."""
        while True:
            await asyncio.get_running_loop().sock_sendall(out, CHUNK)
            self.retransmitted = _retransmitted(out)

    async def _receive(self, came: socket.socket) -> None:
        loop, count, buffer = asyncio.get_running_loop(), 0, bytearray(1 << 16)
        while got := await loop.sock_recv_into(came, buffer):
            count += got
            self.arrivals.append((time.monotonic(), count))


@asynccontextmanager
async def running(flows: Sequence[Flow]) -> AsyncIterator[None]:
    """Run flows while the body of the `async with` statement runs. Raises the exception of a flow that fails in that
    time."""
    tasks = [asyncio.ensure_future(flow.run()) for flow in flows]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mbps(flows: Sequence[Flow], since_s: float, until_s: float) -> float:
    """Return the total rate of all flows between `since_s` and `until_s`, in Mbit/s."""
    return sum(flow.bytes_at(until_s) - flow.bytes_at(since_s) for flow in flows) * 8e-6 / (until_s - since_s)


def _retransmitted(out: socket.socket) -> int:
    info = out.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    count: int = struct.unpack_from("=I", info, _RETRANSMITTED_AT)[0]
    return count
