"""The driver `netconf`: Polatis switches by their YANG model over NETCONF (RFC 6241), SSH port 830, with ncclient.

Relied on, besides what polatis_yang.py says: the <hello> names the revision of module `optical-switch`; cross-connects
are edited in `running` (what working clients do), or in `candidate`, under a lock and followed by a commit, where only
that can be written; one <edit-config> carries many pairs. Each pair is marked `merge` or `delete` and the default
operation is `none`: nothing that is not named can be touched, and no request replaces or deletes the collection.

Unknown, and not relied upon: whether an edit is atomic (it is read back), whether the mirrors are in place when a pair
is listed (`tuned_state` is not declared; a pair counts as tuned when the stated time has passed), whether
`:confirmed-commit` works. Events are not declared either: there is a notification stream (RFC 5277), but it carries
power and system alarms; of cross-connects it tells only in the free text of an activity log, where an administrator has
switched that on.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import paramiko
from ncclient import NCClientError
from ncclient.transport.errors import AuthenticationError, SSHUnknownHostError

from ocs_drivers import netconf_xml as xml
from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CrossConnect,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.netconf_session import NetconfLogin, NetconfSession
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
from ocs_drivers.settling import Settling

T = TypeVar("T")

DEFAULT_PORT = 830
# The device is asked to wait for somebody else: nothing was done.
BUSY_TAGS = frozenset({"lock-denied", "in-use", "resource-denied"})


class RpcRefused(Exception):
    """The device answered with <rpc-error>."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__("; ".join(_rpc_error_text(error) for error in errors))
        self.is_busy = any(error.tag in BUSY_TAGS for error in errors)


class NetconfOptions(DriverOptions):
    """`revision` "": as the device announces it. `size` "": as in the model name."""

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
        return [] if self.password or self.key_file else ["password: must be set, or key_file, got ''"]

    def new_session(self) -> NetconfSession:
        host, port = split_address(self.address, DEFAULT_PORT)
        proof = (self.known_hosts, self.host_key, self.verify_host_key)
        login = NetconfLogin(host, port, self.user, self.password, self.key_file, *proof)
        # The driver's own limit comes first; that of the thread is for what nobody is left to cut.
        return NetconfSession(login, 2 * self.command_timeout_s)


