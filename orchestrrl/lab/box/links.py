"""Interfaces of one namespace over netlink: into a bridge and out of it, up and down, in a tenth of a millisecond each.

`ip` would take several milliseconds for its start alone, which is as long as mirrors take. rtnetlink(7).
"""

import os
import socket
import struct

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.box.namespaces import make_socket, within

RTM_NEWLINK = 16
NLM_F_REQUEST, NLM_F_ACK = 1, 4
NLMSG_ERROR = 2
IFF_UP = 1
IFLA_MASTER = 10
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_MASTER = struct.Struct("=HHI")  # length, type, index
_ERROR = struct.Struct("=i")


class Links:
    """Interfaces are told by their indices."""

    def __init__(self, room: str) -> None:
        self._namespace = room
        self._socket = make_socket(room, socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def index(self, name: str) -> int:
        return within(self._namespace, lambda: socket.if_nametoindex(name))

    def join(self, index: int, bridge: int) -> None:
        self._set(index, master=bridge)

    def part(self, index: int) -> None:
        self._set(index, master=0)

    def light(self, index: int, is_lit: bool) -> None:
        """The far end of the pair sees a signal, or none."""
        self._set(index, up=is_lit)

    def close(self) -> None:
        self._socket.close()

    def _set(self, index: int, *, master: int | None = None, up: bool | None = None) -> None:
        self._sequence += 1
        flags, change = (0, 0) if up is None else (IFF_UP * up, IFF_UP)
        body = _LINK.pack(socket.AF_UNSPEC, 0, index, flags, change)
        if master is not None:
            body += _MASTER.pack(_MASTER.size, IFLA_MASTER, master)
        header = _HEADER.pack(_HEADER.size + len(body), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, self._sequence, 0)
        self._socket.send(header + body)
        answer = self._socket.recv(65536)
        _, kind, _, sequence, _ = _HEADER.unpack_from(answer)
        if kind != NLMSG_ERROR or sequence != self._sequence:
            raise Permanent(f"{self._namespace}: the kernel answered {kind} to {sequence}, asked was {self._sequence}")
        if code := _ERROR.unpack_from(answer, _HEADER.size)[0]:
            raise Permanent(f"{self._namespace}: interface {index} cannot be changed: {os.strerror(-code)}")
