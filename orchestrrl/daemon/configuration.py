"""Load the daemon's configuration from one YAML file, or report all faults in the file at once.

`ReloadableConfig` keeps the last valid configuration if the file becomes invalid.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from ocs_drivers.errors import DriverFaults
from ocs_drivers.registry import make_driver
from orchestrrl.core.addresses import server_address
from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import Config
from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from orchestrrl.fabric.config_checks import fabric_faults, read_fabric_site
from orchestrrl.fleet.launch import deployer_faults, deployer_of, launch_faults, start_faults

if TYPE_CHECKING:  # imports numpy, so loaded only if a configuration names a profile
    from planner.cost.profile import Profile


def load_config(path: Path | str, *, with_parts: bool = False) -> Config:
    """Return the configuration in the file at `path`. Raises ProblemFaults with all faults if the file is invalid. If
    `with_parts` is True, switch drivers and the deployer also check their options, for which their libraries are
    loaded. No connection is opened."""
    return parse_config(read_text(path), Path(path).parent, with_parts=with_parts)


def parse_config(
    text: str, folder: Path = Path(), *, profile: "Profile | None" = None, with_parts: bool = False
) -> Config:
    """Return the configuration in a text, as `load_config` does for a file. Paths in the text are relative to `folder`.
    An empty text yields the default configuration. `profile`, if given, replaces the profile that the text names."""
    document = document_of(text)
    config, faults = validated(document)
    # Sections are checked against each other even if other sections have faults, so that all are reported at once.
    if profile is None:
        profile, profile_faults = _read_profile(document.get("fleet"), folder)
        faults += profile_faults
    faults += cross_faults(document, profile)
    if isinstance(fleet := document.get("fleet"), dict):
        faults += launch_faults(fleet, known_configurations(fleet, profile)) + deployer_faults(fleet)
    site, site_faults = read_fabric_site(document.get("fabric"), folder)
    faults += site_faults + fabric_faults(document, site)
    if with_parts:
        faults += _switch_faults(document) + _start_faults(document, profile)
    if config is None or faults:
        raise ProblemFaults(faults)
    config.fleet._profile = profile
    config._site = site
    return config


def _read_profile(fleet: Any, folder: Path) -> tuple["Profile | None", list[str]]:
    """Return the profile that the `fleet` section names, and the profile's faults. The profile is None if the section
    names none or the profile has faults."""
    path = fleet.get("profile") if isinstance(fleet, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.engines.profiles.store import read_profile

    try:
        return read_profile(folder / path), []
    except ProblemFaults as error:
        # The error of an unreadable file contains its path.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fleet.profile: {fault}" for fault in named]


def _switch_faults(document: dict[Any, Any]) -> list[str]:
    """Return the faults that the switch drivers find in their options in the `ocs` section."""
    faults = []
    for index, entry in entries(document, "ocs"):
        id, driver, options = entry.get("id"), entry.get("driver"), entry.get("options", {})
        if not isinstance(driver, str) or not driver or not isinstance(options, dict):
            continue  # the section's own check reports this
        named = {name: value for name, value in options.items() if isinstance(name, str)}
        try:
            make_driver(driver, str(id), named)
        except DriverFaults as error:
            faults += [f"ocs[{index}].{fault}" for fault in error.faults]
    return faults


def _start_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Return the faults that the deployer finds in its options. If there are none, return the faults that prevent
    configurations from starting. The list is empty if the `fleet` section is invalid."""
    only, _ = validated({"fleet": document.get("fleet", {})})
    if only is None:
        return []
    only.fleet._profile = profile
    if deployer_faults(document.get("fleet", {})):
        return []
    try:
        deployer_of(only, WallClock())
    except ProblemFaults as error:
        return error.faults
    return start_faults(only)


