"""Where engines listen that a peer installs into without having been started with their names: whether a URL is of
there. Pure."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar
from urllib.parse import urlsplit

_Name = TypeVar("_Name")

LOOPBACK = "loopback"  # the host that the daemon is on, by whichever of its names
_LAST_PORT = 65535
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """A host and ports of it."""

    host: str
    first: int = 0
    last: int = _LAST_PORT

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("must name a host")
        if not 0 <= self.first <= self.last <= _LAST_PORT:
            raise ValueError(f"ports must ascend within {_LAST_PORT}, got {self.first}-{self.last}")


def parse_where(word: str) -> EngineLocation:
    """HOST, HOST:PORT or HOST:FIRST-LAST; an IPv6 address in brackets where ports follow. Raises ValueError."""
    try:
        return EngineLocation(host_name(str(ipaddress.ip_address(word))))
    except ValueError:
        pass
    host, colon, ports = word.rpartition(":")
    if not colon or word.endswith("]"):
        return EngineLocation(host_name(word))
    first, _, last = ports.partition("-")
    if not first.isdecimal() or not (last.isdecimal() or ports == first):
        raise ValueError(f"must be HOST, HOST:PORT or HOST:FIRST-LAST, got {word!r}")
    return EngineLocation(host_name(host), int(first), int(last or first))


def host_name(host: str) -> str:
    """One name for what is the same."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" else name
    return LOOPBACK if address.is_loopback else str(address)


class EngineHosts(Generic[_Name]):
    """Who serves what listens where, of thousands."""

    def __init__(self, served: Iterable[tuple[_Name, Sequence[str]]]) -> None:
        """Each with its words, as `parse_where` reads them."""
        self._by_host: dict[str, list[tuple[EngineLocation, _Name]]] = {}
        for name, words in served:
            for where in filter(None, map(_parsed, words)):
                self._by_host.setdefault(where.host, []).append((where, name))

    def of(self, url: str) -> list[_Name]:
        """Each once, in the order that they were given in."""
        found = _place(url)
        if found is None:
            return []
        host, port = found
        there = self._by_host.get(host, ())
        return list(dict.fromkeys(name for where, name in there if where.first <= port <= where.last))


@lru_cache(maxsize=65536)
def _place(url: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return None
    return (host_name(parts.hostname), port) if parts.hostname else None


@lru_cache(maxsize=65536)
def _parsed(word: str) -> EngineLocation | None:
    """What a peer of another release says that makes no sense here is of no engine."""
    try:
        return parse_where(word)
    except ValueError:
        return None
