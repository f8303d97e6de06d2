"""What a RESTCONF server of Polatis' YANG modules answers, as values (RFC 7951's JSON). Pure.

Every function takes parsed JSON of whatever kind and raises ValueError with what is wrong with it.
"""

from collections.abc import Iterator, Mapping

from ocs_drivers import polatis_yang as yang
from ocs_drivers.model import BootBehaviour, CrossConnect, PortState

SHOWN_CHARACTERS = 80
YANG_PATCH = "urn:ietf:params:restconf:capability:yang-patch:1.0"


def information(body: object) -> dict[str, str]:
    """The leaves of `product-information`; "" for what is not told."""
    container = _member(body, "product-information")
    return {leaf: _text(container.get(leaf, ""), leaf) for leaf in yang.PRODUCT}


def cross_connects(body: object) -> list[CrossConnect]:
    """Of either name of the list."""
    container = _member(body, "cross-connects")
    found: dict[int, CrossConnect] = {}
    for name in ("pair", "pairs"):
        for entry in _entries(container, name):
            pair = CrossConnect(yang.parse_port(entry.get("ingress")), yang.parse_port(entry.get("egress")))
            if found.setdefault(pair.ingress_port, pair) != pair:
                raise ValueError(f"ingress port {pair.ingress_port} is listed twice")
    return list(found.values())


def ports(body: object) -> list[PortState]:
    """Of `port-config`, or of `ports` of older revisions, where power is told along with the status."""
    container = _member(body, "port-config", "ports")
    found: dict[int, PortState] = {}
    for entry in _entries(container, "port"):
        number = yang.parse_port(entry.get("port-id"))
        status = yang.parse_status(entry.get("status", entry.get("port-status")))
        opm = entry.get("opm")
        power = opm.get("power") if isinstance(opm, Mapping) else None
        if number in found:
            raise ValueError(f"port {number} is listed twice")
        found[number] = PortState(number, status, None if power is None else yang.parse_power(power))
    return list(found.values())


def powers(body: object) -> dict[int, float]:
    """Container `opm-power`: dBm of the ports that have a monitor."""
    entries = _entries(_member(body, "opm-power"), "port")
    return {
        yang.parse_port(entry.get("port-id")): yang.parse_power(entry["power"]) for entry in entries if "power" in entry
    }


def boot(body: object) -> BootBehaviour:
    mode = _found(body, "startup-mode")
    return yang.BOOT.get(mode, BootBehaviour.UNKNOWN) if isinstance(mode, str) else BootBehaviour.UNKNOWN


def revision(body: object) -> str | None:
    """Of module `optical-switch` in the yang-library (RFC 7895); None where it does not name it."""
    revisions = [
        _text(entry.get("revision", ""), "revision")
        for entry in _entries(_member(body, "modules-state"), "module")
        if entry.get("name") == yang.MODULE
    ]
    return max(filter(yang.is_revision, revisions), default=None)


def has_yang_patch(body: object) -> bool:
    """Container `restconf-state/capabilities` (RFC 8040, 9.1)."""
    listed = _found(_member(body, "capabilities"), "capability")
    return isinstance(listed, list) and YANG_PATCH in listed


def errors(body: object) -> str:
    """All errors of an `ietf-restconf:errors` body, or of a `yang-patch-status`, as `tag: message`."""
    status = _found(body, "yang-patch-status")
    edits = _found(status, "edit-status")
    holders = [*_entries(edits, "edit"), status] if isinstance(edits, Mapping) else [body if status is None else status]
    told = []
    for entry in (entry for holder in holders if _found(holder, "errors") for entry in _errors(holder)):
        parts = [entry.get(name) for name in ("error-tag", "error-message", "error-path")]
        told.append(": ".join(part[:SHOWN_CHARACTERS] for part in parts if isinstance(part, str) and part))
    if not any(told):
        raise ValueError("no error is told")
    return "; ".join(told[:10])


def _errors(holder: object) -> Iterator[Mapping[str, object]]:
    return _entries(_member(holder, "errors"), "error")


def _member(body: object, *names: str) -> Mapping[str, object]:
    """The container of one of these names."""
    for name in names:
        container = _found(body, name)
        if isinstance(container, Mapping):
            return container
    raise ValueError(f"must hold an object {' or '.join(names)}, got {_shown(body)}")


def _found(body: object, name: str) -> object:
    """The member of this name, with or without its module in front."""
    if isinstance(body, Mapping):
        for key, value in body.items():
            if key.rpartition(":")[2] == name:
                return value
    return None


def _entries(container: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    """A list's entries; none where there is no list. A list of one may come without its brackets."""
    value = _found(container, name)
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}: must be a list of objects, got {_shown(entry)}")
        yield entry


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text, got {_shown(value)}")
    return value[:SHOWN_CHARACTERS]


def _shown(value: object) -> str:
    return repr(value)[:SHOWN_CHARACTERS]