class ReloadableConfig:
    """The daemon's current configuration. `reload` reads the file again, and keeps the current configuration if the
    file is invalid."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self.config = config

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(path, load_config(path, with_parts=True))

    def reload(self) -> Config:
        """Read the file again and return the new configuration. If the file is invalid or changes a section that cannot
        change at run time, keep the current configuration and raise ProblemFaults."""
        fresh = load_config(self._path, with_parts=True)
        fixed = [f"{name}: cannot change while the daemon runs" for name in _fixed_changes(self.config, fresh)]
        if fixed:
            raise ProblemFaults(fixed)
        self.config = fresh
        return fresh


def _fixed_changes(old: Config, new: Config) -> list[str]:
    """Return the names of changed sections that cannot change at run time, because sockets, files, devices or
    operations in progress depend on them."""
    fixed = [
        name
        for name in ("listen", "limits", "journal", "metrics", "ocs", "fabric", "weights")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.fleet.deployer != new.fleet.deployer:
        fixed.append("fleet.deployer")
    if old.fleet.deployer is not None:  # the deployer starts engines by these
        fixed += [
            f"fleet.{name}" for name in ("launch", "gpus") if getattr(old.fleet, name) != getattr(new.fleet, name)
        ]
    return fixed


def document_of(text: str) -> dict[Any, Any]:
    """Parse a YAML text and return its sections, without empty sections such as a bare `fleet:`. Raises ProblemFaults
    if the text is not a YAML mapping."""
    document = parse_yaml(text)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping of sections, got {shorten(document)}"])
    return {name: section for name, section in document.items() if section is not None}


def validated(document: dict[Any, Any]) -> tuple[Config | None, list[str]]:
    """Check each section of the document by itself. Return the configuration and an empty list if all sections are
    valid, or None and a list of all faults otherwise."""
    try:
        return Config.model_validate(document), []
    except ValidationError as error:
        return None, faults_of(error, Config)


def cross_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Return the faults that involve more than one entry: duplicate ids, unknown configurations, GPUs that do not
    exist, and GPUs that serve two engines."""
    fleet = document.get("fleet")
    fleet = fleet if isinstance(fleet, dict) else {}
    configurations, engines = entries(fleet, "configurations"), entries(fleet, "engines")
    faults = _doubles("fleet.configurations", configurations)
    faults += _doubles("fleet.engines", engines)
    faults += _doubles("fleet.engines", engines, "url", server_address, "that of")
    faults += _doubles("ocs", entries(document, "ocs"))
    profiled = [str(engine.id) for engine in profile.configurations] if profile is not None else []
    for index, entry in configurations:
        if entry.get("id") in profiled:
            path = f"fleet.configurations[{index}].id"
            faults.append(f"{path}: must not be the id of a configuration of fleet.profile, got {entry['id']!r}")
    faults += _transfer_faults(fleet, profile)
    known = known_configurations(fleet, profile)
    for index, engine in engines:
        wanted = engine.get("configuration")
        if isinstance(wanted, str) and wanted not in known:
            listing = ", ".join(known) or "none"
            path = f"fleet.engines[{index}].configuration"
            faults.append(f"{path}: must be one of fleet.configurations ({listing}), got {wanted!r}")
    return faults + _gpu_faults(fleet, engines)


def known_configurations(fleet: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Return the sorted ids of the configurations in the `fleet` section and in the profile."""
    profiled = [str(engine.id) for engine in profile.configurations] if profile is not None else []
    return sorted({str(entry["id"]) for _, entry in entries(fleet, "configurations") if "id" in entry}.union(profiled))


def _transfer_faults(fleet: dict[Any, Any], profile: "Profile | None") -> list[str]:
    section = fleet.get("kv_transfer")
    if not isinstance(section, dict) or (profile is not None and profile.moves is not None):
        return []
    missing = [name for name in ("inter_node_gbps_per_gpu", "kv_bytes_per_token") if section.get(name) is None]
    without = "must be given if fleet.profile has no costs of moves, got nothing"
    return [f"fleet.kv_transfer.{name}: {without}" for name in missing]


def entries(section: dict[Any, Any], key: str) -> list[tuple[int, dict[Any, Any]]]:
    listing = section.get(key)
    return (
        [(i, entry) for i, entry in enumerate(listing) if isinstance(entry, dict)] if isinstance(listing, list) else []
    )


def _doubles(
    path: str,
    entries: list[tuple[int, dict[Any, Any]]],
    field: str = "id",
    meaning: Callable[[str], object] = str,  # None: the entry has nothing to compare
    words: str = "the id of",
) -> list[str]:
    first: dict[object, int] = {}
    faults = []
    for index, entry in entries:
        value = entry.get(field)
        means = meaning(value) if isinstance(value, str) else None
        if means is not None and first.setdefault(means, index) != index:
            faults.append(f"{path}[{index}].{field}: must not be {words} {path}[{first[means]}], got {value!r}")
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
                faults.append(f"{path}: must not be in use by {owner[gpu]}, got {gpu}")
            owner.setdefault(gpu, f"fleet.engines[{index}]")
    return faults
