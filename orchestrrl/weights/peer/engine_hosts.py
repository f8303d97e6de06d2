"""Which peers install into the engines of which hosts, where the daemon tells peers of engines. Pure."""

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from orchestrrl.core.addresses import server_address

_Name = TypeVar("_Name")

LOOPBACK = "loopback"  # the host that the daemon is on, by whichever of its names


def host_name(host: str) -> str:
    """One name for what is the same."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" else name
    return LOOPBACK if address.is_loopback else str(address)


class EngineHosts(Generic[_Name]):
    """Names, each with the hosts whose engines it serves."""

    def __init__(self, served: Iterable[tuple[_Name, Sequence[str]]]) -> None:
        self._by_host: dict[str, list[_Name]] = {}
        for name, hosts in served:
            for host in hosts:
                self._by_host.setdefault(host_name(host), []).append(name)

    def of(self, url: str) -> list[_Name]:
        """Who serves an engine that listens there: each once, in the order that they were given in."""
        address = server_address(url)
        return list(dict.fromkeys(self._by_host.get(host_name(address.host), ()))) if address is not None else []
