"""Addresses as they are written. Apart from the configuration, which commands that only ask a daemon need not load."""

import ipaddress


def parse_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:7070` or `[::1]:7070` as host and port; ValueError with what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port of 0 to 65535")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
