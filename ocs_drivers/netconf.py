"""The driver `netconf` for Polatis switches, which uses their YANG model over NETCONF (RFC 6241, SSH port 830).

In addition to the assumptions in polatis_yang.py, the driver assumes that the <hello> contains the revision of module
`optical-switch`, and that one <edit-config> can carry many pairs. Cross-connects are edited in `running`, as working
clients do. If only `candidate` is writable, they are edited in `candidate` under a lock and then committed. Each pair
is marked `merge` or `delete` and the default operation is `none`, so only named pairs can change, and no request
replaces or deletes the collection.

It is not known whether an edit is atomic, so its effect is read back. It is not known whether the mirrors are in place
when a pair is listed. The driver therefore does not declare the capability `tuned_state`, and considers a pair tuned
when the stated time has passed. The driver does not use `:confirmed-commit`. It does not declare the capability
`events`, because the notification stream (RFC 5277) carries only power and system alarms. Cross-connects appear only in
the free text of an activity log that an administrator must enable.

Each session runs in a separate thread, because ncclient is synchronous and must not block the event loop. If a caller
is cancelled, the thread keeps waiting until `close` shuts down its connection. Other sessions are not affected, because
each session has a separate thread, socket and manager and is never reused.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import paramiko
from ncclient import NCClientError
from ncclient.manager import Manager, make_device_handler
from ncclient.operations import RaiseMode
from ncclient.transport import SSHSession
from ncclient.transport.errors import AuthenticationError, SessionError, SSHUnknownHostError
from ncclient.transport.session import END_DELIM, MSG_DELIM, NetconfBase

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import Action, CrossConnect, SwitchCapabilities
from ocs_drivers.options import (
    Address,
    ConfiguredSwitch,
    DriverOptions,
    FilledText,
    Flag,
    Password,
    SecondsOr0,
    Text,
    split_address,
)

T = TypeVar("T")

DEFAULT_PORT = 830
POLITE_S = 1.0  # time limit for the answer to <close-session>
BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
CAPABILITY = "urn:ietf:params:netconf:capability:"
NAMESPACES = {yang.MODULE: yang.NAMESPACE, yang.POLATIS_MODULE: yang.POLATIS_NAMESPACE}
OPERATION = {Action.ADD: "merge", Action.REMOVE: "delete"}
# Errors that make the client wait for another client. Nothing was done.
BUSY_TAGS = frozenset({"lock-denied", "in-use", "resource-denied"})


class NetconfOptions(DriverOptions):
    """Options of the driver `netconf`. If `revision` is empty, the revision that the device announces is used. If
    `size` is empty, the size in the model name is used. The device is authenticated by `host_key` (base64) if it is
    given, and otherwise by the file `known_hosts`, which is by default the user's known_hosts file."""

    address: Address
    user: FilledText = "admin"
    password: Password = ""
    key_file: Text = ""
    known_hosts: Text = ""
    host_key: Text = ""
    verify_host_key: Flag = True
    revision: yang.Revision = ""
    size: yang.Size = ""
    power: Flag = False
    reconfiguration_s: SecondsOr0 = 0.025

    def conflicts(self) -> list[str]:
        return [] if self.password or self.key_file else ["password: must be set unless key_file is, got ''"]


class PromptSession(SSHSession):  # type: ignore[misc]  # ncclient is not typed
    """A session of ncclient with two differences. Messages are sent at once, whereas ncclient checks for messages to
    send only every 0.1 s, which is four times the time that a piezo switch takes to move. Known hosts are read from a
    single file."""

    def __init__(self, known_hosts: str) -> None:
        super().__init__(make_device_handler(None))
        self._known_hosts = known_hosts

    def load_known_hosts(self, filename: str | None = None) -> None:
        super().load_known_hosts(filename or self._known_hosts or None)

    def send(self, message: str) -> None:
        channel = self._channel
        if not self.connected or channel is None:
            raise SessionError("the connection to the device is closed")
        data = message.encode()
        if self._base == NetconfBase.BASE_11:
            data = b"\n#%d\n%b%b" % (len(data), data, END_DELIM)
        else:
            data += MSG_DELIM
        channel.sendall(data)


