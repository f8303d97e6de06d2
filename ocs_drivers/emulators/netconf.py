"""Emulate a Polatis switch with NETCONF over real SSH. netconf_store.py implements its datastores.

SSH is provided by paramiko, which uses threads. The threads only transfer messages. Each message is passed to the event
loop, which owns the emulated device, and the thread waits for the answer. The host key is generated at start.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from xml.etree.ElementTree import Element

import paramiko
from pydantic import BeforeValidator

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators import netconf_store as text
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice, address_text
from ocs_drivers.emulators.netconf_store import NC, Framing, FramingError, NetconfDatastores, child, local
from ocs_drivers.emulators.polatis import PolatisStore, YangRefusal, polatis_facts
from ocs_drivers.options import CheckedOptions, Flag, YamlText, as_text, must_be

T = TypeVar("T")

POLATIS_REVISION = "2018-01-19"
ESTABLISHED = 1  # a TCP state of Linux


@dataclass
class NetconfServerSession:
    """One SSH connection of a client, with its NETCONF session."""

    id: int
    number: int  # the device's session number, which is no longer valid after a restart
    connection: socket.socket
    transport: paramiko.Transport
    answers: set[Any] = field(default_factory=set)  # futures for which the session's thread waits

    def is_open(self) -> bool:
        """Return whether the kernel considers the connection open. The kernel registers that the client has closed the
        connection before any thread of the server does."""
        try:
            return self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        except OSError:
            return False

    def abort(self) -> None:
        """Reset the TCP connection without a close message of SSH or NETCONF, as a crash of the device would."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.close()
        for answer in list(self.answers):
            answer.cancel()


class NetconfQuirks(CheckedOptions):
    """Configurable behaviour. `revision` is the announced revision of module optical-switch; if it is "", no revision
    is announced. `base` is the framing, 1.0 or 1.1. If `candidate` is True, only the candidate datastore can be edited.
    If `one_session` is True, further connections are refused. If `any_to_any` is True, all ports form a single range.
    If `lists_late` is True, pairs are listed only when their mirrors are in place. If `power` is True, every port has a
    power monitor. `user` logs in with `password` or with the public key `authorized_key` (base64)."""

    revision: yang.Revision = "2018-03-22"
    base: Annotated[str, must_be("1.0 or 1.1", lambda value: value in ("1.0", "1.1")), BeforeValidator(as_text)] = "1.1"
    candidate: Flag = False
    one_session: Flag = False
    any_to_any: Flag = False
    lists_late: Flag = False
    power: Flag = False
    user: YamlText = "admin"
    password: YamlText = "root"
    authorized_key: YamlText = ""


