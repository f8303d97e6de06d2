"""Divide a site into the layers of its picture, which contain endpoints, switches, and the fibres between them.
Identical elements are merged.

A layer is a PoD with its ToRs, uplinks and switches, or the core with all uplinks. `pictures.py` draws layers as
figures, and `cli/fabric/site.py` prints them as text.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrrl.fabric.site_parts import numbers_text
from planner.fabric.model import EndpointId
from planner.fabric.topology import Pod, PodRole, Site, Switch, SwitchModel

MOST_COLUMNS = 16  # above this, identical endpoints share a column
MOST_ROWS = 6  # of switches

_Thing = TypeVar("_Thing")


@dataclass(frozen=True, slots=True)
class SwitchColumn:
    """A column of a picture, which represents one or more identical endpoints (ToRs or uplinks)."""

    label: str
    role: PodRole
    uplink: bool
    rail: int | None = None
    nics: int = 0  # per endpoint
    count: int = 1
    fibres: tuple[int, ...] = ()  # [row], per endpoint and switch
    core_fibres: tuple[int, ...] = ()  # [row of the core], for an uplink of a PoD


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """A row of a picture, which represents one or more identical switches."""

    label: str
    count: int
    device: SwitchModel
    fibred: int  # ports, per switch
    reserved: int


@dataclass(frozen=True, slots=True)
class SiteLayer:
    """A layer of a picture, which represents one or more identical PoDs, or the core if `role` is None."""

    pods: tuple[EndpointId, ...]
    role: PodRole | None
    servers: int  # per PoD
    gpus: str  # of all PoDs
    columns: tuple[SwitchColumn, ...]
    rows: tuple[SwitchRow, ...]

    @property
    def lanes(self) -> int:
        """The number of fibres of the uplinks of one PoD or, for the core, of the uplinks of all PoDs."""
        return sum(
            column.count * row.count * fibres
            for column in self.columns
            if column.uplink
            for row, fibres in zip(self.rows, column.fibres, strict=True)
        )

    @property
    def title(self) -> str:
        return ", ".join(self.pods) if len(self.pods) <= 4 else named(self.pods)


def views(site: Site) -> tuple[SiteLayer | None, tuple[SiteLayer, ...]]:
    """Return the core's layer (None if the site has no core) and the layer of every PoD."""
    single = {pod.id for pod in site.pods if len(site.uplinks_of[pod.id]) == 1}
    roles = {pod.id: pod.role for pod in site.pods}
    ends = {
        each.id: SwitchColumn(each.pod if each.pod in single else each.id, roles[each.pod], uplink=True)
        for each in site.uplinks
    }
    rows, fibres = _rows(site, ends, site.core_switches, str)
    core = SiteLayer(tuple(pod.id for pod in site.pods), None, len(site.servers), "", _columns(ends, fibres, {}), rows)
    nics = Counter(tor for server in site.servers for tor in server.tors)
    pods = tuple(_pod_layer(site, pod, nics, fibres) for pod in site.pods)
    return core if rows else None, pods


def grouped(site: Site, layers: Sequence[SiteLayer]) -> tuple[SiteLayer, ...]:
    """Merge the layers of PoDs that differ only in names."""
    found = []
    for alike in _alike(layers, lambda layer: (layer.role, layer.servers, layer.columns, layer.rows)):
        pods = tuple(pod for layer in alike for pod in layer.pods)
        found.append(replace(alike[0], pods=pods, gpus=_gpus(site, pods)))
    return tuple(found)


def _gpus(site: Site, pods: Iterable[EndpointId]) -> str:
    return numbers_text(gpu for pod in pods for server in site.servers_of[pod] for gpu in server.gpus)


def _pod_layer(
    site: Site, pod: Pod, nics: Counter[EndpointId], core: Mapping[EndpointId, tuple[int, ...]]
) -> SiteLayer:
    def own(name: str) -> str:
        """Return the name without the PoD's id as prefix, because the layer's title shows the id."""
        return name.removeprefix(f"{pod.id}/")

    tors = sorted(site.tors_of[pod.id], key=lambda tor: (tor.rail is None, tor.rail or 0, tor.id))
    ends = {tor.id: SwitchColumn(own(tor.id), pod.role, False, tor.rail, nics[tor.id]) for tor in tors}
    ends |= {each.id: SwitchColumn(own(each.id), pod.role, uplink=True) for each in site.uplinks_of[pod.id]}
    rows, fibres = _rows(site, ends, site.agg_switches_of[pod.id], own)
    servers = len(site.servers_of[pod.id])
    return SiteLayer((pod.id,), pod.role, servers, _gpus(site, (pod.id,)), _columns(ends, fibres, core), rows)


def _rows(
    site: Site, ends: Iterable[EndpointId], switches: Sequence[Switch], own: Callable[[str], str]
) -> tuple[tuple[SwitchRow, ...], Mapping[EndpointId, tuple[int, ...]]]:
    """Return the rows of switches and, for each endpoint, a tuple with its number of fibres to one switch of each row.
    `own` shortens the names of switches."""
    reserved = Counter(switch for switch, _ in site.reserved)

    def ports(switch: Switch) -> tuple[int, ...]:
        return tuple(len(switch.ports.get(end, ())) for end in ends)

    together = [[switch] for switch in switches]
    if len(switches) > MOST_ROWS:
        together = _alike(switches, lambda each: (each.device, reserved[each.id], ports(each)))
    rows = tuple(
        SwitchRow(
            named([own(switch.id) for switch in alike]),
            len(alike),
            alike[0].device,
            sum(map(len, alike[0].ports.values())),
            reserved[alike[0].id],
        )
        for alike in together
    )
    counts = [ports(alike[0]) for alike in together]
    return rows, {end: tuple(count[place] for count in counts) for place, end in enumerate(ends)}


def _columns(
    ends: Mapping[EndpointId, SwitchColumn],
    fibres: Mapping[EndpointId, tuple[int, ...]],
    core: Mapping[EndpointId, tuple[int, ...]],
) -> tuple[SwitchColumn, ...]:
    columns = [replace(end, fibres=fibres[id], core_fibres=core.get(id, ())) for id, end in ends.items()]
    if len(columns) <= MOST_COLUMNS:
        return tuple(columns)
    together = _alike(columns, lambda column: replace(column, label=""))
    return tuple(replace(alike[0], label=named([each.label for each in alike]), count=len(alike)) for alike in together)


def _alike(things: Iterable[_Thing], key: Callable[[_Thing], Hashable]) -> list[list[_Thing]]:
    """Group things with equal keys. Groups are in the order of their first elements."""
    kinds: dict[Hashable, list[_Thing]] = {}
    for thing in things:
        kinds.setdefault(key(thing), []).append(thing)
    return list(kinds.values())


def named(names: Sequence[str]) -> str:
    """Return the name if there is only one, otherwise a range such as `gen0 ... gen3 (4)`."""
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
