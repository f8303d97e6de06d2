"""What the driver `netconf` writes and reads: filters, edits, replies. Pure; sending them is netconf.py.

Elements are those of lxml or of the standard library. Functions that read raise ValueError with what is wrong.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ocs_drivers import polatis_yang as yang
from ocs_drivers.model import Action, CrossConnect, PortState

BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
CAPABILITY = "urn:ietf:params:netconf:capability:"

OPERATION = {Action.ADD: "merge", Action.REMOVE: "delete"}

NS = f"{{{yang.NAMESPACE}}}"
POLATIS_NS = f"{{{yang.POLATIS_NAMESPACE}}}"

# Criteria of subtree filters.
PRODUCT_FILTER = f'<product-information xmlns="{yang.NAMESPACE}"/>'
CROSS_CONNECTS_FILTER = f'<cross-connects xmlns="{yang.NAMESPACE}"/>'
POWER_FILTER = f'<opm-power xmlns="{yang.NAMESPACE}"/>'
STARTUP_FILTER = (
    f'<system-config xmlns="{yang.NAMESPACE}"><startup-mode xmlns="{yang.POLATIS_NAMESPACE}"/></system-config>'
)


def ports_filter(revision: str, *leaves: str) -> str:
    """The named leaves of every port. A leaf may be a path, as `opm/power`."""
    container = "port-config" if yang.has_port_config(revision) else "ports"
    inner = "".join(_nested(leaf.split("/")) for leaf in leaves)
    return f'<{container} xmlns="{yang.NAMESPACE}"><port>{inner}</port></{container}>'


def edit(revision: str, action: Action, pairs: Sequence[CrossConnect]) -> str:
    """The <config> that does this to these pairs and, with default operation `none`, nothing to others."""
    if not pairs:
        raise ValueError("a setter with an empty list: on some devices that means every circuit")
    name, operation = yang.pair_list(revision), OPERATION[action]
    entries = "".join(
        f'<{name} nc:operation="{operation}"><ingress>{pair.ingress_port}</ingress>'
        f"<egress>{pair.egress_port}</egress></{name}>"
        for pair in pairs
    )
    cross_connects = f'<cross-connects xmlns="{yang.NAMESPACE}">{entries}</cross-connects>'
    return f'<nc:config xmlns:nc="{BASE}">{cross_connects}</nc:config>'


def cross_connects(data: Any, revision: str) -> list[CrossConnect]:
    """Those in the <data> of a reply."""
    found = []
    for entry in data.iterfind(f"{NS}cross-connects/{NS}{yang.pair_list(revision)}"):
        ingress, egress = (_port(entry, leaf) for leaf in ("ingress", "egress"))
        found.append(CrossConnect(ingress, egress))
    return found


def port_numbers(data: Any, revision: str) -> list[int]:
    return [_port(entry, "port-id") for entry in _ports(data, revision)]


def port_states(data: Any, revision: str, *, with_power: bool) -> list[PortState]:
    """Ports with their status, and power where the switch measures it."""
    leaf = "status" if yang.has_port_config(revision) else "port-status"
    powers = _powers(data, revision) if with_power else {}
    states = []
    for entry in _ports(data, revision):
        port = _port(entry, "port-id")
        states.append(PortState(port, yang.parse_status(entry.findtext(NS + leaf)), powers.get(port)))
    return states


def product(data: Any) -> Mapping[str, str]:
    """The leaves of `yang.PRODUCT`; "" for what the switch does not tell."""
    found = data.find(f"{NS}product-information")
    if found is None:
        raise ValueError("there is no product-information")
    return {name: (found.findtext(NS + name) or "").strip() for name in yang.PRODUCT}


def startup_mode(data: Any) -> str:
    return (data.findtext(f"{NS}system-config/{POLATIS_NS}startup-mode") or "").strip()


def module_revision(capabilities: Collection[str], namespace: str, module: str) -> str | None:
    """The revision of a module as a <hello> announces it: `NAMESPACE?module=NAME&revision=DATE` (RFC 6020, 5.6.4).
    "" if it has none, None if the module is not announced."""
    for capability in sorted(capabilities, reverse=True):
        address, _, query = capability.strip().partition("?")
        announced = parse_qs(urlsplit(f"?{query}").query)
        if address == namespace and announced.get("module", [module]) == [module]:
            revision = announced.get("revision", [""])[0]
            return revision if yang.is_revision(revision) else ""
    return None


def _ports(data: Any, revision: str) -> Iterator[Any]:
    container = "port-config" if yang.has_port_config(revision) else "ports"
    entries: Iterator[Any] = data.iterfind(f"{NS}{container}/{NS}port")
    return entries


def _powers(data: Any, revision: str) -> dict[int, float]:
    """Only ports with a monitor are listed."""
    if yang.has_port_config(revision):
        entries = ((entry, f"{NS}power") for entry in data.iterfind(f"{NS}opm-power/{NS}port"))
    else:
        entries = ((entry, f"{NS}opm/{NS}power") for entry in _ports(data, revision))
    told = ((_port(entry, "port-id"), entry.findtext(leaf)) for entry, leaf in entries)
    return {port: yang.parse_power(text.strip()) for port, text in told if text is not None}


def _port(entry: Any, leaf: str) -> int:
    text = entry.findtext(NS + leaf)
    return yang.parse_port(text.strip() if text is not None else None)


def _nested(path: Sequence[str]) -> str:
    name, *rest = path
    return f"<{name}>{_nested(rest)}</{name}>" if rest else f"<{name}/>"
