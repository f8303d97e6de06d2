"""Networks for tests: namespaces that are routers, joined by veth pairs; an optical switch made of bridges.

Each test creates and removes its own, under unique names. Nothing else is touched.
"""

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
PERIOD_S = 0.001  # between two packets of a stream


class Lab:
    """Namespaces under one random name."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(3)
        self.names: list[str] = []

    def add(self, name: str, *addresses: str) -> str:
        """Add a router, which forwards and has these addresses on its loopback. Return the namespace's name."""
        namespace = f"orl-{self.token}-{name}"
        run("ip", "netns", "add", namespace)
        self.names.append(namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        for address in addresses:
            run("ip", "-n", namespace, "addr", "add", address, "dev", "lo")
        settings = ["ip_forward=1", "conf.all.rp_filter=0", "conf.default.rp_filter=0", "fib_multipath_hash_policy=1"]
        for setting in settings:
            name, value = setting.split("=")
            inside(namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name.replace('.', '/')}")
        return namespace

    def veth(self, one: str, interface: str, other: str, other_interface: str) -> None:
        """Add a cable between two namespaces, up at both ends."""
        ends = ("netns", one, "type", "veth", "peer", "name", other_interface, "netns", other)
        run("ip", "link", "add", "name", interface, *ends)
        for namespace, name in ((one, interface), (other, other_interface)):
            run("ip", "-n", namespace, "link", "set", name, "up")

    def ip(self, namespace: str, *words: str) -> None:
        run("ip", "-n", namespace, *words)

    def remove(self) -> None:
        for namespace in self.names:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


class Ocs:
    """An optical switch in a namespace: a port gives light while it is connected, and a bridge carries each circuit."""

    def __init__(self, lab: Lab, name: str = "ocs") -> None:
        self.lab = lab
        self.namespace = lab.add(name)
        self.circuits: dict[tuple[int, int], str] = {}

    def fibre(self, port: int, namespace: str, interface: str) -> None:
        self.lab.veth(namespace, interface, self.namespace, f"p{port}")
        self._ip("link", "set", f"p{port}", "down")

    def lane(self, port: int, other: "Ocs", other_port: int) -> None:
        """Add a fibre from switch to switch."""
        self.lab.veth(self.namespace, f"p{port}", other.namespace, f"p{other_port}")
        for switch, number in ((self, port), (other, other_port)):
            switch._ip("link", "set", f"p{number}", "down")

    def connect(self, a: int, b: int) -> None:
        bridge = self.circuits[a, b] = f"br{a}x{b}"
        self._ip("link", "add", bridge, "type", "bridge")
        for port in (f"p{a}", f"p{b}"):
            self._ip("link", "set", port, "master", bridge)
        for name in (bridge, f"p{a}", f"p{b}"):
            self._ip("link", "set", name, "up")

    def disconnect(self, a: int, b: int) -> None:
        for port in (f"p{a}", f"p{b}"):
            self._ip("link", "set", port, "down", "nomaster")
        self._ip("link", "del", self.circuits.pop((a, b)))

    def _ip(self, *words: str) -> None:
        run("ip", "-n", self.namespace, *words)


@contextmanager
def laboratory() -> Iterator[Lab]:
    """Yield a lab. Skip the test if namespaces are not permitted."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    lab = Lab()
    try:
        try:
            lab.veth(lab.add("probe-a"), "swp1", lab.add("probe-b"), "swp1")
            run("ip", "-n", lab.names[0], "link", "add", "br0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            if not any(
                words in error.stderr for words in ("not permitted", "Permission denied", "Unknown device type")
            ):
                raise
            pytest.skip(f"network namespaces cannot be had here: {error.stderr.strip()}")
        yield lab
    finally:
        lab.remove()


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inside(namespace: str, *command: str) -> str:
    return run("ip", "netns", "exec", namespace, *command)


def sent_packets(namespace: str) -> dict[str, int]:
    """Return the packets sent by each interface since its creation."""
    rows = json.loads(run("ip", "-n", namespace, "-json", "-statistics", "link", "show"))
    return {row["ifname"]: row["stats64"]["tx"]["packets"] for row in rows}


def udp_socket(namespace: str, address: str, port: int = 0) -> socket.socket:
    """Return a socket in the namespace, made by a thread that enters the namespace and then ends."""
    made: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            with Path(f"/run/netns/{namespace}").open() as entrance:
                if ctypes.CDLL(None, use_errno=True).setns(entrance.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            # Packets that wait for an unresponsive neighbour would fill a common send buffer.
            for force in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
                endpoint.setsockopt(socket.SOL_SOCKET, force, 8 << 20)
            endpoint.setblocking(False)
            endpoint.bind((address, port))
            made.append(endpoint)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class Stream:
    """Sends packets from an address in a namespace to another, one by one while it is open, and counts those that
    arrive."""

    def __init__(self, source: tuple[str, str], sink: tuple[str, str], port: int = 7000) -> None:
        self.sent = 0
        self.arrived: Counter[int] = Counter()
        self._source = udp_socket(*source)
        self._sink = udp_socket(*sink, port)
        self._to = (sink[1], port)

    async def __aenter__(self) -> "Stream":
        self._sending = asyncio.ensure_future(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sending.cancel()
        with suppress(asyncio.CancelledError):
            await self._sending
        for _ in range(100):  # packets in transit
            self._receive()
            if len(self.arrived) == self.sent:
                break
            await asyncio.sleep(0.01)
        self._source.close()
        self._sink.close()

    @property
    def lost(self) -> int:
        return self.sent - len(self.arrived)

    async def more(self, count: int) -> None:
        """Return once `count` more have been sent."""
        until = self.sent + count
        while self.sent < until:
            await asyncio.sleep(PERIOD_S)

    async def _send(self) -> None:
        while True:
            # An unreachable network raises in this call: the packet counts as sent and lost.
            with suppress(OSError):
                self._source.sendto(self.sent.to_bytes(8), self._to)
            self.sent += 1
            self._receive()
            await asyncio.sleep(PERIOD_S)

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.arrived[int.from_bytes(self._sink.recv(64))] += 1
