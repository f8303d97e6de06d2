"""One NETCONF session over SSH, in a thread of its own: ncclient is synchronous, and the event loop must not wait.

A caller that gives up leaves the thread waiting. `close` then cuts the connection under it, so that it ends; it never
touches another session, because each session has a thread, a socket and a manager of its own and is never used again.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ncclient.manager import Manager, make_device_handler
from ncclient.operations import RaiseMode
from ncclient.transport import SSHSession
from ncclient.transport.errors import SessionError
from ncclient.transport.session import END_DELIM, MSG_DELIM, NetconfBase

from ocs_drivers.options import Address, DriverOptions, FilledText, Flag, Password, SecondsOr0, Text, split_address
from ocs_drivers.polatis_yang import Revision, Size

T = TypeVar("T")

DEFAULT_PORT = 830
POLITE_S = 1.0  # how long a device may take to answer <close-session>


class NetconfOptions(DriverOptions):
    """`revision` "": as the device announces it. `size` "": as in the model name. The device proves its identity by
    `host_key` (base64), or else by `known_hosts` (a file, by default the user's own)."""

    address: Address
    user: FilledText = "admin"
    password: Password = ""
    key_file: Text = ""
    known_hosts: Text = ""
    host_key: Text = ""
    verify_host_key: Flag = True
    revision: Revision = ""
    size: Size = ""
    power: Flag = False
    reconfiguration_s: SecondsOr0 = 0.025

    def conflicts(self) -> list[str]:
        return [] if self.password or self.key_file else ["password: must be set, or key_file, got ''"]


class PromptSession(SSHSession):  # type: ignore[misc]  # ncclient is not typed
    """ncclient's own, but for two things: what is to be sent is sent at once (ncclient's reader looks for it every
    0.1 s, four times what a piezo switch takes to move), and known hosts come from one file."""

    def __init__(self, known_hosts: str) -> None:
        super().__init__(make_device_handler(None))
        self._known_hosts = known_hosts

    def load_known_hosts(self, filename: str | None = None) -> None:
        super().load_known_hosts(filename or self._known_hosts or None)

    def send(self, message: str) -> None:
        channel = self._channel
        if not self.connected or channel is None:
            raise SessionError("not connected")
        data = message.encode()
        if self._base == NetconfBase.BASE_11:
            data = b"\n#%d\n%b%b" % (len(data), data, END_DELIM)
        else:
            data += MSG_DELIM
        channel.sendall(data)


class NetconfSession:
    """One session with the device of the options, which is never used again."""

    def __init__(self, options: NetconfOptions) -> None:
        self._options = options
        self._host, self._port = split_address(options.address, DEFAULT_PORT)
        # For each wait of the thread. The driver's own limit comes first; this one is for a thread that nothing cuts.
        self._limit_s = 2 * options.command_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"netconf-{self._host}")
        self._work: Future[Any] | None = None
        self._socket: socket.socket | None = None
        self._manager: Any = None
        self._is_cut = False

    async def open(self) -> frozenset[str]:
        """The capabilities that the device announces, as they are written."""
        return await self._run(self._connect)

    async def call(self, work: Callable[[Any], T]) -> T:
        """What `work` makes of the ncclient manager, in the thread. Its errors are ncclient's, paramiko's and
        OSError; replies with <rpc-error> are not raised but returned."""
        return await self._run(lambda: work(self._manager))

    async def close(self) -> None:
        """Say goodbye where that is possible; in any case the connection is gone and the thread ends."""
        is_idle = self._work is None or self._work.done()
        try:
            if is_idle and self._manager is not None:
                # The goodbye is a courtesy: whatever goes wrong with it, the connection is cut next.
                with suppress(Exception):
                    await self._run(self._send_close)
        finally:
            self._is_cut = True
            if self._socket is not None:
                with suppress(OSError):  # the device has cut it already
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        future = self._thread.submit(work)
        self._work = future
        return await asyncio.wrap_future(future)

    def _connect(self) -> frozenset[str]:
        options = self._options
        # Of a connection that broke, paramiko logs a traceback; the error that is raised says the same in a line.
        logging.getLogger("ncclient.transport.ssh").setLevel(logging.CRITICAL)
        connection = socket.create_connection((self._host, self._port), timeout=self._limit_s)
        self._socket = connection
        if self._is_cut:
            connection.close()
            raise SessionError("closed while connecting")
        session = PromptSession(options.known_hosts)
        try:
            session.connect(
                self._host,
                self._port,
                timeout=self._limit_s,
                username=options.user,
                password=options.password or None,
                key_filename=options.key_file or None,
                allow_agent=False,
                look_for_keys=False,
                hostkey_verify=options.verify_host_key,
                hostkey_b64=options.host_key or None,
                sock=connection,
            )
        except BaseException:
            if session.transport is not None:
                session.close()
            connection.close()
            raise
        self._manager = Manager(session, make_device_handler(None), timeout=self._limit_s, raise_mode=RaiseMode.NONE)
        return frozenset(session.server_capabilities)

    def _send_close(self) -> None:
        self._manager.timeout = min(POLITE_S, self._limit_s)
        self._manager.close_session()