class NetconfSession:
    """One NETCONF session with a device. A session is never reused."""

    def __init__(self, options: NetconfOptions) -> None:
        self._options = options
        self._host, self._port = split_address(options.address, DEFAULT_PORT)
        # Limit for each wait of the thread. The driver's own limit is shorter; this one ends a thread that is not shut
        # down.
        self._limit_s = 2 * options.command_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"netconf-{self._host}")
        self._work: Future[Any] | None = None
        self._socket: socket.socket | None = None
        self._manager: Any = None
        self._is_cut = False

    async def open(self) -> frozenset[str]:
        """Connect to the device and return the capabilities that it announces, verbatim."""
        return await self._run(self._connect)

    async def call(self, work: Callable[[Any], T]) -> T:
        """Run `work(manager)` in the session's thread, with the ncclient manager, and return its result. Raises errors
        of ncclient and paramiko, and OSError. Replies with <rpc-error> are returned, not raised."""
        return await self._run(lambda: work(self._manager))

    async def close(self) -> None:
        """Send <close-session> if the session is idle. In any case, shut down the connection, which ends the thread."""
        is_idle = self._work is None or self._work.done()
        try:
            if is_idle and self._manager is not None:
                # The message is a courtesy: if it fails, the connection is shut down anyway.
                with suppress(Exception):
                    await self._run(self._send_close)
        finally:
            self._is_cut = True
            if self._socket is not None:
                with suppress(OSError):  # already shut down by the device
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        future = self._thread.submit(work)
        self._work = future
        return await asyncio.wrap_future(future)

    def _connect(self) -> frozenset[str]:
        options = self._options
        # When a connection breaks, paramiko logs a traceback; the raised error has the same information in one line.
        logging.getLogger("ncclient.transport.ssh").setLevel(logging.CRITICAL)
        connection = socket.create_connection((self._host, self._port), timeout=self._limit_s)
        self._socket = connection
        if self._is_cut:
            connection.close()
            raise SessionError("the connection was closed during the login")
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


