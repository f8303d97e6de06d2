"""Read Polatis switches by their YANG models, for RESTCONF and NETCONF, and convert their names, statuses and port
numbers.

Data from either protocol has the structure of RFC 7951's JSON. Every function that reads data accepts any parsed JSON
and raises ValueError with the reason if it is invalid.

The models are the modules `optical-switch` (revisions 2017-08-04 and 2018-03-22) and `polatis-switch` (revision
2018-01-19), as published in opennetworkinglab/onos under models/polatis. As in the driver of ONOS, revisions before
2017-08-04 are assumed to call the list of cross-connects `pairs` and to have no `port-config`. Ports are assumed to be
numbered 1..N on the ingress side and N+1..N+M on the egress side. No leaf contains N and M, so they are read from the
model name, such as `I-OST-24x24-LU1-DMHNS` or, for any-to-any, `..576xCC..`. If the model name does not match the
ports, the user must set the size.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import SHOWN_CHARACTERS, DriverPermanent, shown
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchFacts,
)
from ocs_drivers.options import as_text, must_be
from ocs_drivers.settling import Settling

MODULE = "optical-switch"
NAMESPACE = "http://www.polatis.com/yang/optical-switch"
POLATIS_MODULE = "polatis-switch"
POLATIS_NAMESPACE = "http://www.polatis.com/yang/polatis-switch"

PAIR_REVISION = "2017-08-04"  # the first with `cross-connects/pair` and with `port-config`
PORT_NUMBERS = range(1, 65536)  # typedef portFormat

# Leaves of `product-information`.
PRODUCT = ("manufacturer", "model-name", "serial-number", "software-version")
# Leaf `port-config/port/status`; an UNSUPPORTED port has no shutter, so it cannot be closed either.
PORT_STATUS: Mapping[str, PortStatus] = {
    "UNSUPPORTED": PortStatus.ENABLED,
    **{status.name: status for status in PortStatus},
}
# Leaf `ports/port/port-status` of older revisions (typedef PortStatus).
OLD_PORT_STATUS: Mapping[str, PortStatus] = {f"PO_{status.name}": status for status in PortStatus}
# Leaf `system-config/startup-mode` of polatis-switch.
BOOT: Mapping[str, BootBehaviour] = {"MODE_VOLATILE": BootBehaviour.DARK, "MODE_PRESERVE": BootBehaviour.RESTORE}

_SIZE = re.compile(r"(?<![0-9A-Za-z])([0-9]{1,5})[xX]([0-9]{1,5}|[cC][cC])(?![0-9A-Za-z])")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

# Containers of `optical-switch`, as NETCONF and RESTCONF name them.
CROSS_CONNECTS = "cross-connects"
STARTUP_MODE = f"system-config/{POLATIS_MODULE}:startup-mode"

Sides = tuple[Connectivity, range, range]  # an any-to-any switch has one range of ports, given twice


def pair_list(revision: str) -> str:
    """Return the name of the list in the container `cross-connects` at this revision of `optical-switch`. Revisions are
    ISO dates and are compared as text."""
    return "pair" if revision >= PAIR_REVISION else "pairs"


def has_port_config(revision: str) -> bool:
    """Return whether this revision of `optical-switch` lists ports in `port-config`. Older revisions list them in
    `ports`."""
    return revision >= PAIR_REVISION


def is_revision(text: str) -> bool:
    return _DATE.fullmatch(text) is not None


def parse_size(text: str) -> Sides | None:
    """Return the connectivity, ingress ports and egress ports of a size such as `24x24` or `576xCC` found in the text,
    or None if the text contains no valid size."""
    found = _SIZE.search(text)
    if found is None:
        return None
    first = int(found[1])
    if found[2].upper() == "CC":
        return (Connectivity.ANY_TO_ANY, range(1, first + 1), range(1, first + 1)) if first > 1 else None
    second = int(found[2])
    if not first or not second:
        return None
    return Connectivity.INGRESS_EGRESS, range(1, first + 1), range(first + 1, first + second + 1)


def sides(model_name: str, ports: Collection[int], size: str | None = None) -> Sides:
    """Return the connectivity, ingress ports and egress ports according to the user's `size` or, if it is not set, to
    the model name.

    Raises DriverPermanent if the option or the model name, whichever is used, contains no size. Also raises it if the
    size does not match `ports`, the ports that the switch lists.
    """
    found = parse_size(size or model_name)
    source = f"the option `size` ({size!r})" if size else f"the model name {model_name!r}"
    if found is None:
        raise DriverPermanent(
            f"{source} does not contain a size: "
            "set the option `size`, for example to 16x16, or to 32xCC for an any-to-any switch"
        )
    _, ingress, egress = found
    if {*ingress, *egress} != set(ports):
        listed = f"{len(ports)} ports from {min(ports)} to {max(ports)}" if ports else "no ports"
        raise DriverPermanent(
            f"{source} implies ports {ingress[0]}..{egress[-1]}, but the switch lists {listed}: "
            "set the option `size`, for example to 16x16, or to 32xCC for an any-to-any switch"
        )
    return found


# Options; "" means not set.
Size = Annotated[
    str,
    must_be(
        "16x16, or 32xCC for any-to-any", lambda value: isinstance(value, str) and (not value or parse_size(value))
    ),
]
Revision = Annotated[
    str,
    must_be("a date such as 2017-08-04", lambda value: isinstance(value, str) and (not value or is_revision(value))),
    BeforeValidator(as_text),
]


def parse_port(value: object) -> int:
    """Parse a port number (`portFormat`), given as a JSON number or as text. Raises ValueError with the reason if it is
    invalid."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in PORT_NUMBERS:
        raise ValueError(f"a port must be a number within 1..65535, got {str(value)[:40]!r}")
    return value


