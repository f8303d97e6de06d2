"""The fields of a site's document, and the checks of individual values. `site.py` checks values against each other."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from orchestrrl.core.documents import NonNegativeInt, Section, require
from orchestrrl.core.errors import faults_of, number_runs
from planner.fabric.topology import PodRole, Tier

HIGHEST_NUMBER = 2**20  # of a port or a GPU; larger numbers are mistakes, and ranges of them would exhaust memory
_RANGE = re.compile(r"([0-9]{1,8})(?:\s*-\s*([0-9]{1,8}))?")


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse a list of numbers and ranges. For example, `1-4,9` yields 1, 2, 3, 4, 9. The order of the text is kept.
    Raises ValueError if the text is malformed or a number is too large."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else -1
        if not low <= high <= HIGHEST_NUMBER or len(found) > HIGHEST_NUMBER:
            raise ValueError(f"must be numbers and ascending ranges up to {HIGHEST_NUMBER}, such as '1-4,9'")
        found += range(low, high + 1)
    return tuple(found)


def numbers_text(numbers: Iterable[int]) -> str:
    """Format numbers as a string that shows consecutive numbers as ranges, such as `1-4,9`. The order is kept."""
    return ",".join(number_runs(numbers))


def _numbers(value: object) -> object:
    """Convert a single number, or a text with numbers and ranges, to a tuple of numbers. Return other values
    unchanged."""
    if type(value) is int:
        return (value,)
    return numbers_in(value) if isinstance(value, str) else value


def _within(limit: float) -> AfterValidator:
    return AfterValidator(require(lambda value: 0 < value <= limit, f"> 0 and <= {limit:g}"))


Numbers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, strict=False), BeforeValidator(_numbers)]
Gbps = Annotated[float, _within(10_000)]
# No blanks, colons or commas: ids appear in names such as `core0:5-8` and in lists on the command line.
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./@+-]*$", max_length=100)]


class PodPart(Section):
    id: Id
    role: Annotated[PodRole, Field(strict=False)]


class TorPart(Section):
    id: Id
    pod: Id
    rail: NonNegativeInt | None = None


class UplinkPart(Section):
    id: Id
    pod: Id


class ServerPart(Section):
    id: Id
    pod: Id
    gpus: Numbers
    tors: Annotated[tuple[Id, ...], Field(min_length=1, strict=False)]


class DevicePart(Section):
    reconfiguration_s: Annotated[float, _within(3600)]
    ports: Annotated[int, AfterValidator(require(lambda value: 2 <= value <= HIGHEST_NUMBER, ">= 2 and <= 1048576"))]


class SwitchPart(Section):
    id: Id
    tier: Annotated[Tier, Field(strict=False)]
    pod: Id | None = None
    device: Id
    ports: dict[Id, Numbers]


class ReservedPart(Section):
    purpose: Id
    switch: Id
    ports: Numbers


class SitePart(Section):
    """The whole document of a site."""

    link_gbps: Gbps
    nic_gbps: Gbps
    pods: Annotated[tuple[PodPart, ...], Field(strict=False, min_length=1)]
    tors: Annotated[tuple[TorPart, ...], Field(strict=False, min_length=1)]
    uplinks: Annotated[tuple[UplinkPart, ...], Field(strict=False)] = ()
    servers: Annotated[tuple[ServerPart, ...], Field(strict=False, min_length=1)]
    devices: dict[Id, DevicePart] = Field(default_factory=dict)
    switches: Annotated[tuple[SwitchPart, ...], Field(strict=False, min_length=1)]
    reserved: Annotated[tuple[ReservedPart, ...], Field(strict=False)] = ()


_LISTS: dict[str, type[Section]] = {
    "pods": PodPart,
    "tors": TorPart,
    "uplinks": UplinkPart,
    "servers": ServerPart,
    "switches": SwitchPart,
    "reserved": ReservedPart,
}
_WITH_IDS = ("pods", "tors", "uplinks", "servers", "switches")


@dataclass(frozen=True)
class SiteParts:
    """The elements of a site's document that could be parsed, although the document may have faults. The elements of
    each list are keyed by their index in the list."""

    pods: Mapping[int, PodPart]
    tors: Mapping[int, TorPart]
    uplinks: Mapping[int, UplinkPart]
    servers: Mapping[int, ServerPart]
    switches: Mapping[int, SwitchPart]
    reserved: Mapping[int, ReservedPart]
    devices: Mapping[str, DevicePart]
    ids: Mapping[str, frozenset[str]]  # of each list (and `devices`), broken elements included
    broken: frozenset[str] = frozenset()  # lists that have broken elements or are not lists

    @cached_property
    def pod_of(self) -> Mapping[str, str]:
        """The PoD of each ToR and uplink, keyed by the id of the ToR or uplink."""
        return {tor.id: tor.pod for tor in self.tors.values()} | {up.id: up.pod for up in self.uplinks.values()}

    def exists(self, kind: str, name: str) -> bool:
        """Return whether an element of this kind has the given name. Also return True if some elements of the kind are
        unreadable, because one of them may have the name."""
        return name in self.ids[kind] or kind in self.broken


def read_parts(document: object) -> tuple[SitePart | None, SiteParts, list[str]]:
    """Parse a site's document. Return the whole document (None if a value has a fault), its readable parts, and the
    faults."""
    try:
        site = SitePart.model_validate(document)
    except ValidationError as error:
        broken = {item["loc"][:2] for item in error.errors(include_url=False, include_context=False)}
        return None, _sound_parts(document, broken), faults_of(error, SitePart)
    lists: dict[str, Any] = {field: dict(enumerate(getattr(site, field))) for field in _LISTS}
    ids = {field: frozenset(part.id for part in getattr(site, field)) for field in _WITH_IDS}
    return site, SiteParts(**lists, devices=site.devices, ids={**ids, "devices": frozenset(site.devices)}), []


def _sound_parts(document: object, broken: set[tuple[int | str, ...]]) -> SiteParts:
    fields = document if isinstance(document, dict) else {}
    read: dict[str, Any] = {}
    ids: dict[str, frozenset[str]] = {}
    for field, model in _LISTS.items():
        found = fields.get(field)
        elements = found if isinstance(found, list) else []
        read[field] = {
            place: model.model_validate(element)
            for place, element in enumerate(elements)
            if (field, place) not in broken
        }
        named = (element.get("id") for element in elements if isinstance(element, dict))
        ids[field] = frozenset(name for name in named if isinstance(name, str))
    found = fields.get("devices")
    devices = found if isinstance(found, dict) else {}
    read["devices"] = {
        name: DevicePart.model_validate(device) for name, device in devices.items() if ("devices", name) not in broken
    }
    ids["devices"] = frozenset(name for name in devices if isinstance(name, str))
    return SiteParts(**read, ids=ids, broken=frozenset(str(location[0]) for location in broken if location))
