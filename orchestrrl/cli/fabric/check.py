"""`orchestrrl fabric check`: whether a site's cabling is possible, and what capacity it has."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, reporting_errors

if TYPE_CHECKING:
    from planner.fabric.survey import PodCapacity, SiteSurvey, SwitchPorts
    from planner.fabric.topology import Site

SiteFile = Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The file that describes the site.")]

Row = tuple[object, ...]

_POD_COLUMNS = (
    "PoD",
    "role",
    "servers",
    "GPUs",
    "ToRs",
    "lanes",
    "hosts",
    "ToRs up",
    "lanes up",
)
_SWITCH_COLUMNS = ("switch", "tier", "device", "moves in", "ports", "reserved", "spare")
ROWS_SHOWN = 24  # of a table; beyond that, neighbours that are alike share a row

HELP = """Find what is impossible in the cabling of a site, all of it at once, and say what capacity there is.

A port used twice or beyond the switch, a fibre without a far end, a ToR or a PoD that nothing reaches, a NIC on the
wrong rail, a GPU in two servers: exit status 2, one line each. A sound site is summed up: how much more hosts can send
than ToRs and uplinks can carry, which ports are spare, and what is odd.

Example:

    orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

    orchestrrl fabric check site.yaml
"""


def register(app: typer.Typer) -> None:
    group(app, "fabric").command("check", help=HELP)(check)


def check(file: SiteFile, as_json: JsonFlag = False) -> None:
    from orchestrrl.fabric.site import read_site
    from planner.fabric.survey import survey

    with reporting_errors():
        site = read_site(file)
    found = survey(site)
    if as_json:
        print_json(_json(site, found))
        return
    print_lines([f"{file}: sound", summary(site)])
    print_table(
        "PoDs, Tbps each way (in brackets: hosts over it)",
        _POD_COLUMNS,
        _grouped(map(_pod_row, found.pods)),
        left=("role",),
    )
    print_table("Switches", _SWITCH_COLUMNS, _grouped(map(_switch_row, found.switches)), left=("tier", "device"))
    print_lines(f"warning: {warning}" for warning in found.warnings)


def summary(site: "Site") -> str:
    roles = " and ".join(
        f"{number} {role}" for role in ("train", "gen") if (number := sum(pod.role == role for pod in site.pods))
    )
    return (
        f"{roles} PoDs with {len(site.servers):,} servers and {len(site.server_of):,} GPUs;"
        f" NICs of {site.nic_gbps:g} Gbps, circuits of {site.link_gbps:g} Gbps"
    )


def _pod_row(each: "PodCapacity") -> Row:
    return (
        each.pod.id,
        each.pod.role,
        each.servers,
        each.gpus,
        each.tors,
        each.lanes,
        _tbps(each.hosts_gbps),
        _up(each.tors_gbps, each.tor_ratio),
        _up(each.uplinks_gbps, each.uplink_ratio),
    )


def _tbps(gbps: float) -> str:
    return f"{gbps / 1000:.4g}"


def _up(capacity_gbps: float, ratio: float | None) -> str:
    """With how often what hosts send would fill it."""
    return _tbps(capacity_gbps) + ("" if ratio is None else f" ({ratio:.3g}:1)")


def _switch_row(each: "SwitchPorts") -> Row:
    return (
        each.switch.id,
        each.switch.tier,
        each.switch.device.name,
        duration(each.switch.device.reconfiguration_s),
        each.switch.device.ports,
        each.reserved,
        each.spare,
    )


def _grouped(rows: Iterable[Row]) -> Iterator[Row]:
    """As they are if they are few; else neighbours that differ by no more than the name share a row."""
    from orchestrrl.fabric.views import named

    every = list(rows)
    if len(every) <= ROWS_SHOWN:
        yield from every
        return
    for rest, alike in groupby(every, key=lambda row: row[1:]):
        yield (named([str(row[0]) for row in alike]), *rest)


def _json(site: "Site", found: "SiteSurvey") -> dict[str, Any]:
    return {
        "link_gbps": site.link_gbps,
        "nic_gbps": site.nic_gbps,
        "servers": len(site.servers),
        "gpus": len(site.server_of),
        "pods": [
            {
                "id": each.pod.id,
                "role": each.pod.role,
                "servers": each.servers,
                "gpus": each.gpus,
                "tors": each.tors,
                "uplinks": each.uplinks,
                "lanes": each.lanes,
                "hosts_gbps": each.hosts_gbps,
                "tors_gbps": each.tors_gbps,
                "uplinks_gbps": each.uplinks_gbps,
                "tor_oversubscription": each.tor_ratio,
                "uplink_oversubscription": each.uplink_ratio,
            }
            for each in found.pods
        ],
        "switches": [
            {
                "id": each.switch.id,
                "tier": each.switch.tier,
                "device": each.switch.device.name,
                "reconfiguration_s": each.switch.device.reconfiguration_s,
                "ports": each.switch.device.ports,
                "fibred": each.fibred,
                "reserved": each.reserved,
                "spare": each.spare,
            }
            for each in found.switches
        ],
        "warnings": list(found.warnings),
    }
