"""`orchestrrl fabric check`: whether a site's cabling is possible, and what capacity it has."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Columns, Output, View, cells_table, fields, row_of

if TYPE_CHECKING:
    from rich.table import Table

    from planner.fabric.survey import PodCapacity, SiteSurvey, SwitchPorts
    from planner.fabric.topology import Site

SiteFile = Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The file that describes the site.")]

ROWS_SHOWN = 24  # of a table; beyond that, neighbours that are alike share a row


@command
def check(file: SiteFile) -> Output:
    """Find what is impossible in the cabling of a site, all of it at once, and say what capacity there is.

    A port used twice or beyond the switch, a fibre without a far end, a ToR or a PoD that nothing reaches, a NIC on the
    wrong rail, a GPU in two servers: exit status 2, one line each. A sound site is summed up: how much more hosts can
    send than ToRs and uplinks can carry, which ports are spare, and what is odd.

    Example:

        orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

        orchestrrl fabric check site.yaml
    """
    from orchestrrl.fabric.site import read_site
    from planner.fabric.survey import survey

    site = read_site(file)
    found = survey(site)
    return Output(_json(site, found), _view(file, site, found))


def _view(file: Path, site: "Site", found: "SiteSurvey") -> View:
    yield f"{file}: sound"
    yield summary(site)
    yield _grouped("PoDs, Tbps each way (in brackets: hosts over it)", POD_COLUMNS, found.pods)
    yield _grouped("Switches", SWITCH_COLUMNS, found.switches)
    yield from (f"warning: {warning}" for warning in found.warnings)


def summary(site: "Site") -> str:
    roles = " and ".join(
        f"{number} {role}" for role in ("train", "gen") if (number := sum(pod.role == role for pod in site.pods))
    )
    return (
        f"{roles} PoDs with {len(site.servers):,} servers and {len(site.server_of):,} GPUs;"
        f" NICs of {site.nic_gbps:g} Gbps, circuits of {site.link_gbps:g} Gbps"
    )


def _tbps(gbps: float) -> str:
    return f"{gbps / 1000:.4g}"


def _up(capacity_gbps: float, ratio: float | None) -> str:
    """With how often what hosts send would fill it."""
    return _tbps(capacity_gbps) + ("" if ratio is None else f" ({ratio:.3g}:1)")


POD_COLUMNS: Columns = {
    "PoD": lambda each: each.pod.id,
    "role": lambda each: each.pod.role,
    "servers": "servers",
    "GPUs": "gpus",
    "ToRs": "tors",
    "lanes": "lanes",
    "hosts": lambda each: _tbps(each.hosts_gbps),
    "ToRs up": lambda each: _up(each.tors_gbps, each.tor_ratio),
    "lanes up": lambda each: _up(each.uplinks_gbps, each.uplink_ratio),
}
SWITCH_COLUMNS: Columns = {
    "switch": lambda each: each.switch.id,
    "tier": lambda each: each.switch.tier,
    "device": lambda each: each.switch.device.name,
    "moves in": lambda each: duration(each.switch.device.reconfiguration_s),
    "ports": lambda each: each.switch.device.ports,
    "reserved": "reserved",
    "spare": "spare",
}


def _grouped(title: str, columns: Columns, each: "Iterable[PodCapacity | SwitchPorts]") -> "Table":
    """A row for each if they are few; else neighbours that differ by no more than the name share a row."""
    from orchestrrl.fabric.views import named

    rows: Sequence[tuple[object, ...]] = [row_of(one, columns) for one in each]
    if len(rows) > ROWS_SHOWN:
        alike = groupby(rows, key=lambda row: row[1:])
        rows = [(named([str(row[0]) for row in group]), *rest) for rest, group in alike]
    return cells_table(title, tuple(columns), rows)


def _json(site: "Site", found: "SiteSurvey") -> dict[str, Any]:
    of_pod = "servers gpus tors uplinks lanes hosts_gbps tors_gbps uplinks_gbps"
    ratios = {"tor_oversubscription": "tor_ratio", "uplink_oversubscription": "uplink_ratio"}
    return {
        **fields(site, "link_gbps nic_gbps"),
        "servers": len(site.servers),
        "gpus": len(site.server_of),
        "pods": [fields(each.pod, "id role") | fields(each, of_pod, **ratios) for each in found.pods],
        "switches": [
            {
                **fields(each.switch, "id tier"),
                **fields(each.switch.device, "reconfiguration_s ports", device="name"),
                **fields(each, "fibred reserved spare"),
            }
            for each in found.switches
        ],
        "warnings": list(found.warnings),
    }
