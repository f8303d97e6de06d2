"""The daemon's configuration: one YAML file, or every fault in it at once.

`ReloadableConfig` keeps the last good one when the file has become faulty.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ocs_drivers.errors import DriverFaults
from ocs_drivers.registry import make_driver
from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.loader import cross_faults, document_of, entries, known_configurations, validated
from orchestrrl.core.config.schema import Config
from orchestrrl.core.documents import read_text
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.config_checks import fabric_faults, read_fabric_site
from orchestrrl.fleet.launch import deployer_faults, deployer_of, launch_faults, start_faults

if TYPE_CHECKING:  # its curves bring numpy: loaded where a configuration names a profile, and nowhere else
    from planner.cost.profile import Profile


def load_config(path: Path | str, *, with_parts: bool = False) -> Config:
    """The configuration in the file. Raises ProblemFaults with every fault; `with_parts` includes those that switch
    drivers and the deployer find in their options, for which their libraries are loaded. Nothing is opened."""
    return parse_config(read_text(path), Path(path).parent, with_parts=with_parts)


def parse_config(
    text: str, folder: Path = Path(), *, profile: "Profile | None" = None, with_parts: bool = False
) -> Config:
    """As load_config, from text; files that it names are found from `folder`. An empty document is the default
    configuration. A `profile` that is there already stands in for one that the document names."""
    document = document_of(text)
    config, faults = validated(document)
    # Sections are checked against each other even when other sections are faulty, so nothing waits for a second run.
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
    """The profile that the section names, or what is wrong with it."""
    path = fleet.get("profile") if isinstance(fleet, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.engines.profiles.store import read_profile

    try:
        return read_profile(folder / path), []
    except ProblemFaults as error:
        # A file that cannot be read names itself.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fleet.profile: {fault}" for fault in named]


def _switch_faults(document: dict[Any, Any]) -> list[str]:
    """Faults that the drivers of the section `ocs` find in their options."""
    faults = []
    for index, entry in entries(document, "ocs"):
        id, driver, options = entry.get("id"), entry.get("driver"), entry.get("options", {})
        if not isinstance(driver, str) or not driver or not isinstance(options, dict):
            continue  # the section's own check has said so
        named = {name: value for name, value in options.items() if isinstance(name, str)}
        try:
            make_driver(driver, str(id), named)
        except DriverFaults as error:
            faults += [f"ocs[{index}].{fault}" for fault in error.faults]
    return faults


def _start_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Faults that the deployer finds in its options, and those of engines that it could never start, where the section
    `fleet` is sound."""
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
    """The configuration in force. `reload` takes the file's, or keeps the old one and raises with the reason."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self.config = config

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(path, load_config(path, with_parts=True))

    def reload(self) -> Config:
        """The new configuration. Raises ProblemFaults and keeps the old one when the file is faulty."""
        fresh = load_config(self._path, with_parts=True)
        fixed = [f"{name}: cannot change while the daemon runs" for name in _fixed_changes(self.config, fresh)]
        if fixed:
            raise ProblemFaults(fixed)
        self.config = fresh
        return fresh


def _fixed_changes(old: Config, new: Config) -> list[str]:
    """Sections that are bound to sockets, files and devices, or to what is on its way, where the two differ."""
    fixed = [
        name
        for name in ("listen", "limits", "journal", "metrics", "ocs", "fabric", "weights")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.fleet.deployer != new.fleet.deployer:
        fixed.append("fleet.deployer")
    if old.fleet.deployer is not None:  # it starts engines by these
        fixed += [
            f"fleet.{name}" for name in ("launch", "gpus") if getattr(old.fleet, name) != getattr(new.fleet, name)
        ]
    return fixed