def parse_status(value: object) -> PortStatus:
    """Parse a port's status, as either an old or a new revision of the model names it. Raises ValueError if the status
    is unknown."""
    status = {**PORT_STATUS, **OLD_PORT_STATUS}.get(value) if isinstance(value, str) else None
    if status is None:
        raise ValueError(f"a port's status must be one of {', '.join(PORT_STATUS)}, got {str(value)[:40]!r}")
    return status


def parse_power(value: object) -> float:
    """Parse an optical power in dBm (`floatFormat2d`), given as a number or, like a decimal64 in JSON (RFC 7951), as
    text. Raises ValueError if it is not a decimal number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or not re.fullmatch(r"-?[0-9]{1,6}(\.[0-9]{1,6})?", str(value))
    ):
        raise ValueError(f"optical power must be a decimal number, got {str(value)[:40]!r}")
    return float(value)


def information(data: object) -> dict[str, str] | None:
    """Return the leaves of `product-information` by name, with "" for missing leaves. Return None if the container is
    missing."""
    container = found(data, "product-information")
    if container is None:
        return None
    return {leaf: text_of(mapping(container, "product-information").get(leaf, ""), leaf) for leaf in PRODUCT}


def cross_connects(data: object) -> list[CrossConnect]:
    """Return the cross-connects in the container `cross-connects`. The list may be called `pair` or `pairs`. Raises
    ValueError if an ingress port is listed with two egress ports."""
    container = mapping(found(data, CROSS_CONNECTS), CROSS_CONNECTS)
    listed: dict[int, CrossConnect] = {}
    for name in ("pair", "pairs"):
        for entry in entries(container, name):
            pair = CrossConnect(parse_port(entry.get("ingress")), parse_port(entry.get("egress")))
            if listed.setdefault(pair.ingress_port, pair) != pair:
                raise ValueError(f"ingress port {pair.ingress_port} is listed twice")
    return list(listed.values())


def port_entries(data: object) -> dict[int, Mapping[str, object]]:
    """Return the entries of `port-config`, or of `ports` in older revisions, by port number. Raises ValueError if a
    port is listed twice."""
    listed: dict[int, Mapping[str, object]] = {}
    for container in ("port-config", "ports"):
        for entry in entries(mapping(found(data, container), container), "port"):
            number = parse_port(entry.get("port-id"))
            if number in listed:
                raise ValueError(f"port {number} is listed twice")
            listed[number] = entry
    return listed


def ports(data: object) -> list[PortState]:
    """Return the states of all ports. Statuses are in `port-config` and power values in `opm-power`. In older
    revisions, both are in `ports`."""
    powers = {
        parse_port(entry.get("port-id")): parse_power(entry["power"])
        for entry in entries(mapping(found(data, "opm-power"), "opm-power"), "port")
        if "power" in entry
    }
    states: list[PortState] = []
    for number, entry in port_entries(data).items():
        status = parse_status(entry.get("status", entry.get("port-status")))
        opm = entry.get("opm")
        power = opm.get("power") if isinstance(opm, Mapping) else None
        states.append(PortState(number, status, powers.get(number) if power is None else parse_power(power)))
    return states


def boot(data: object) -> BootBehaviour:
    mode = found(found(data, "system-config") or data, "startup-mode")
    return BOOT.get(mode, BootBehaviour.UNKNOWN) if isinstance(mode, str) else BootBehaviour.UNKNOWN


def found(data: object, name: str) -> object:
    """Return the member of `data` that is called `name`, with or without a module prefix. Return None if there is no
    such member."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key.rpartition(":")[2] == name:
                return value
    return None


