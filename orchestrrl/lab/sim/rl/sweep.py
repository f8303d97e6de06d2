"""Run a sweep, which is a grid of scenarios that differ from a base scenario at given paths, in local processes or as
tasks of a Ray cluster.

The results of each point are written atomically to a separate file, which is named by the digest of the point's
scenario. An interrupted sweep resumes where it stopped, and a failed point does not affect other points.

A sweep on Ray requires that OrchestrRL is installed on the cluster's nodes. Results are returned over Ray and written
on this machine. A profile file that a scenario names must exist at the same path on the nodes.
"""

import copy
import itertools
import math
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable, faults_of, shorten
from orchestrrl.lab.processes import run_tasks
from orchestrrl.lab.sim.rl.results import ClusterResult, complete, digest_of, write
from orchestrrl.lab.sim.rl.scenario import FOLDER, scenario_of
from orchestrrl.lab.sim.scenario import ScenarioSection, scenario_text

MOST_POINTS = 100_000  # a larger grid is assumed to be a mistake
_PART = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)((?:\[\d+\])*)")


class SweepSection(ScenarioSection):
    """The document of a sweep. `base` is the name or the file of a cluster scenario. `set` contains values that apply
    to all points, by their path in the scenario, such as cluster.nic_gbps or fabrics[0].options.ratio. `grid` contains
    a list of values for each path. Every combination of these values is a point."""

    base: Annotated[str, Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A point of the grid. `values` contains the point's values by path. `document` is the point's scenario with all
    defaults filled in, or None if the scenario is invalid. `fault` is an error message, or empty."""

    values: Mapping[str, Any]
    document: Mapping[str, Any] | None
    folder: Path  # the scenario's own file names are relative to it
    fault: str = ""

    @property
    def title(self) -> str:
        return ", ".join(f"{path}={shorten(value, 40)}" for path, value in self.values.items()) or "the base"

    @property
    def digest(self) -> str:
        assert self.document is not None
        return digest_of(self.document)


# The results of a point, or its error message.
PointResults = list[ClusterResult] | str
# Runs points, and yields the outcome of each, in any order.
SweepRunner = Callable[[Sequence[SweepPoint]], Iterator[tuple[SweepPoint, PointResults | Exception]]]


@dataclass(frozen=True, slots=True)
class Swept:
    """The outcome of a sweep. Points are in the order of the grid."""

    done: tuple[SweepPoint, ...]  # including those with results from an earlier run
    failed: tuple[SweepPoint, ...]  # with their faults
    found: int  # number of done points with results from an earlier run


def load_sweep(path: Path) -> list[SweepPoint]:
    """Return all points of a sweep file, in the order of the grid. Raises ProblemFaults with the faults of the sweep
    file, or with the faults of the first scenario if no scenario is valid."""
    document = parse_yaml(read_text(path))
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping, got {shorten(document)}"])
    try:
        section = SweepSection.model_validate(document)
    except ValidationError as error:
        raise ProblemFaults(faults_of(error, SweepSection)) from None
    return points_of(section, path.parent)


def points_of(section: SweepSection, folder: Path) -> list[SweepPoint]:
    base, home = _base(section.base, folder)
    faults: list[str] = []
    for name, paths in (("set", section.set), ("grid", section.grid)):
        for path in paths:
            try:
                _parts(path)
            except ValueError as error:
                faults.append(f"{name}.{path}: {error}, got {path!r}")
    if (count := math.prod(map(len, section.grid.values()))) > MOST_POINTS:
        faults.append(f"grid: must have at most {MOST_POINTS} points, got {count}")
    if faults:
        raise ProblemFaults(faults)
    points = [
        _point(base, section.set, dict(zip(section.grid, chosen, strict=True)), home)
        for chosen in itertools.product(*section.grid.values())
    ]
    if all(point.fault for point in points):
        raise ProblemFaults(points[0].fault.splitlines())
    return points


def _base(source: str, folder: Path) -> tuple[dict[Any, Any], Path]:
    """Return the document of the base scenario `source`, and the folder to which file names in the document are
    relative. If `source` is a file name, it is relative to `folder`, the sweep's folder."""
    if Path(source).suffix in (".yaml", ".yml"):
        source = str(folder / source)
    try:
        text, home = scenario_text(source, FOLDER)
        document = parse_yaml(text)
    except ProblemFaults as error:
        raise ProblemFaults([f"base: {fault}" for fault in error.faults]) from None
    if not isinstance(document, dict):
        raise ProblemFaults([f"base: must be a mapping, got {shorten(document)}"])
    return document, home


def _point(base: dict[Any, Any], always: Mapping[str, Any], values: Mapping[str, Any], home: Path) -> SweepPoint:
    document = copy.deepcopy(base)
    try:
        for path, value in (*always.items(), *values.items()):
            put(document, path, copy.deepcopy(value))
        return SweepPoint(values, scenario_of(document, home).document(), home)
    except ProblemFaults as error:
        return SweepPoint(values, None, home, "\n".join(error.faults))
    except ValueError as error:
        return SweepPoint(values, None, home, str(error))


def _parts(path: str) -> list[str | int]:
    """Split a path: `fabrics[0].options.ratio` gives ["fabrics", 0, "options", "ratio"]. Raises ValueError if the path
    is malformed."""
    found: list[str | int] = []
    for part in path.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError("must be a path such as cluster.nic_gbps or fabrics[0].options.ratio")
        found.append(match[1])
        found += [int(index) for index in re.findall(r"\d+", match[2])]
    return found


def put(document: dict[Any, Any], path: str, value: Any) -> None:
    """Set a value at a path of a document, in place. Missing sections are created. Raises ValueError if the path leads
    through a value that is not a section or list, or to a list element that does not exist."""
    *sections, last = _parts(path)
    place: Any = document
    for part in sections:
        place = place.setdefault(part, {}) if isinstance(place, dict) else _item(place, part, path)
    if isinstance(place, dict):
        place[last] = value
        return
    _item(place, last, path)
    place[last] = value


def _item(place: Any, part: str | int, path: str) -> Any:
    if not isinstance(place, list) or not isinstance(part, int) or part >= len(place):
        raise ValueError(f"{path}: has no element {part!r} in {shorten(place)}")
    return place[part]


def sweep(
    points: Sequence[SweepPoint],
    folder: Path,
    runner: SweepRunner,
    report: Callable[[str, int, int], None],
    *,
    again: bool = False,
) -> Swept:
    """Run the points that have no complete results file in `folder`, or all points if `again` is true. Points with
    equal scenarios run only once."""
    sound = [point for point in points if not point.fault]
    digests = {point.digest: point for point in sound}
    there = set() if again else complete(folder, digests)
    todo = [point for digest, point in digests.items() if digest not in there]
    faults: dict[str, str] = {}  # by digest
    report(f"{len(there)} already done" if there else "", len(there), len(digests))
    for number, (point, found) in enumerate(runner(todo) if todo else (), start=1):
        if fault := _written(folder, point, found):
            faults[point.digest] = fault
        report(point.title, len(there) + number, len(digests))
    ran = [point if point.fault else replace(point, fault=faults.get(point.digest, "")) for point in points]
    done, failed = (tuple(point for point in ran if bool(point.fault) is is_failed) for is_failed in (False, True))
    return Swept(done, failed, len(there))


def _written(folder: Path, point: SweepPoint, found: PointResults | Exception) -> str:
    """Write the results of a point to a file. Return an empty string on success. Return an error message if the point
    has failed or the file cannot be written."""
    assert point.document is not None
    if not isinstance(found, list):
        return str(found)
    try:
        write(folder, point.document, found)
    except OSError as error:
        return str(error)
    return ""


def run_point(point: SweepPoint) -> PointResults:
    from orchestrrl.lab.sim.rl.run import run_cluster

    assert point.document is not None
    try:
        return run_cluster(scenario_of(dict(point.document), point.folder))
    except (OrchestrRLError, ProblemFaults) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a defect is reported for its point, and other points continue
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def in_processes(
    points: Sequence[SweepPoint], at_once: int | None = None
) -> Iterator[tuple[SweepPoint, PointResults | Exception]]:
    """Run points in local processes, at most `at_once` at a time (by default one per core). Yield each point with its
    results or its error."""
    return run_tasks(run_point, points, at_once, ["orchestrrl.lab.sim.rl.run"])


RETRY_AFTER_S = 10.0
CONNECT_S = 10.0


def on_ray(points: Sequence[SweepPoint], address: str) -> Iterator[tuple[SweepPoint, PointResults]]:
    """Run points on an existing Ray cluster, and yield each point with its results or its error message. `address` is
    `auto` or HOST:PORT. Raises Permanent if Ray is not installed, and Retryable if no cluster responds at `address`."""
    if find_spec("ray") is None:
        raise Permanent("--ray requires ray: pip install 'orchestrrl[ray]'")
    _reach(address)
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, namespace="orchestrrl-sim", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise Retryable(f"no Ray cluster at {address}: {error}", RETRY_AFTER_S) from error
    try:
        task = ray.remote(num_cpus=1, max_retries=2)(run_point)
        running = {task.remote(point): point for point in points}
        while running:
            (ended,), _ = ray.wait(list(running), num_returns=1)
            try:
                found: PointResults = ray.get(ended)
            except RayError as error:
                found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield running.pop(ended), found
    finally:
        ray.shutdown()  # also ends the tasks of this job


def _reach(address: str) -> None:
    """Raise Retryable if no process listens at `address`. This check fails within seconds, while Ray itself would retry
    for minutes. If `address` is `auto`, nothing is checked."""
    if address == "auto":
        return
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ProblemFaults([f"--ray: {error}, got {address!r}"]) from None
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise Retryable(f"no Ray cluster at {address}: {error}", RETRY_AFTER_S) from error