class RpcRefused(Exception):
    """Raised when the device answers with <rpc-error>."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__("; ".join(_rpc_error_text(error) for error in errors))
        self.is_busy = any(error.tag in BUSY_TAGS for error in errors)


class NetconfWire(yang.PolatisWire):
    """Implements the operations of `base.SwitchWire` over NETCONF."""

    def __init__(self, options: NetconfOptions, clock: DeviceClock) -> None:
        super().__init__(clock, options.size, options.reconfiguration_s, has_power=options.power)
        self.capabilities = SwitchCapabilities(bulk=True, port_power=options.power)
        self._options = options
        self._session: NetconfSession | None = None
        self._announced: frozenset[str] = frozenset()

    async def open(self) -> None:
        self._session = NetconfSession(self._options)
        self._announced = await _translated("open", self._session.open())
        told = module_revision(self._announced, yang.NAMESPACE, yang.MODULE)
        self._revision = self._options.revision or told or ""
        if not self._revision:
            what = "the revision of module" if told == "" else "module"
            raise DriverPermanent(
                f"the device does not announce {what} {yang.MODULE}: "
                "set the option `revision` to a date such as 2018-03-22",
                answer=" ".join(sorted(self._announced)),
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read(self, containers: Mapping[str, Sequence[str]]) -> Mapping[str, object]:
        is_known = module_revision(self._announced, yang.POLATIS_NAMESPACE, yang.POLATIS_MODULE) is not None
        wanted = [subtree(name, leaves) for name, leaves in containers.items() if name != yang.STARTUP_MODE or is_known]
        is_config = yang.CROSS_CONNECTS in containers

        def ask(manager: Any) -> Any:
            request = manager.get_config("running", filter=wanted) if is_config else manager.get(filter=wanted)
            return _checked(request).data_ele

        data = await _translated("read", self._live().call(ask))
        if data is None:
            raise DriverPermanent("invalid response: <data> is missing")
        return plain(data)

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        config = edit(self._revision, action, self.as_listed(action, pairs))
        is_direct = self._can("writable-running:1.0")
        if not is_direct and not self._can("candidate:1.0"):
            raise DriverPermanent("the device is read-only: it announces neither :writable-running nor :candidate")
        how = {"default_operation": "none"}
        if self._can("rollback-on-error:1.0"):
            how["error_option"] = "rollback-on-error"

        def work(manager: Any) -> None:
            if is_direct:
                _checked(manager.edit_config(config, target="running", **how))
            else:
                _edit_candidate(manager, config, how)

        with self._settling.commanding(action, pairs):
            await _translated(f"edit-config {config}", self._live().call(work), is_setter=True)

    def _can(self, capability: str) -> bool:
        return CAPABILITY + capability in self._announced

    def _live(self) -> NetconfSession:
        if self._session is None:
            raise DriverRetryable("no session with the device is open", after_s=0.0)
        return self._session


def subtree(container: str, leaves: Sequence[str] = ()) -> str:
    """Return a subtree filter that selects the named leaves of each port in a container or, without leaves, the whole
    container. `container` is a path whose parts may have a module prefix, as in
    `system-config/polatis-switch:startup-mode`. A leaf may also be a path, as in `opm/power`."""
    inner = "".join(_nested(leaf.split("/")) for leaf in leaves)
    return _nested(f"{yang.MODULE}:{container}".split("/"), f"<port>{inner}</port>" if inner else "")


def _nested(path: Sequence[str], content: str = "") -> str:
    for part in reversed(path):
        module, _, name = part.rpartition(":")
        attribute = f' xmlns="{NAMESPACES[module]}"' if module else ""
        content = f"<{name}{attribute}>{content}</{name}>" if content else f"<{name}{attribute}/>"
    return content


def plain(element: Any) -> dict[str, object]:
    """Convert the children of an lxml or ElementTree element to the structure of JSON. Namespaces are dropped."""
    found: dict[str, list[object]] = {}
    for child in element:
        if isinstance(child.tag, str):  # not a comment
            value = plain(child) if len(child) else (child.text or "").strip()
            found.setdefault(child.tag.rpartition("}")[2], []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def edit(revision: str, action: Action, pairs: Sequence[CrossConnect]) -> str:
    """Return a <config> that adds or removes these pairs. With the default operation `none`, it affects no other pairs.
    Raises ValueError if there are no pairs."""
    if not pairs:
        raise ValueError("the list of circuits must not be empty: some devices interpret an empty list as all circuits")
    name, operation = yang.pair_list(revision), OPERATION[action]
    entries = "".join(
        f'<{name} nc:operation="{operation}"><ingress>{pair.ingress_port}</ingress>'
        f"<egress>{pair.egress_port}</egress></{name}>"
        for pair in pairs
    )
    cross_connects = f'<cross-connects xmlns="{yang.NAMESPACE}">{entries}</cross-connects>'
    return f'<nc:config xmlns:nc="{BASE}">{cross_connects}</nc:config>'


def module_revision(capabilities: Collection[str], namespace: str, module: str) -> str | None:
    """Return the revision of a module that a <hello> announces as `NAMESPACE?module=NAME&revision=DATE` (RFC 6020,
    5.6.4). Return "" if the module is announced without a revision, and None if it is not announced."""
    for capability in sorted(capabilities, reverse=True):
        address, _, query = capability.strip().partition("?")
        announced = parse_qs(urlsplit(f"?{query}").query)
        if address == namespace and announced.get("module", [module]) == [module]:
            revision = announced.get("revision", [""])[0]
            return revision if yang.is_revision(revision) else ""
    return None


def _checked(reply: Any) -> Any:
    """Return the reply. Raises RpcRefused if it contains an <rpc-error> with a severity other than warning."""
    if errors := [error for error in reply.errors if error.severity != "warning"]:
        raise RpcRefused(errors)
    return reply


def _edit_candidate(manager: Any, config: str, how: dict[str, str]) -> None:
    # A candidate is shared, and a commit includes the edits of every client. The lock excludes others. It ends with the
    # session, and edits made under it are then discarded (RFC 6241, 8.3.5.2).
    _checked(manager.lock("candidate"))
    try:
        _checked(manager.discard_changes())
        _checked(manager.edit_config(config, target="candidate", **how))
        _checked(manager.commit())
    except RpcRefused:
        _checked(manager.discard_changes())
        raise
    finally:
        _checked(manager.unlock("candidate"))


async def _translated(command: str, work: Awaitable[T], *, is_setter: bool = False) -> T:
    """Await `work` and return its result. Errors of `work` are raised as driver errors."""
    try:
        return await work
    except RpcRefused as error:
        kind = DriverRetryable if error.is_busy else DriverPermanent
        raise kind("refused", command=command, answer=str(error)) from None
    except AuthenticationError as error:
        wrong = "authentication failed: check user, password and key_file"
        raise DriverPermanent(wrong, command=command, answer=str(error)) from None
    except SSHUnknownHostError as error:
        wrong = f"the host key is not trusted: set the option `host_key`, or add the key to known_hosts ({error})"
        raise DriverPermanent(wrong, command=command) from None
    except (SyntaxError, ValueError) as error:  # the former from the XML parser
        nonsense = DriverOutcomeUnknown if is_setter else DriverPermanent
        raise nonsense(f"invalid response: {error}", command=command) from None
    except (NCClientError, paramiko.SSHException, OSError, EOFError) as error:
        broken = DriverOutcomeUnknown if is_setter else DriverRetryable
        raise broken(f"the session failed: {str(error) or type(error).__name__}", command=command) from None


def _rpc_error_text(error: Any) -> str:
    """Format an <rpc-error> of the device as text for a message."""
    parts = (error.tag, error.app_tag, error.message, error.path and f"at {error.path}")
    return ": ".join(" ".join(str(part).split()) for part in parts if part) or "rpc-error"


class NetconfSwitch(ConfiguredSwitch, options=NetconfOptions, wire=NetconfWire):
    """The driver `netconf`. `address` is `HOST` or `HOST:PORT`.

    The device is authenticated by a host key in `known_hosts` (a file; by default the user's known_hosts file) or by
    `host_key` (base64, as in a known_hosts line), unless `verify_host_key` is false. Set `size`, such as 16x16 or
    32xCC, if the switch's model name does not contain it. Set `revision`, the revision of module optical-switch, if the
    switch does not announce it. Set `power` if the switch has power monitors.
    """
