"""Addresses as they are written. Apart from the configuration, which commands that only ask a daemon need not load."""

import ipaddress
import os
import socket
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_TARGET = "127.0.0.1:7070"  # where a daemon listens

# localhost and 127.0.0.1. Servers on IPv6's may be others, on one port.
LOOPBACK = "127.0.0.1"
LOOPBACK_IPV6 = "::1"
_ANY = {"0.0.0.0": LOOPBACK, "::": LOOPBACK_IPV6}  # as an address to connect to
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:7070` or `[::1]:7070` as host and port; ValueError with what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port of 0 to 65535")
    return host.strip("[]"), int(port)


def http_url(host: str, port: int | str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def remote_fault(host: str, allow: str) -> str:
    """Return what is wrong with listening there; empty for loopback. `allow`: what permits other addresses."""
    if is_loopback(host):
        return ""
    return f"is not a loopback address; {allow} to serve other machines"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address; None for a name."""
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
    """The address in a URL, so that two spellings of one address are equal."""

    host: str
    port: int
    path: str

    @property
    def local(self) -> bool:
        """Whether the address means another server on each host."""
        return is_loopback(self.host)

    @property
    def by_ipv4(self) -> "ServerAddress":
        """With the usual loopback address in place of IPv6's."""
        return replace(self, host=LOOPBACK) if self.host == LOOPBACK_IPV6 else self


@lru_cache(maxsize=16384)  # of a fleet's URLs, which are compared again and again
def server_address(url: str) -> ServerAddress | None:
    """Return the address in an http or https URL, or None where it is no such URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a bracket that is not closed, a port that is no number
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host or port == 0:
        return None
    return ServerAddress(_host(host), port or _DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def without_login(url: str) -> str:
    """The URL for a message or another process: without a user's name and password."""
    before, mark, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/")
    return f"{before}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def same_address(one: str, other: str) -> bool:
    """Whether two URLs, used from one host, lead to one address."""
    address = server_address(one)
    return address is not None and address == server_address(other)


def _host(host: str) -> str:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return LOOPBACK
    ip = ip_of(name.partition("%")[0])
    if ip is None:
        try:  # the short forms that resolvers take, e.g. 127.1
            ip = ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(name)))
        except (OSError, ValueError):
            return name
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return _ANY.get(str(ip), str(ip))


def host_id() -> str:
    """Identify the network stack of this process: where it is equal, loopback addresses mean the same servers.

    It is the host's name, its boot and the network namespace: containers of one machine have loopback addresses of
    their own, and machines that were cloned may share the rest. Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/net")
    except (OSError, UnicodeDecodeError):
        return ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def check_url(url: str) -> str:
    """The URL of an engine. Raises ValueError with what is wrong."""
    address = server_address(url)
    if address is None:
        raise ValueError("must be an http:// or https:// URL")
    if address.path.endswith("/v1"):
        raise ValueError("must be the server's URL without /v1, which is added to it")
    return url
