"""Check the section `fabric` of the configuration against its site, its switches and its fleet."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.routers import router_faults

if TYPE_CHECKING:  # heavy, and most configurations have none of it
    from planner.fabric.topology import Site


def read_fabric_site(section: Any, folder: Path) -> tuple["Site | None", list[str]]:
    """The site that the section names, or what is wrong with it."""
    path = section.get("site") if isinstance(section, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.fabric.site import read_site

    try:
        return read_site(folder / path), []
    except ProblemFaults as error:
        # A file that cannot be read names itself.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fabric.site: {fault}" for fault in named]


def fabric_faults(document: dict[Any, Any], site: "Site | None") -> list[str]:
    """Faults between the site and the rest of the configuration."""
    if site is None:
        return []
    listing = document.get("ocs")
    entries = [entry for entry in listing if isinstance(entry, dict)] if isinstance(listing, list) else []
    driven = {entry["id"] for entry in entries if isinstance(entry.get("id"), str)}
    faults = [
        f"ocs: must have every switch of fabric.site, {switch.id!r} is missing"
        for switch in site.switches
        if switch.id not in driven
    ]
    section = document["fabric"]
    faults += _model_faults(document, section, site)
    return faults + router_faults(section.get("routers"), site)


def _model_faults(document: dict[Any, Any], section: Any, site: "Site") -> list[str]:
    from planner.cost.models import UnknownModel, model_named

    name, first_gpu = section.get("model"), section.get("first_fleet_gpu", 0)
    if not isinstance(name, str):
        return []
    faults = []
    try:
        model_named(name)
    except UnknownModel as error:
        faults.append(f"fabric.model: {error}, got {name!r}")
    fleet = document.get("fleet")
    if not isinstance(fleet, dict) or not fleet.get("deployer"):
        faults.append(
            f"fabric.model: circuits follow the redeployments of fleet.deployer, and there is none, got {name!r}"
        )
    gpus = fleet.get("gpus") if isinstance(fleet, dict) else None
    count = gpus.get("count") if isinstance(gpus, dict) else None
    if isinstance(count, int) and isinstance(first_gpu, int):
        nowhere = [gpu for gpu in range(first_gpu, first_gpu + count) if gpu not in site.server_of]
        if nowhere:
            faults.append(
                f"fabric.first_fleet_gpu: {len(nowhere)} of the fleet's {count} GPUs are none of the site's"
                f" ({nowhere[0]} is the first), got {first_gpu}"
            )
    return faults
