"""What Polatis switches say in YANG, over RESTCONF and over NETCONF alike: names, statuses, port numbers. Pure.

Modules `optical-switch` and `polatis-switch`, as published in opennetworkinglab/onos under models/polatis (revisions
2017-08-04 and 2018-03-22, 2018-01-19). Relied on: the list of cross-connects is called `pairs` before revision
2017-08-04 (as in onos' driver), which also has no `port-config`; ports are numbered 1..N on the ingress side and
N+1..N+M on the egress side. Unknown: how a switch tells N from M. No leaf holds it, so it is read from the model name
(`I-OST-24x24-LU1-DMHNS`; `..576xCC..` for any-to-any), and where that does not fit the ports, the user must give it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated

from pydantic import BeforeValidator

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import BootBehaviour, Connectivity, PortStatus, SwitchFacts
from ocs_drivers.options import must_be

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
    "ENABLED": PortStatus.ENABLED,
    "DISABLED": PortStatus.DISABLED,
    "FAILED": PortStatus.FAILED,
}
# Leaf `ports/port/port-status` of older revisions (typedef PortStatus).
OLD_PORT_STATUS: Mapping[str, PortStatus] = {
    "PO_ENABLED": PortStatus.ENABLED,
    "PO_DISABLED": PortStatus.DISABLED,
    "PO_FAILED": PortStatus.FAILED,
}
# Leaf `system-config/startup-mode` of polatis-switch.
BOOT: Mapping[str, BootBehaviour] = {"MODE_VOLATILE": BootBehaviour.DARK, "MODE_PRESERVE": BootBehaviour.RESTORE}

_SIZE = re.compile(r"(?<![0-9A-Za-z])([0-9]{1,5})[xX]([0-9]{1,5}|[cC][cC])(?![0-9A-Za-z])")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class PolatisPorts:
    """The ports of a switch: two sides, or one range whose ports may all meet (given twice)."""

    connectivity: Connectivity
    ingress_ports: range
    egress_ports: range


def pair_list(revision: str) -> str:
    """Name of the list in `cross-connects` at this revision of `optical-switch`; ISO dates compare as text."""
    return "pair" if revision >= PAIR_REVISION else "pairs"


def has_port_config(revision: str) -> bool:
    """Whether ports are in `port-config`; before, in `ports`."""
    return revision >= PAIR_REVISION


def is_revision(text: str) -> bool:
    return _DATE.fullmatch(text) is not None


def parse_size(text: str) -> PolatisPorts | None:
    """Sides of a size as in model names, `24x24` or `576xCC`, wherever in the text it stands; None: there is none."""
    found = _SIZE.search(text)
    if found is None:
        return None
    first = int(found[1])
    if found[2].upper() == "CC":
        return PolatisPorts(Connectivity.ANY_TO_ANY, range(1, first + 1), range(1, first + 1)) if first > 1 else None
    second = int(found[2])
    if not first or not second:
        return None
    return PolatisPorts(Connectivity.INGRESS_EGRESS, range(1, first + 1), range(first + 1, first + second + 1))


def sides(model_name: str, ports: Collection[int], size: str | None = None) -> PolatisPorts:
    """Which of the ports are ingress and which egress: by the user's `size` if given, or by the model name.

    Raises Permanent where that does not fit the ports that the switch lists.
    """
    found = parse_size(model_name if size is None else size)
    source = f"the model name {model_name!r}" if size is None else f"option size, {size!r}"
    if found is None:
        raise DriverPermanent(
            f"{source} does not tell ingress from egress ports: set option size, as 16x16, or 32xCC for any-to-any"
        )
    expected = {*found.ingress_ports, *found.egress_ports}
    if expected != set(ports):
        raise DriverPermanent(
            f"{source} means ports {min(expected)}..{max(expected)}, but the switch lists {_shown(ports)}: "
            "set option size, as 16x16, or 32xCC for any-to-any"
        )
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, str) and parse_size(value) is not None


def _is_date(value: object) -> bool:
    return isinstance(value, str) and is_revision(value)


def _iso(value: object) -> object:
    """A date is text; YAML reads it as a date."""
    return value.isoformat() if isinstance(value, date) else value


# Options; "" is as good as none.
Size = Annotated[str, must_be("as 16x16, or 32xCC for any-to-any", lambda value: value == "" or _is_size(value))]
Revision = Annotated[
    str, must_be("a date as 2017-08-04", lambda value: value == "" or _is_date(value)), BeforeValidator(_iso)
]


def switch_facts(
    product: Mapping[str, str], ports: Collection[int], size: str, reconfiguration_s: float, boot: BootBehaviour
) -> SwitchFacts:
    """The facts by what the switch tells of itself and the ports that it lists; `size` as of `sides`."""
    found = sides(product["model-name"], ports, size or None)
    return SwitchFacts(
        vendor=product["manufacturer"] or "Polatis",
        model=product["model-name"] or "unknown",
        serial=product["serial-number"],
        software=product["software-version"],
        connectivity=found.connectivity,
        ingress_ports=found.ingress_ports,
        egress_ports=found.egress_ports,
        reconfiguration_s=reconfiguration_s,
        boot=boot,
    )


def parse_port(value: object) -> int:
    """A `portFormat` as JSON number or as text; ValueError with what is wrong."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in PORT_NUMBERS:
        raise ValueError(f"a port must be a number within 1..65535, got {str(value)[:40]!r}")
    return value


def parse_status(value: object) -> PortStatus:
    """Of either revision; ValueError with what is wrong."""
    status = {**PORT_STATUS, **OLD_PORT_STATUS}.get(value) if isinstance(value, str) else None
    if status is None:
        raise ValueError(f"a port's status must be one of {', '.join(PORT_STATUS)}, got {str(value)[:40]!r}")
    return status


def parse_power(value: object) -> float:
    """A `floatFormat2d`, dBm: decimal64 is text in JSON (RFC 7951); ValueError with what is wrong."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or not re.fullmatch(r"-?[0-9]{1,6}(\.[0-9]{1,6})?", str(value))
    ):
        raise ValueError(f"optical power must be a decimal number, got {str(value)[:40]!r}")
    return float(value)


def _shown(ports: Collection[int]) -> str:
    return f"{len(ports)} ports from {min(ports)} to {max(ports)}" if ports else "no ports"