class NetconfWire(SwitchWire):
    """The `base.SwitchWire` of one switch."""

    def __init__(self, options: NetconfOptions, clock: DeviceClock) -> None:
        self.capabilities = SwitchCapabilities(bulk=True, port_power=options.power)
        self._options = options
        self._settling = Settling(clock, options.reconfiguration_s)
        self._as_listed: dict[frozenset[int], CrossConnect] = {}
        self._session: NetconfSession | None = None
        self._announced: frozenset[str] = frozenset()
        self._revision = ""

    async def open(self) -> None:
        self._session = self._options.new_session()
        try:
            self._announced = await _translated("open", self._session.open())
            told = xml.module_revision(self._announced, yang.NAMESPACE, yang.MODULE)
            self._revision = self._options.revision or told or ""
            if not self._revision:
                what = "the revision of module" if told == "" else "module"
                raise DriverPermanent(
                    f"the device does not announce {what} {yang.MODULE}: set option revision, as 2018-03-22",
                    answer=" ".join(sorted(self._announced)),
                )
        except DriverPermanent:
            await self.close()
            raise

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read_facts(self) -> SwitchFacts:
        filters = [xml.PRODUCT_FILTER, xml.ports_filter(self._revision, "port-id")]
        if xml.module_revision(self._announced, yang.POLATIS_NAMESPACE, yang.POLATIS_MODULE) is not None:
            filters.append(xml.STARTUP_FILTER)
        data = await self._get(filters)
        told = xml.product(data)
        ports = xml.port_numbers(data, self._revision)
        boot = yang.BOOT.get(xml.startup_mode(data), BootBehaviour.UNKNOWN)
        return yang.switch_facts(told, ports, self._options.size, self._options.reconfiguration_s, boot)

    async def read_ports(self) -> Sequence[PortState]:
        with_power = self._options.power
        if yang.has_port_config(self._revision):
            filters = [xml.ports_filter(self._revision, "port-id", "status"), *([xml.POWER_FILTER] * with_power)]
        else:
            filters = [xml.ports_filter(self._revision, "port-id", "port-status", *(["opm/power"] * with_power))]
        data = await self._get(filters)
        return xml.port_states(data, self._revision, with_power=with_power)

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        moving = self._settling.moving()
        data = await self._read(lambda manager: manager.get_config("running", filter=[xml.CROSS_CONNECTS_FILTER]))
        listed = xml.cross_connects(data, self._revision)
        self._as_listed = {pair.ports: pair for pair in listed}
        return self._settling.circuits(listed, moving)

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        try:
            await self._set(Action.ADD, pairs)
        finally:
            self._settling.commanded(pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        # An any-to-any switch lists a pair under the port that was named first when it was made.
        listed = (self._as_listed.get(pair.ports, pair) for pair in pairs)
        await self._set(Action.REMOVE, tuple(listed))

    async def _set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        config = xml.edit(self._revision, action, pairs)
        is_direct = self._can("writable-running:1.0")
        if not is_direct and not self._can("candidate:1.0"):
            raise DriverPermanent("the device announces neither :writable-running nor :candidate: it cannot be changed")
        how = {"default_operation": "none"}
        if self._can("rollback-on-error:1.0"):
            how["error_option"] = "rollback-on-error"

        def work(manager: Any) -> None:
            if is_direct:
                _checked(manager.edit_config(config, target="running", **how))
            else:
                _edit_candidate(manager, config, how)

        await _translated(f"edit-config {config}", self._live().call(work), is_setter=True)

    def _can(self, capability: str) -> bool:
        return xml.CAPABILITY + capability in self._announced

    async def _get(self, filters: Sequence[str]) -> Any:
        return await self._read(lambda manager: manager.get(filter=list(filters)))

    async def _read(self, request: Callable[[Any], Any]) -> Any:
        """The <data> of the reply."""
        data = await _translated("read", self._live().call(lambda manager: _checked(request(manager)).data_ele))
        if data is None:
            raise DriverPermanent("the answer has no <data>")
        return data

    def _live(self) -> NetconfSession:
        if self._session is None:
            raise DriverRetryable("there is no session", after_s=0.0)
        return self._session


def _checked(reply: Any) -> Any:
    """The reply, unless it has an <rpc-error> that is more than a warning."""
    if errors := [error for error in reply.errors if error.severity != "warning"]:
        raise RpcRefused(errors)
    return reply


def _edit_candidate(manager: Any, config: str, how: dict[str, str]) -> None:
    # A candidate is shared, and whoever commits it commits what everybody has left in it. The lock keeps others out; it
    # ends with the session, and what was edited under it is then discarded (RFC 6241, 8.3.5.2).
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
    """The work's result, or its error as one of ours."""
    try:
        return await work
    except RpcRefused as error:
        kind: type[DriverRetryable] | type[DriverPermanent] = DriverRetryable if error.is_busy else DriverPermanent
        raise kind("refused", command=command, answer=str(error)) from None
    except AuthenticationError as error:
        raise DriverPermanent(
            "not let in: check user, password and key_file", command=command, answer=str(error)
        ) from None
    except SSHUnknownHostError as error:
        wrong = f"its host key is not the one that is known: give host_key, or put it into known_hosts ({error})"
        raise DriverPermanent(wrong, command=command) from None
    except (SyntaxError, ValueError) as error:  # the former: of XML
        nonsense: type[DriverPermanent] | type[DriverOutcomeUnknown] = (
            DriverOutcomeUnknown if is_setter else DriverPermanent
        )
        raise nonsense(f"the answer makes no sense: {error}", command=command) from None
    except (NCClientError, paramiko.SSHException, OSError, EOFError) as error:
        broken: type[DriverRetryable] | type[DriverOutcomeUnknown] = (
            DriverOutcomeUnknown if is_setter else DriverRetryable
        )
        raise broken(f"the session broke: {error or type(error).__name__}", command=command) from None


def _rpc_error_text(error: Any) -> str:
    """An <rpc-error>, as the device put it."""
    parts = (error.tag, error.app_tag, error.message, error.path and f"at {error.path}")
    return ": ".join(" ".join(str(part).split()) for part in parts if part) or "rpc-error"


class NetconfSwitch(ConfiguredSwitch, options=NetconfOptions, wire=NetconfWire):
    """The driver `netconf`. `address` is `HOST` or `HOST:PORT`.

    The device must prove who it is by a host key in `known_hosts` (a file; by default the user's own) or by `host_key`
    (base64, as in a known_hosts line), unless `verify_host_key` is false. `size`, as 16x16 or 32xCC, is for switches
    whose model name does not tell; `revision` of module optical-switch for those that do not announce it; `power`
    for those with power monitors.
    """
