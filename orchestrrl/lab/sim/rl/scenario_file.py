"""Read a scenario of the cluster simulator from YAML, or say every fault in it at once, with its path and value."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrrl.core.documents import parse_yaml
from orchestrrl.core.errors import shorten
from orchestrrl.lab.sim.net.fabrics.base import NOTHING, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, options_of
from orchestrrl.lab.sim.rl.faults import ClusterFaultSection, FaultyPart
from orchestrrl.lab.sim.rl.scenario import SIZES, ClusterScenario, layout_named
from orchestrrl.lab.sim.scenario import scenario_text, validated
from orchestrrl.lab.sim.train.memory import fault_of
from orchestrrl.lab.sim.workload import mean_tokens
from planner.fabric.shape import ImpossibleSite

FOLDER = "clusters"  # of the built-in ones, in orchestrrl/lab/sim/
SMALLEST = "cluster64"


def load_cluster_scenario(source: str) -> ClusterScenario:
    """The scenario in a file, or the built-in one of that name. Raises ProblemFaults with every fault."""
    return parse_cluster_scenario(*scenario_text(source, FOLDER))


def parse_cluster_scenario(text: str, folder: Path = Path()) -> ClusterScenario:
    """As load_cluster_scenario, from text; a profile's file is found from `folder`."""
    return scenario_of(parse_yaml(text), folder)


def scenario_of(document: Any, folder: Path = Path()) -> ClusterScenario:
    """As parse_cluster_scenario, from a document that was read already."""
    return validated(document, folder, ClusterScenario, "generation", _CHECKS)


def faults_between_sections(scenario: ClusterScenario) -> list[str]:
    """Of one whose sections are sound each by itself."""
    return [fault for check in _CHECKS for fault in check(scenario)]


def _layout_faults(scenario: ClusterScenario) -> Iterable[str]:
    part, gpus = scenario.training, scenario.cluster.train_gpus
    if gpus % (part.tp * part.cp * part.pp):
        degrees = f"tp {part.tp}, cp {part.cp}, pp {part.pp}"
        yield f"training: must take all of cluster.train_gpus ({gpus}), got {degrees}"
        return
    samples = scenario.loop.batch_samples or scenario.samples
    if part.updates > samples:
        yield f"training.updates: must be at most the {samples} samples of a training step, got {part.updates}"
        return
    found: list[str] = []
    for share in {samples: None, **dict(scenario.recipe.shares(samples))}:
        try:
            scenario.train_job(share, 1.0)
        except ValueError as error:
            found += (f"training: {fault}" for fault in str(error).split("; "))
    yield from dict.fromkeys(found)


def _memory_faults(scenario: ClusterScenario) -> Iterable[str]:
    """Of the largest optimiser step of a training step, on samples of the length that is expected."""
    if any(_layout_faults(scenario)):
        return
    size = scenario.recipe.shares(scenario.loop.batch_samples or scenario.samples)[0][0]
    if fault := fault_of(scenario.train_job(size, mean_tokens(scenario.generation.workload))):
        yield f"training: {fault}"


def _engine_layout_faults(scenario: ClusterScenario) -> Iterable[str]:
    names, heads = scenario.generation.layouts, scenario.model_value.q_heads
    size, most = scenario.cluster.gpus_per_server, scenario.cluster.generating
    for index, name in enumerate(names):
        gpus = layout_named(name).gpus
        if gpus > most:
            yield f"generation.layouts[{index}]: must have at most the {most} GPUs that generate, got {name!r}"
        elif gpus > size and gpus % size:
            yield f"generation.layouts[{index}]: must take whole servers of {size} GPUs, got {name!r}"
        if heads % layout_named(name).tp:
            yield f"generation.layouts[{index}]: tp must divide the {heads} heads of {scenario.model}, got {name!r}"
    initial, profile = scenario.generation.initial, scenario.generation.profile_value
    known = [str(engine.id) for engine in profile.configurations] if profile else list(names)
    if initial is not None and known and initial not in known:
        yield f"generation.initial: must be one of {', '.join(known)}, got {initial!r}"


def _fabric_faults(scenario: ClusterScenario) -> Iterable[str]:
    titles: list[str] = []
    for index, section in enumerate(scenario.fabrics):
        if section.title in titles:
            yield f"fabrics[{index}].name: is used already, got {section.title!r}"
        titles.append(section.title)
        try:
            scenario.fabric(section)
        except ImpossibleSite as error:
            for fault in error.faults:
                where, name = f"fabrics[{index}]", fault.parameter
                said = f"{fault.message}, got {shorten(fault.value)}"
                if name in SIZES and name not in section.options and getattr(scenario.cluster, name) is not None:
                    yield f"cluster.{name}: of {where} ({section.kind}) {said}"
                else:
                    yield f"{where}.{name if name == 'kind' else f'options.{name}'}: {said}"


def _tor_and_pod_faults(scenario: ClusterScenario) -> Iterable[str]:
    """Sizes that the cluster gives to all fabrics, where one has nothing of that size."""
    for name in SIZES:
        without = [
            f"fabrics[{index}] ({section.kind})"
            for index, section in enumerate(scenario.fabrics)
            if section.kind in KINDS and name not in options_of(section.kind)
        ]
        value = getattr(scenario.cluster, name)
        if value is not None and without:
            yield f"cluster.{name}: is nothing to {', '.join(without)}; give it in options of the others, got {value}"


def _loop_faults(scenario: ClusterScenario) -> Iterable[str]:
    try:
        scenario.rules()
    except ValueError as error:
        yield f"loop: {error}"


def _fault_faults(scenario: ClusterScenario) -> Iterable[str]:
    servers = scenario.servers
    most = {
        FaultyPart.NIC: servers.nics,
        FaultyPart.SERVER: servers.count,
        FaultyPart.ENGINE: scenario.cluster.generating,
    }
    for index, fault in enumerate(scenario.faults):
        limit = most.get(fault.fail)
        beyond = [number for number in fault.of if limit is not None and number >= limit]
        if beyond:
            yield f"faults[{index}].of: must be less than {limit}, the number of {fault.fail}s, got {beyond[0]}"
        if fault.fail not in (FaultyPart.TOR_UPLINKS, FaultyPart.POD_UPLINKS) and fault.share != 1:
            yield f"faults[{index}].share: is of uplinks alone, got {fault.share:g}"
        yield from (f"faults[{index}].of: {told}" for told in _uplink_faults(scenario, fault))


def _uplink_faults(scenario: ClusterScenario, fault: ClusterFaultSection) -> Iterable[str]:
    """Each fabric has ToRs and PoDs of its own: it is asked, with nothing lost of the highest number."""
    none_lost = {max(fault.of): 0.0}
    failures, parts = {
        FaultyPart.TOR_UPLINKS: (SimulatedFailures(tor_uplinks=none_lost), "ToRs"),
        FaultyPart.POD_UPLINKS: (SimulatedFailures(pod_uplinks=none_lost), "PoDs"),
    }.get(fault.fail, (None, ""))
    for index, section in enumerate(scenario.fabrics if failures is not None else ()):
        try:
            fabric = scenario.fabric(section)
        except ImpossibleSite:
            continue  # told of the fabric itself
        try:
            fabric.without(failures or NOTHING).network()
        except ValueError:
            yield f"fabrics[{index}] ({section.title}) has not so many {parts}, got {max(fault.of)}"


_CHECKS: tuple[Callable[[ClusterScenario], Iterable[str]], ...] = (
    _layout_faults,
    _memory_faults,
    _engine_layout_faults,
    _fabric_faults,
    _tor_and_pod_faults,
    _loop_faults,
    _fault_faults,
)
