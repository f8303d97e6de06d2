"""A scenario as a daemon's configuration: the engines that were simulated, with the curves that they had."""

from pathlib import Path
from typing import Any

from orchestrrl.core.documents import dump_yaml
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.engines.profiles.store import as_text
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.rl.scenario import ClusterScenario
from orchestrrl.lab.sim.rl.stages import FabricStages
from planner.cost.profile import Profile


def daemon_document(scenario: ClusterScenario, fabric: str | None, profile_path: str) -> tuple[dict[str, Any], Profile]:
    """And the profile that it names; on the fabric of that title, or the first. Raises ProblemFaults."""
    titles = [section.title for section in scenario.fabrics]
    if fabric is not None and fabric not in titles:
        raise ProblemFaults([f"--fabric: must be one of {', '.join(titles)}, got {fabric!r}"])
    section = scenario.fabrics[titles.index(fabric) if fabric is not None else 0]
    try:
        profile = FabricStages(scenario, section).ready(SimulatedFailures()).profile
    except ValueError as error:
        raise ProblemFaults([f"generation: {error}"]) from None
    fleet: dict[str, Any] = {
        "gpus": {"count": scenario.cluster.generating, "per_node": scenario.cluster.gpus_per_server},
        "profile": profile_path,
    }
    if scenario.generation.kv_transfer:
        fleet["kv_transfer"] = {
            "inter_node_gbps_per_gpu": scenario.cluster.nic_gbps
            * scenario.cluster.nics_per_server
            / scenario.cluster.gpus_per_server,
            "intra_node_gbps_per_gpu": scenario.servers.nvlink_bytes_per_s * 8e-9,
        }
    document = {**scenario.daemon, "fleet": fleet}
    parse_config(dump_yaml(document), profile=profile)
    return document, profile


def write_daemon(scenario: ClusterScenario, fabric: str | None, path: Path) -> list[Path]:
    """The configuration, and beside it the profile that it names. Raises ProblemFaults."""
    beside = path.with_suffix(".profile.yaml")
    document, profile = daemon_document(scenario, fabric, beside.name)
    head = f"# From the scenario {scenario.name!r}.\n# How engines are started is yours to add (fleet.launch).\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(as_text(profile), encoding="utf-8")
        path.write_text(head + dump_yaml(document), encoding="utf-8")
    except OSError as error:
        raise ProblemFaults([f"--out: {error.strerror}, got {str(path)!r}"]) from None
    return [path, beside]
