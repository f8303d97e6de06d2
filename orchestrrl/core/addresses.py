"""Parse and compare network addresses. This module does not import the configuration, so that commands that only query
a daemon start quickly."""

import ipaddress
import os
import socket
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_TARGET = "127.0.0.1:7070"  # the daemon's default address

# The canonical form of localhost and 127.0.0.1. On IPv6's loopback address, other servers may use the same port.
LOOPBACK = "127.0.0.1"
LOOPBACK_IPV6 = "::1"
_ANY = {"0.0.0.0": LOOPBACK, "::": LOOPBACK_IPV6}  # for connecting
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_address(address: str) -> tuple[str, int]:
    """Split an address such as `127.0.0.1:7070` or `[::1]:7070` into host and port. Raises ValueError if the address is
    malformed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port of 0 to 65535")
    return host.strip("[]"), int(port)


def http_url(host: str, port: int | str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def remote_fault(host: str, allow: str) -> str:
    """Return an error message if `host` is not a loopback address, or "" if it is one. In the message, `allow`
    describes the setting that permits other addresses."""
    if is_loopback(host):
        return ""
    return f"is not a loopback address; {allow} to serve other machines"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse `host` as an IP address. Return None if it is a host name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(maxsize=16384)
def is_loopback(host: str) -> bool:
    ip = ip_of(host)
    return host == "localhost" if ip is None else ip.is_loopback


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The host, port and path of a URL, normalized so that different spellings of the same address are equal."""

    host: str
    port: int
    path: str

    @property
    def local(self) -> bool:
        """True if the address is a loopback address, which denotes a different server on each host."""
        return is_loopback(self.host)

    @property
    def by_ipv4(self) -> "ServerAddress":
        """The same address, but with 127.0.0.1 in place of the IPv6 loopback address."""
        return replace(self, host=LOOPBACK) if self.host == LOOPBACK_IPV6 else self


@lru_cache(maxsize=16384)  # a fleet's URLs are compared repeatedly
def server_address(url: str) -> ServerAddress | None:
    """Return the server's address in an http or https URL, or None for any other text."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a bracket that is not closed, or a port that is not a number
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host or port == 0:
        return None
    return ServerAddress(_host(host), port or _DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def without_login(url: str) -> str:
    """Return the URL without user name and password, so that it can be shown or passed to another process."""
    before, mark, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/")
    return f"{before}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def same_address(one: str, other: str) -> bool:
    """Return whether two URLs refer to the same server address when used from the same host."""
    address = server_address(one)
    return address is not None and address == server_address(other)


def _host(host: str) -> str:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return LOOPBACK
    ip = ip_of(name.partition("%")[0])
    if ip is None:
        try:  # short forms that resolvers accept, e.g. 127.1
            ip = ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(name)))
        except (OSError, ValueError):
            return name
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return _ANY.get(str(ip), str(ip))


def host_id() -> str:
    """Return an id of this process's network stack, or "" if the system does not provide the parts of the id. Processes
    with equal ids reach the same servers on loopback addresses.

    The id consists of the host's name, its boot id and the network namespace. The namespace is needed because
    containers on one machine have separate loopback addresses. The host's name is needed because cloned machines may
    have the same boot id and namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/net")
    except (OSError, UnicodeDecodeError):
        return ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def check_url(url: str) -> str:
    """Return an engine's URL unchanged. Raises ValueError if `url` is not an http or https URL, or if its path ends
    with /v1."""
    address = server_address(url)
    if address is None:
        raise ValueError("must be an http:// or https:// URL")
    if address.path.endswith("/v1"):
        raise ValueError("must be the server's URL without /v1, which is appended automatically")
    return url
