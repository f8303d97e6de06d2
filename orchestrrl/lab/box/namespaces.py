"""Create the network namespaces inside the box, configure them with batches of `ip` and `tc` commands, and enter
them."""

import asyncio
import ctypes
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from orchestrrl.core.errors import Permanent

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
FOLDER = Path("/run/netns")
# Forward without reverse-path filtering, hash flows by their ports, and disable IPv6.
SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/fib_multipath_hash_policy": "1",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}


class Script:
    """Collects commands of `ip` and `tc` by namespace, and runs them in batches."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._ip: dict[str, list[str]] = defaultdict(list)
        self._tc: dict[str, list[str]] = defaultdict(list)

    def room(self, name: str) -> str:
        self._first.append(f"netns add {name}")
        self.ip(name, "link set lo up")
        return name

    def cable(self, one: str, interface: str, other: str, other_interface: str, index: int) -> None:
        """Add a veth pair between the namespaces `one` and `other`. `index` is the interface index of the first end and
        must differ from the index of the second end. Otherwise, the kernel reports link changes with a delay of up to a
        second."""
        ends = f"netns {one} index {index} type veth peer name {other_interface} netns {other}"
        self._first.append(f"link add name {interface} {ends}")

    def ip(self, room: str, line: str) -> None:
        self._ip[room].append(line)

    def tc(self, room: str, line: str) -> None:
        self._tc[room].append(line)

    async def run(self) -> None:
        """Run all collected commands. Raises Permanent, with the tool's output, if a command fails."""
        await batch("ip", "", self._first)
        for room in self._ip:
            within(room, _settle)
        for room, lines in self._ip.items():
            await batch("ip", room, lines)
        for room, lines in self._tc.items():
            await batch("tc", room, lines)


async def batch(tool: str, room: str, lines: Iterable[str]) -> None:
    """Run lines of commands with `tool`, which is `ip` or `tc`, in the namespace `room`. If `room` is empty, run them
    in the current namespace. Raises Permanent, with the tool's output, at the first line that fails."""
    words = [tool, *(["-n", room] if room else []), "-batch", "-"]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate("".join(f"{line}\n" for line in lines).encode())
    if process.returncode:
        raise Permanent(f"{' '.join(words)}: {' | '.join(out.decode(errors='replace').split(chr(10))).strip(' |')}")


def enter(room: str) -> None:
    """Move this thread, and the processes that it starts later, into the namespace `room`. Raises OSError if the
    namespace cannot be entered."""
    entrance = os.open(FOLDER / room, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(entrance, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {room}")
    finally:
        os.close(entrance)


def within(room: str, work: Callable[[], T]) -> T:
    """Run `work` in a new thread inside a namespace, and return its result."""

    def run() -> T:
        enter(room)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def make_socket(room: str, *of: int) -> socket.socket:
    """Return a socket inside the namespace `room`. `of` are the arguments of `socket.socket`. The socket can be used
    from any thread."""
    return within(room, lambda: socket.socket(*of))


def _settle() -> None:
    for name, value in SETTINGS.items():
        path = Path("/proc/sys/net") / name
        if path.exists():
            path.write_text(value)