class NetconfEmulator:
    """An emulated Polatis switch, configured by `NetconfQuirks`."""

    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> None:
        self.quirks = NetconfQuirks.read(quirks, prefix="")
        self.device = EmulatedDevice(polatis_facts(panel, self.quirks.any_to_any), panel, clock)
        self.host_key = ""  # base64, as in a known_hosts line; set by `start`
        revision = self.quirks.revision or yang.PAIR_REVISION
        self._store = NetconfDatastores(
            PolatisStore(self.device, revision, lists_late=self.quirks.lists_late),
            has_candidate=self.quirks.candidate,
            has_monitors=self.quirks.power,
        )
        self._sessions: dict[int, NetconfServerSession] = {}
        self._last_id = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._key: Any = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._loop = asyncio.get_running_loop()
        self._key = paramiko.ECDSAKey.generate()
        self.host_key = self._key.get_base64()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return address_text(host, self._listener.getsockname()[1])

    async def stop(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        sessions = list(self._sessions.values())
        for session in sessions:
            self._end(session)
        for session in sessions:
            await asyncio.to_thread(session.transport.join, 10)

    def capabilities(self) -> list[str]:
        told = [text.BASE_1_0] + ([text.BASE_1_1] if self.quirks.base == "1.1" else [])
        told.append(text.CAPABILITY + ("candidate:1.0" if self.quirks.candidate else "writable-running:1.0"))
        if not self.quirks.revision:
            return [*told, yang.NAMESPACE]
        return [
            *told,
            f"{yang.NAMESPACE}?module={yang.MODULE}&revision={self.quirks.revision}",
            f"{yang.POLATIS_NAMESPACE}?module={yang.POLATIS_MODULE}&revision={POLATIS_REVISION}",
        ]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            for session in list(self._sessions.values()):
                if not session.is_open():
                    self._end(session)
            if self.quirks.one_session and self._sessions:
                connection.close()
                continue
            self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        """Start the SSH transport of a connection. Its threads then run `serve`, which runs `answer` in the event
        loop."""
        self._last_id += 1
        connection.setblocking(True)
        transport = paramiko.Transport(connection)
        session = NetconfServerSession(self._last_id, self.device.session(), connection, transport)
        self._sessions[session.id] = session
        transport.set_log_channel("ocs_drivers.emulators.netconf.ssh")
        transport.add_server_key(self._key)
        transport.set_subsystem_handler("netconf", NetconfSubsystem, self, session)
        transport.start_server(event=threading.Event(), server=SshAccess(self))

    def serve(self, session: NetconfServerSession, channel: Any) -> None:
        """Serve a NETCONF session. This method is called in one of paramiko's threads."""
        framing = Framing()
        channel.sendall(framing.frame(text.write(text.hello(self.capabilities(), session.id))))
        if (greeting := _received(framing, channel)) is None:
            return
        theirs = {(each.text or "").strip() for each in text.parse(greeting).iter(f"{NC}capability")}
        framing.is_chunked = self.quirks.base == "1.1" and text.BASE_1_1 in theirs
        while (message := _received(framing, channel)) is not None:
            reply, is_last = self._on_loop(session, self.answer(session, message))
            channel.sendall(framing.frame(reply))
            if is_last:
                return

    async def answer(self, session: NetconfServerSession, message: bytes) -> tuple[bytes, bool]:
        """Return the reply to a message, and whether the session ends after it. Raises ConnectionBroken if the device
        has restarted."""
        if not self.device.is_alive(session.number):
            raise ConnectionBroken
        reply = Element(f"{NC}rpc-reply")
        is_last = False
        try:
            request = text.parse(message)
            if request.tag != f"{NC}rpc" or len(request) != 1:
                raise YangRefusal("malformed-message", "an <rpc> with one operation is expected", kind="rpc")
            reply.attrib.update(request.attrib)
            if "message-id" not in request.attrib:
                raise YangRefusal("missing-attribute", "message-id is missing", kind="rpc")
            is_last = local(request[0]) == "close-session"
            reply.extend(await self._operate(session, request[0], message.decode(errors="replace")))
        except YangRefusal as error:
            reply.append(text.error_element(error))
        if not len(reply):
            child(reply, "ok")
        return text.write(reply), is_last

    async def _operate(self, session: NetconfServerSession, operation: Element, command: str) -> list[Element]:
        name = local(operation)
        if operation.tag == f"{{{yang.NAMESPACE}}}port-set-state":
            await self._store.set_ports(operation, command)
        elif name in ("get", "get-config"):
            return [self._read(operation)]
        elif name == "edit-config":
            await self._store.edit(operation, session.id, command)
        elif name == "commit":
            await self._store.commit(session.id, command)
        elif name == "discard-changes":
            self._store.discard()
        elif name in ("lock", "unlock"):
            target = next((local(each) for each in operation.iterfind(f"{NC}target/*")), "")
            (self._store.lock if name == "lock" else self._store.unlock)(target, session.id)
        elif name != "close-session":
            raise YangRefusal("operation-not-supported", f"{name} is not supported", kind="protocol")
        return []

    def _read(self, operation: Element) -> Element:
        source = next((local(each) for each in operation.iterfind(f"{NC}source/*")), "running")
        trees = self._store.state() if local(operation) == "get" else self._store.config(source)
        wanted = operation.find(f"{NC}filter")
        data = Element(f"{NC}data")
        if wanted is None:
            data.extend(trees)
        elif wanted.get("type", "subtree") != "subtree":
            raise YangRefusal("bad-attribute", "only subtree filters are supported", kind="protocol")
        else:
            # Return whole containers: servers may answer a subtree filter with more than its criteria select.
            names = {local(criterion) for criterion in wanted}
            data.extend(tree for tree in trees if local(tree) in names)
        return data

    def _end(self, session: NetconfServerSession) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._store.leave(session.id)
        session.abort()

    def _on_loop(self, session: NetconfServerSession, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        session.answers.add(future)
        try:
            return future.result()
        finally:
            session.answers.discard(future)

    def finish(self, session: NetconfServerSession) -> None:
        """End a session. This method is called from the session's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is nothing to end
            self._loop.call_soon_threadsafe(self._end, session)


class NetconfSubsystem(paramiko.SubsystemHandler):  # type: ignore[misc]  # paramiko is not typed
    """Runs one NETCONF session in a thread of paramiko."""

    def __init__(
        self, channel: Any, name: str, server: Any, emulator: NetconfEmulator, session: NetconfServerSession
    ) -> None:
        super().__init__(channel, name, server)
        self._emulator = emulator
        self._session = session

    def start_subsystem(self, name: str, transport: Any, channel: Any) -> None:
        # Each of these ends the session, but not the server.
        with contextlib.suppress(ConnectionBroken, CancelledError, FramingError, YangRefusal, OSError, EOFError):
            self._emulator.serve(self._session, channel)
        self._emulator.finish(self._session)


class SshAccess(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko is not typed
    """The access rules of the SSH server: the accepted logins and channels."""

    def __init__(self, emulator: NetconfEmulator) -> None:
        self._emulator = emulator

    def get_allowed_auths(self, username: str) -> str:
        return "password,publickey" if self._emulator.quirks.authorized_key else "password"

    def check_auth_password(self, username: str, password: str) -> int:
        known = (self._emulator.quirks.user, self._emulator.quirks.password)
        return self._verdict((username, password) == known)

    def check_auth_publickey(self, username: str, key: Any) -> int:
        is_known = key.get_base64() == self._emulator.quirks.authorized_key
        return self._verdict(username == self._emulator.quirks.user and is_known)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        opened: int = paramiko.OPEN_SUCCEEDED
        refused: int = paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        return opened if kind == "session" else refused

    def _verdict(self, is_known: bool) -> int:
        verdict: int = paramiko.AUTH_SUCCESSFUL if is_known else paramiko.AUTH_FAILED
        return verdict


def _received(framing: Framing, channel: Any) -> bytes | None:
    """Return the next message, or None if the peer has closed the connection."""
    while (message := framing.next()) is None:
        if not (data := channel.recv(65536)):
            return None
        framing.feed(data)
    return message
