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

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import paramiko
from ncclient import NCClientError
from ncclient.transport.errors import AuthenticationError, SSHUnknownHostError

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import Action, CrossConnect, SwitchCapabilities
from ocs_drivers.netconf_session import NetconfOptions, NetconfSession
from ocs_drivers.options import ConfiguredSwitch

T = TypeVar("T")

BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
CAPABILITY = "urn:ietf:params:netconf:capability:"
NAMESPACES = {yang.MODULE: yang.NAMESPACE, yang.POLATIS_MODULE: yang.POLATIS_NAMESPACE}
OPERATION = {Action.ADD: "merge", Action.REMOVE: "delete"}
# The device is asked to wait for somebody else: nothing was done.
BUSY_TAGS = frozenset({"lock-denied", "in-use", "resource-denied"})


class RpcRefused(Exception):
    """The device answered with <rpc-error>."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__("; ".join(_rpc_error_text(error) for error in errors))
        self.is_busy = any(error.tag in BUSY_TAGS for error in errors)


class NetconfWire(yang.PolatisWire):
    """The `base.SwitchWire` of one switch."""

    def __init__(self, options: NetconfOptions, clock: DeviceClock) -> None:
        super().__init__(clock, options.size, options.reconfiguration_s, has_power=options.power)
        self.capabilities = SwitchCapabilities(bulk=True, port_power=options.power)
        self._options = options
        self._session: NetconfSession | None = None
        self._announced: frozenset[str] = frozenset()

    async def open(self) -> None:
        self._session = NetconfSession(self._options)
        try:
            self._announced = await _translated("open", self._session.open())
            told = module_revision(self._announced, yang.NAMESPACE, yang.MODULE)
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

    async def read(self, containers: Mapping[str, Sequence[str]], parse: Callable[[object], T]) -> T:
        is_known = module_revision(self._announced, yang.POLATIS_NAMESPACE, yang.POLATIS_MODULE) is not None
        wanted = [subtree(name, leaves) for name, leaves in containers.items() if name != yang.STARTUP_MODE or is_known]
        is_config = yang.CROSS_CONNECTS in containers

        def ask(manager: Any) -> Any:
            request = manager.get_config("running", filter=wanted) if is_config else manager.get(filter=wanted)
            return _checked(request).data_ele

        data = await _translated("read", self._live().call(ask))
        if data is None:
            raise DriverPermanent("the answer has no <data>")
        return parse(plain(data))

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        try:
            await self._set(Action.ADD, pairs)
        finally:
            self._settling.commanded(pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(Action.REMOVE, [self.as_listed(pair) for pair in pairs])

    async def _set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        config = edit(self._revision, action, pairs)
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
        return CAPABILITY + capability in self._announced

    def _live(self) -> NetconfSession:
        if self._session is None:
            raise DriverRetryable("there is no session", after_s=0.0)
        return self._session


def subtree(container: str, leaves: Sequence[str] = ()) -> str:
    """A filter's criterion: the named leaves of each port of a container, or all of it. A path's parts may name their
    module, as `system-config/polatis-switch:startup-mode`, and a leaf may be a path, as `opm/power`."""
    inner = "".join(_nested(leaf.split("/")) for leaf in leaves)
    return _nested(f"{yang.MODULE}:{container}".split("/"), f"<port>{inner}</port>" if inner else "")


def _nested(path: Sequence[str], content: str = "") -> str:
    for part in reversed(path):
        module, _, name = part.rpartition(":")
        attribute = f' xmlns="{NAMESPACES[module]}"' if module else ""
        content = f"<{name}{attribute}>{content}</{name}>" if content else f"<{name}{attribute}/>"
    return content


def plain(element: Any) -> dict[str, object]:
    """The children of an element of lxml or the standard library as JSON would have them, without namespaces."""
    found: dict[str, list[object]] = {}
    for child in element:
        if isinstance(child.tag, str):  # no comment
            value = plain(child) if len(child) else (child.text or "").strip()
            found.setdefault(child.tag.rpartition("}")[2], []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def edit(revision: str, action: Action, pairs: Sequence[CrossConnect]) -> str:
    """The <config> that does this to these pairs and, with default operation `none`, nothing to others."""
    if not pairs:
        raise ValueError("a setter with an empty list: on some devices that means every circuit")
    name, operation = yang.pair_list(revision), OPERATION[action]
    entries = "".join(
        f'<{name} nc:operation="{operation}"><ingress>{pair.ingress_port}</ingress>'
        f"<egress>{pair.egress_port}</egress></{name}>"
        for pair in pairs
    )
    cross_connects = f'<cross-connects xmlns="{yang.NAMESPACE}">{entries}</cross-connects>'
    return f'<nc:config xmlns:nc="{BASE}">{cross_connects}</nc:config>'


def module_revision(capabilities: Collection[str], namespace: str, module: str) -> str | None:
    """The revision of a module as a <hello> announces it: `NAMESPACE?module=NAME&revision=DATE` (RFC 6020, 5.6.4).
    "" if it has none, None if the module is not announced."""
    for capability in sorted(capabilities, reverse=True):
        address, _, query = capability.strip().partition("?")
        announced = parse_qs(urlsplit(f"?{query}").query)
        if address == namespace and announced.get("module", [module]) == [module]:
            revision = announced.get("revision", [""])[0]
            return revision if yang.is_revision(revision) else ""
    return None


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
