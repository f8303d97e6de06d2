"""NETCONF as bytes and as a tree: framing (RFC 6242), errors. Pure."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element, SubElement

BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
BASE_1_0 = "urn:ietf:params:netconf:base:1.0"
BASE_1_1 = "urn:ietf:params:netconf:base:1.1"
CAPABILITY = "urn:ietf:params:netconf:capability:"
NC = f"{{{BASE}}}"

END_OF_MESSAGE = b"]]>]]>"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_CHUNK = re.compile(rb"\n#(?:([1-9][0-9]{0,9})|(#))\n")


class FramingError(ValueError):
    """What came is not NETCONF: the session must end (RFC 6242, 4.1)."""


class Framing:
    """Bytes to messages. Begins with the end-of-message framing of base 1.0; `is_chunked` is set once both sides have
    said that they speak base 1.1."""

    def __init__(self) -> None:
        self.is_chunked = False
        self._received = b""
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self._received += data
        if len(self._received) + sum(map(len, self._chunks)) > MAX_MESSAGE_BYTES:
            raise FramingError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")

    def next(self) -> bytes | None:
        """A whole message, or None if more has to come."""
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
        while header := _CHUNK.match(self._received):
            if header[2]:
                if not self._chunks:
                    raise FramingError("an end of chunks without a chunk")
                message, self._chunks = b"".join(self._chunks), []
                self._received = self._received[header.end() :]
                return message
            end = header.end() + int(header[1])
            if len(self._received) < end:
                return None
            self._chunks.append(self._received[header.end() : end])
            self._received = self._received[end:]
        if not _may_become_a_header(self._received):
            raise FramingError(f"a chunk must begin with \\n#LENGTH\\n, got {self._received[:20]!r}")
        return None


class RpcError(Exception):
    """An <rpc-error> to answer with."""

    def __init__(self, tag: str, message: str, path: str = "", kind: str = "application") -> None:
        super().__init__(message)
        self.tag = tag
        self.message = message
        self.path = path
        self.kind = kind

    def element(self) -> Element:
        error = Element(f"{NC}rpc-error")
        told = {"error-type": self.kind, "error-tag": self.tag, "error-severity": "error", "error-path": self.path}
        for name, text in (*told.items(), ("error-message", self.message)):
            if text:
                SubElement(error, NC + name).text = text
        return error


def child(parent: Element, name: str, text: object = None) -> Element:
    """A new child in its parent's namespace."""
    namespace = parent.tag.rpartition("}")[0]
    element = SubElement(parent, f"{namespace}}}{name}" if namespace else name)
    if text is not None:
        element.text = str(text)
    return element


def trees(containers: Mapping[str, Any], namespace: str) -> list[Element]:
    """Return plain data as elements of a namespace: a mapping has children, a list has entries of one name."""
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
    """Raises RpcError for what is not XML."""
    try:
        return ElementTree.fromstring(message.strip())
    except ElementTree.ParseError as error:
        raise RpcError("malformed-message", f"not XML: {error}", kind="rpc") from None


def hello(capabilities: list[str], session_id: int) -> Element:
    root = Element(f"{NC}hello")
    listed = child(root, "capabilities")
    for capability in capabilities:
        child(listed, "capability", capability)
    child(root, "session-id", session_id)
    return root


def _may_become_a_header(received: bytes) -> bool:
    return re.fullmatch(rb"(\n(#(#|[1-9][0-9]{0,9})?)?)?", received) is not None
