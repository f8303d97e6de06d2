"""Implement the parts of a NETCONF server that need no sockets: framing (RFC 6242), errors, and the datastores of an
emulated Polatis switch.

The YANG tree is generated as XML from the device's state at each request.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from ocs_drivers import polatis_yang as yang
from ocs_drivers.emulators.polatis import STARTUP, PolatisStore, YangRefusal, state_containers
from ocs_drivers.errors import DriverPermanent

BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
BASE_1_0 = "urn:ietf:params:netconf:base:1.0"
BASE_1_1 = "urn:ietf:params:netconf:base:1.1"
CAPABILITY = "urn:ietf:params:netconf:capability:"
NC = f"{{{BASE}}}"

END_OF_MESSAGE = b"]]>]]>"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_CHUNK = re.compile(rb"\n#(?:([1-9][0-9]{0,9})|(#))\n")
_HEADER_SO_FAR = re.compile(rb"(\n(#(#|[1-9][0-9]{0,9})?)?)?")


class FramingError(ValueError):
    """Raised if the received data violates NETCONF's framing. The session must then end (RFC 6242, 4.1)."""


class Framing:
    """Splits received bytes into messages, and frames messages to be sent. The initial framing is the end-of-message
    framing of base 1.0. The caller sets `is_chunked` when both peers have announced base 1.1."""

    def __init__(self) -> None:
        self.is_chunked = False
        self._received = b""

    def feed(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > MAX_MESSAGE_BYTES:
            raise FramingError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")

    def next(self) -> bytes | None:
        """Return the next complete message, or None if more data is needed."""
        if self.is_chunked:
            return self._next_chunked()
        message, end, rest = self._received.partition(END_OF_MESSAGE)
        if not end:
            return None
        self._received = rest
        return message

    def frame(self, message: bytes) -> bytes:
        return b"\n#%d\n%b\n##\n" % (len(message), message) if self.is_chunked else message + END_OF_MESSAGE

    def _next_chunked(self) -> bytes | None:
        message, at = b"", 0
        while header := _CHUNK.match(self._received, at):
            at = header.end() + int(header[1] or 0)
            if header[2]:
                if not message:
                    raise FramingError("the end of chunks must follow a chunk")
                self._received = self._received[at:]
                return message
            if len(self._received) < at:
                return None
            message += self._received[header.end() : at]
        if not _HEADER_SO_FAR.fullmatch(self._received, at):
            raise FramingError(f"a chunk must begin with \\n#LENGTH\\n, got {self._received[at : at + 20]!r}")
        return None


def error_element(refusal: YangRefusal) -> Element:
    told = {"error-type": refusal.kind, "error-tag": refusal.tag, "error-severity": "error"}
    told |= {"error-path": refusal.path, "error-message": refusal.message}
    return trees({"rpc-error": {name: text for name, text in told.items() if text}}, BASE)[0]


def child(parent: Element, name: str, text: object = None) -> Element:
    """Append a child element in the parent's namespace, and return the child."""
    namespace = parent.tag.rpartition("}")[0]
    element = SubElement(parent, f"{namespace}}}{name}" if namespace else name)
    if text is not None:
        element.text = str(text)
    return element


def trees(containers: Mapping[str, Any], namespace: str) -> list[Element]:
    """Convert plain data to XML elements of a namespace. A mapping becomes an element with children, and a list becomes
    several elements of the same name."""
    root = Element(f"{{{namespace}}}data")
    _fill(root, containers)
    return list(root)


def _fill(parent: Element, content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                _fill(child(parent, name), each)
            else:
                child(parent, name, each)


def local(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def write(element: Element) -> bytes:
    written: bytes = ElementTree.tostring(element, encoding="utf-8", xml_declaration=True)
    return written


def parse(message: bytes) -> Element:
    """Parse a message and return its root element. Raises YangRefusal if the message is not XML."""
    try:
        return ElementTree.fromstring(message.strip())
    except ElementTree.ParseError as error:
        raise YangRefusal("malformed-message", f"not XML: {error}", kind="rpc") from None


def hello(capabilities: list[str], session_id: int) -> Element:
    return trees({"hello": {"capabilities": {"capability": capabilities}, "session-id": session_id}}, BASE)[0]


NS = f"{{{yang.NAMESPACE}}}"
POLATIS_NS = f"{{{yang.POLATIS_NAMESPACE}}}"
OPERATION = f"{NC}operation"


class NetconfDatastores:
    """The datastores `running` and, if supported, `candidate`. `_candidate` is None while the candidate datastore has
    no edits and equals `running`."""

    def __init__(self, store: PolatisStore, *, has_candidate: bool, has_monitors: bool) -> None:
        self._store = store
        self._has_candidate = has_candidate
        self._has_monitors = has_monitors
        self._candidate: dict[int, int] | None = None
        self.locks: dict[str, int] = {}  # session that holds the lock, by datastore

    def config(self, source: str) -> list[Element]:
        """Return the configuration in a datastore as XML elements."""
        self._check_datastore(source)
        pairs = self._candidate if source == "candidate" else None
        return [*trees(self._store.container(pairs), yang.NAMESPACE), self._system()]

    def state(self) -> list[Element]:
        """Return the configuration and the state data as XML elements, as <get> returns them."""
        containers = state_containers(self._store.device, self._store.revision, has_monitors=self._has_monitors)
        return [*self.config("running"), *trees(containers, yang.NAMESPACE)]

    def lock(self, target: str, session: int) -> None:
        self._check_datastore(target)
        if (holder := self.locks.setdefault(target, session)) != session:
            raise YangRefusal("lock-denied", f"Lock failed, lock is already held by session {holder}", kind="protocol")

    def unlock(self, target: str, session: int) -> None:
        if self.locks.get(target) != session:
            raise YangRefusal("operation-failed", f"session {session} holds no lock on {target}", kind="protocol")
        del self.locks[target]
        if target == "candidate":
            self._candidate = None

    def leave(self, session: int) -> None:
        for target in [target for target, holder in self.locks.items() if holder == session]:
            self.unlock(target, session)

    def discard(self) -> None:
        self._check_datastore("candidate")
        self._candidate = None

    async def edit(self, request: Element, session: int, command: str) -> None:
        target = next((local(each) for each in request.iterfind(f"{NC}target/*")), "")
        self._check_datastore(target)
        if target == "running" and self._has_candidate:
            raise YangRefusal("operation-not-supported", "running cannot be edited: edit candidate and commit")
        self._refuse_locked(target, session)
        default = (request.findtext(f"{NC}default-operation") or "merge").strip()
        before = self._store.running()
        wanted = self._candidate if target == "candidate" and self._candidate is not None else dict(before)
        for config in request.iterfind(f"{NC}config"):
            self._apply(config, default, wanted)
        if target == "candidate":
            self._candidate = wanted
        else:
            await self._carry_out(before, wanted, command)

    async def commit(self, session: int, command: str) -> None:
        self._check_datastore("candidate")
        self._refuse_locked("running", session)
        self._refuse_locked("candidate", session)
        if self._candidate is not None:
            await self._carry_out(self._store.running(), self._candidate, command)
        self._candidate = None

    async def set_ports(self, request: Element, command: str) -> None:
        """Carry out the RPC port-set-state, which enables and disables ports."""
        asked: dict[str, list[object]] = {}
        for leaf in request:
            asked.setdefault(local(leaf), []).append((leaf.text or "").strip())
        await self._store.set_ports(asked, command)

    def _check_datastore(self, name: str) -> None:
        if name != "running" and not (name == "candidate" and self._has_candidate):
            raise YangRefusal("invalid-value", f"datastore {name or '(unnamed)'} does not exist", kind="protocol")

    def _refuse_locked(self, target: str, session: int) -> None:
        if self.locks.get(target, session) != session:
            raise YangRefusal("in-use", f"{target} is locked by session {self.locks[target]}", kind="protocol")

    def _apply(self, config: Element, default: str, wanted: dict[int, int]) -> None:
        for tree in config:
            if tree.tag != f"{NS}cross-connects":
                raise YangRefusal("unknown-element", f"{local(tree)} cannot be edited", kind="protocol")
            operation = tree.get(OPERATION, default)
            for entry in tree:
                if entry.tag != NS + self._store.list_name:
                    raise YangRefusal("unknown-element", f"unknown element {local(entry)}", f"/{local(tree)}")
                ports = [(entry.findtext(NS + name) or "").strip() for name in ("ingress", "egress")]
                self._store.edit(wanted, entry.get(OPERATION, operation), *ports)

    async def _carry_out(self, before: Mapping[int, int], wanted: Mapping[int, int], command: str) -> None:
        try:
            await self._store.carry_out(before, wanted, command)
        except DriverPermanent as error:
            raise YangRefusal("operation-failed", error.answer) from None

    def _system(self) -> Element:
        tree = Element(f"{NS}system-config")
        if mode := STARTUP.get(self._store.device.facts.boot):
            leaf = Element(f"{POLATIS_NS}startup-mode")
            leaf.text = mode
            tree.append(leaf)
        return tree
