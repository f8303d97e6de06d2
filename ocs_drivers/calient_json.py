"""Parse the JSON answers of a Calient switch's REST interface, without side effects.

The functions take parsed JSON of any type and raise ValueError, with the reason, if it does not have the expected form.
Ports have names, `SHELF.MODULE.PORT`, and are numbered from 1 in the order of these names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ocs_drivers.errors import SHOWN_CHARACTERS, shown
from ocs_drivers.model import PortStatus

MAX_PORTS = 65535
SUCCESS = "1"

_NAME = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}")
_POWER = re.compile(r"-?[0-9]{1,4}(\.[0-9]{1,6})?")
_BROKEN = ("FAIL", "FLT", "FAULT")


@dataclass(frozen=True, slots=True)
class CalientHalf:
    """One direction of a connection."""

    source: str  # names of ports
    target: str
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class CalientConnection:
    """One row of `crossconnects/?id=list`: a connection in one direction or in both directions."""

    halves: tuple[CalientHalf, ...]
    group: str = ""

    @property
    def conn(self) -> str:
        """The name of this connection in a delete request."""
        return f"{self.halves[0].source}{'-' if len(self.halves) == 2 else '>'}{self.halves[0].target}"


class PortNames:
    """Assigns numbers, from 1, to the ports of a switch. The ports are sorted by the numeric parts of their names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(set(names), key=lambda name: tuple(map(int, name.split(".")))))
        self._numbers = {name: number for number, name in enumerate(self.names, start=1)}

    def name(self, number: int) -> str:
        if not 1 <= number <= len(self.names):
            raise ValueError(f"port must be within 1..{len(self.names)}, got {number}")
        return self.names[number - 1]

    def number(self, name: str) -> int:
        if name not in self._numbers:
            raise ValueError(f"the switch lists no port {name!r}")
        return self._numbers[name]


def ports(body: object) -> dict[str, tuple[PortStatus, float | None]]:
    """Return the status and the power in dBm of each port, by port name. The power is None if the switch reports no
    number. `body` contains the rows of `ports/?id=summary` or `?id=detail`.

    The status is derived from the states in a row. Only rows of `?id=detail` have states; without them, a port is
    considered enabled. `as` is the administrative state, such as IS, OOS-MA or OOS-MT. OOS-NP means that the port is
    not provisioned and therefore free. `os` and `oc` are the states of the hardware.
    """
    found: dict[str, tuple[PortStatus, float | None]] = {}
    for row in _rows(body, "port"):
        name = _name(row.get("port"))
        if name in found:
            raise ValueError(f"the device lists port {name} twice")
        found[name] = _status(row), _power(row.get("inpower"))
    if not 2 <= len(found) <= MAX_PORTS:
        raise ValueError(f"the switch must list 2..{MAX_PORTS} ports, got {len(found)}")
    return found


def connections(body: object) -> list[CalientConnection]:
    found = []
    for row in _rows(body, "half1"):
        halves = [_half(row[name]) for name in ("half1", "half2") if row.get(name)]
        if len(halves) == 2 and (halves[1].source, halves[1].target) != (halves[0].target, halves[0].source):
            raise ValueError(f"half2 must be the reverse of half1, got {shown(row)}")
        group = row.get("group")
        found.append(CalientConnection(tuple(halves), group if isinstance(group, str) else ""))
    return found


def failures(body: object, count: int) -> list[str]:
    """Return one text for each of the request's `count` items, in order: the reason why the item failed, or "" if it
    succeeded. If the answer contains a single failure, that failure applies to all items. Raises ValueError if the
    answer does not cover all items."""
    items = body if isinstance(body, list) else [body]
    found = [_failure(item) for item in items]
    if len(found) == 1 and (count == 1 or found[0]):
        return found * count
    if len(found) != count:
        raise ValueError(f"the response must contain {count} results, got {len(found)}")
    return found


def text(body: object, name: str) -> str:
    """Return the member `name` of a JSON object or, for a list, of its first object. Return "" if the member is absent
    or is not a string."""
    item = body[0] if isinstance(body, list) and body else body
    value = item.get(name) if isinstance(item, Mapping) else None
    return value[:SHOWN_CHARACTERS] if isinstance(value, str) else ""


def _rows(body: object, key: str) -> Iterator[Mapping[str, object]]:
    """Yield the objects of `body`, which is a list or a single object. Raises ValueError if an object has no member
    `key`. If the switch reported a failure instead, the error contains the switch's message."""
    for row in body if isinstance(body, list) else [body]:
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must be an object, got {shown(row)}")
        if key not in row:
            words = ("status" in row and _failure(row)) or shown(row)
            raise ValueError(f"a row must contain the field {key}, got {words}")
        yield row


def _failure(item: object) -> str:
    inner = item.get("response", item) if isinstance(item, Mapping) else None
    if not isinstance(inner, Mapping) or isinstance(inner.get("status"), bool):
        raise ValueError(f"a result must have a status, got {shown(item)}")
    status = inner.get("status")
    if not isinstance(status, str | int):
        raise ValueError(f"a result must have a status, got {shown(item)}")
    if str(status) == SUCCESS:
        return ""
    told = (inner.get("msg"), inner.get("description"))
    words = ": ".join(word[:SHOWN_CHARACTERS] for word in told if isinstance(word, str) and word)
    return words or f"status {str(status)[:SHOWN_CHARACTERS]}"


def _half(value: object) -> CalientHalf:
    conn = value.get("conn") if isinstance(value, Mapping) else None
    source, arrow, target = conn.partition(">") if isinstance(conn, str) else ("", "", "")
    if not isinstance(value, Mapping) or not arrow:
        raise ValueError(f"half1 and half2 must have a field conn of the form 1.1.1>1.2.1, got {shown(value)}")
    return CalientHalf(
        _name(source.strip()), _name(target.strip()), _is_broken(value.get(key) for key in ("os", "oc", "state"))
    )


def _status(row: Mapping[str, object]) -> PortStatus:
    if _is_broken(row.get(key) for key in ("inos", "inoc", "outos", "outoc", "os", "oc")):
        return PortStatus.FAILED
    told = (row.get(key) for key in ("inas", "outas", "as"))
    is_out = any(isinstance(word, str) and word.startswith("OOS") and word != "OOS-NP" for word in told)
    return PortStatus.DISABLED if is_out else PortStatus.ENABLED


def _is_broken(words: Iterable[object]) -> bool:
    return any(isinstance(word, str) and any(sign in word.upper() for sign in _BROKEN) for word in words)


def _power(value: object) -> float | None:
    """Return the power in dBm, or None if the value is not a number. A port without light may report text instead."""
    told = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    return float(told) if _POWER.fullmatch(told) else None


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.isascii() or not _NAME.fullmatch(value):
        raise ValueError(f"a port name must have the form 1.2.3, got {shown(value)}")
    return value