def mapping(container: object, name: str) -> Mapping[str, object]:
    """Return the content of a container. The result is empty if the container is absent or, in XML, has no children.
    Raises ValueError for any value that is not a container. `name` is the container's name in the error."""
    if container is None or container == "":
        return {}
    if not isinstance(container, Mapping):
        raise ValueError(f"{name}: must be an object, got {shown(container)}")
    return container


def entries(container: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    """Yield the entries of the list called `name` in a container. Yield nothing if the list is absent. A list with one
    entry may be given as that entry, as it is in XML."""
    value = found(container, name)
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}: must be a list of objects, got {shown(entry)}")
        yield entry


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text, got {shown(value)}")
    return value[:SHOWN_CHARACTERS]


class PolatisWire(SwitchWire):
    """Implements the operations of `base.SwitchWire` that read a Polatis switch, regardless of the protocol. `hint` is
    appended to the error that is raised if the switch does not have the YANG model."""

    hint = ""

    def __init__(self, clock: DeviceClock, size: str | None, reconfiguration_s: float, *, has_power: bool) -> None:
        self._size = size
        self._reconfiguration_s = reconfiguration_s
        self._has_power = has_power
        self._revision = ""  # revision of `optical-switch`, once a session is open
        self._settling = Settling(clock, reconfiguration_s)
        self._listed: dict[frozenset[int], CrossConnect] = {}  # from the last reading, by the pair's ports

    @abstractmethod
    async def read(self, containers: Mapping[str, Sequence[str]]) -> Mapping[str, object]:
        """Read containers of `optical-switch`. `containers` maps each container to the leaves to read for each port, or
        to an empty sequence if all its content is to be read. A container that the switch does not have is omitted."""

    async def read_facts(self) -> SwitchFacts:
        data = await self.read({"product-information": (), STARTUP_MODE: (), **self._ports()})
        product = information(data)
        if product is None:
            raise DriverPermanent(f"the switch has no {MODULE} model{self.hint}")
        connectivity, ingress, egress = sides(product["model-name"], port_entries(data), self._size)
        return SwitchFacts(
            vendor=product["manufacturer"] or "Polatis",
            model=product["model-name"] or "unknown",
            serial=product["serial-number"],
            software=product["software-version"],
            connectivity=connectivity,
            ingress_ports=ingress,
            egress_ports=egress,
            reconfiguration_s=self._reconfiguration_s,
            boot=boot(data),
        )

    async def read_ports(self) -> Sequence[PortState]:
        containers = self._ports()
        if self._has_power and has_port_config(self._revision):
            containers["opm-power"] = ("port-id", "power")
        states = ports(await self.read(containers))
        return states if self._has_power else [replace(state, power_dbm=None) for state in states]

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        moving = self._settling.moving()
        listed = cross_connects(await self.read({CROSS_CONNECTS: ()}))
        self._listed = {pair.ports: pair for pair in listed}
        return self._settling.circuits(listed, moving)

    def as_listed(self, action: Action, pairs: Sequence[CrossConnect]) -> Sequence[CrossConnect]:
        """Return the pairs in the orientation in which the switch lists them, or unchanged if they are to be added. An
        any-to-any switch lists a pair under the port that was named first when the pair was connected, and removes the
        pair only under that port."""
        return pairs if action is Action.ADD else [self._listed.get(pair.ports, pair) for pair in pairs]

    def _ports(self) -> dict[str, Sequence[str]]:
        """Return the name of the container that lists ports at this revision, mapped to the leaves to read for each
        port."""
        if has_port_config(self._revision):
            return {"port-config": ("port-id", "status")}
        return {"ports": ("port-id", "port-status", *(["opm/power"] if self._has_power else []))}
