"""From the text of a configuration file to sections, and the faults between entries of different sections.

The checks here need nothing but the document. Those of drivers, deployers, profiles and sites, and what people call,
are in daemon/configuration.py.
"""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from orchestrrl.core.addresses import ServerAddress, server_address
from orchestrrl.core.config.schema import Config
from orchestrrl.core.documents import parse_yaml
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten

if TYPE_CHECKING:
    from planner.cost.profile import Profile


def document_of(text: str) -> dict[Any, Any]:
    """Return the document's sections, without empty ones (`fleet:` and no more). Raises ProblemFaults."""
    document = parse_yaml(text)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping of sections, got {shorten(document)}"])
    return {name: section for name, section in document.items() if section is not None}


def validated(document: dict[Any, Any]) -> tuple[Config | None, list[str]]:
    """Return the configuration, or None with every fault within a section."""
    try:
        return Config.model_validate(document), []
    except ValidationError as error:
        return None, faults_of(error, Config)


def cross_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Faults between entries: double ids, unknown configurations, GPUs that do not exist or serve two engines."""
    fleet = document.get("fleet")
    fleet = fleet if isinstance(fleet, dict) else {}
    configurations, engines = entries(fleet, "configurations"), entries(fleet, "engines")
    faults = _double_ids("fleet.configurations", configurations)
    faults += _double_ids("fleet.engines", engines)
    faults += _double_urls("fleet.engines", engines)
    faults += _double_ids("ocs", entries(document, "ocs"))
    profiled = [str(engine.id) for engine in profile.configurations] if profile is not None else []
    for index, entry in configurations:
        if entry.get("id") in profiled:
            path = f"fleet.configurations[{index}].id"
            faults.append(f"{path}: is the id of a configuration of fleet.profile already, got {entry['id']!r}")
    faults += _transfer_faults(fleet, profile)
    known = known_configurations(fleet, profile)
    for index, engine in engines:
        wanted = engine.get("configuration")
        if isinstance(wanted, str) and wanted not in known:
            listing = ", ".join(known) or "none"
            path = f"fleet.engines[{index}].configuration"
            faults.append(f"{path}: is not one of fleet.configurations (known: {listing}), got {wanted!r}")
    return faults + _gpu_faults(fleet, engines)


def known_configurations(fleet: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Return the ids of the configurations that the section and the profile have, sorted."""
    profiled = [str(engine.id) for engine in profile.configurations] if profile is not None else []
    return sorted({str(entry["id"]) for _, entry in entries(fleet, "configurations") if "id" in entry}.union(profiled))


def _transfer_faults(fleet: dict[Any, Any], profile: "Profile | None") -> list[str]:
    section = fleet.get("kv_transfer")
    if not isinstance(section, dict) or (profile is not None and profile.moves is not None):
        return []
    missing = [name for name in ("inter_node_gbps_per_gpu", "kv_bytes_per_token") if section.get(name) is None]
    without = "must be given where fleet.profile says nothing of moves, got nothing"
    return [f"fleet.kv_transfer.{name}: {without}" for name in missing]


def entries(section: dict[Any, Any], key: str) -> list[tuple[int, dict[Any, Any]]]:
    listing = section.get(key)
    return (
        [(i, entry) for i, entry in enumerate(listing) if isinstance(entry, dict)] if isinstance(listing, list) else []
    )


def _double_ids(path: str, entries: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    first: dict[str, int] = {}
    faults = []
    for index, entry in entries:
        if not isinstance(entry.get("id"), str):
            continue
        if entry["id"] in first:
            faults.append(f"{path}[{index}].id: is the id of {path}[{first[entry['id']]}] already, got {entry['id']!r}")
        first.setdefault(entry["id"], index)
    return faults


def _double_urls(path: str, entries: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    first: dict[ServerAddress, int] = {}
    faults = []
    for index, entry in entries:
        address = server_address(entry["url"]) if isinstance(entry.get("url"), str) else None
        if address is None:
            continue
        if address in first:
            faults.append(f"{path}[{index}].url: is that of {path}[{first[address]}] already, got {entry['url']!r}")
        first.setdefault(address, index)
    return faults


def _gpu_faults(fleet: dict[Any, Any], engines: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    section = fleet.get("gpus")
    count = section.get("count") if isinstance(section, dict) else None
    owner: dict[int, str] = {}
    faults = []
    for index, engine in engines:
        gpus = engine.get("gpus")
        for position, gpu in enumerate(gpus if isinstance(gpus, list) else []):
            path = f"fleet.engines[{index}].gpus[{position}]"
            if not isinstance(gpu, int):
                continue
            if isinstance(count, int) and gpu >= count:
                faults.append(f"{path}: must be less than fleet.gpus.count ({count}), got {gpu}")
            if gpu in owner:
                faults.append(f"{path}: is in use by {owner[gpu]} already, got {gpu}")
            owner.setdefault(gpu, f"fleet.engines[{index}]")
    return faults
