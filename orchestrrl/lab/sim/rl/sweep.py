"""Many scenarios from one: a grid over dotted paths of a base, and its points run in processes of this machine, or as
tasks of a Ray cluster.

A point's results are a file of their own, named by the digest of its scenario and written whole: a sweep that was cut
short goes on where it was, and a point that fails holds nobody up.

On Ray, OrchestrRL must be installed on the cluster's nodes; results come back over Ray and are written on this machine.
A profile's file that a scenario names must lie at the same path there.
"""

import copy
import itertools
import re
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable, faults_of, shorten
from orchestrrl.lab.processes import run_tasks
from orchestrrl.lab.sim.rl.results import complete, digest_of, parse, write
from orchestrrl.lab.sim.rl.scenario import FOLDER, scenario_of
from orchestrrl.lab.sim.scenario import ScenarioSection, scenario_text

MOST_POINTS = 100_000  # what is more is a slip
_PART = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)((?:\[\d+\])*)")


class SweepSection(ScenarioSection):
    """`base`: a cluster scenario, by name or file. `set` changes it for all points, `grid` for each: every combination
    of the values, at paths such as cluster.nic_gbps or fabrics[0].options.ratio."""

    base: Annotated[str, Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """`document` as scenario_of reads it, defaults filled in; `fault`: why there is none."""

    values: Mapping[str, Any]
    document: Mapping[str, Any] | None
    folder: Path  # that the scenario's own files are found from
    fault: str = ""

    @property
    def title(self) -> str:
        return ", ".join(f"{path}={shorten(value, 40)}" for path, value in self.values.items()) or "the base"

    @property
    def digest(self) -> str:
        assert self.document is not None
        return digest_of(self.document)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """`fault` empty: its file is there."""

    point: SweepPoint
    fault: str = ""


# Runs points into files of a folder, and yields each outcome as it comes, in any order.
SweepRunner = Callable[[Sequence[SweepPoint], Path], Iterator[SweepOutcome]]


@dataclass(frozen=True, slots=True)
class Swept:
    done: tuple[SweepPoint, ...]  # in the grid's order, those that were there before among them
    failed: tuple[SweepOutcome, ...]
    found: int  # of those done: were there before


def load_sweep(path: Path) -> list[SweepPoint]:
    """Every point, in order. Raises ProblemFaults: of the file, and of the scenarios where not one of them is sound."""
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
    count = 1
    for some in section.grid.values():
        count *= len(some)
    if count > MOST_POINTS:
        faults.append(f"grid: must have at most {MOST_POINTS} points, got {count}")
    if faults:
        raise ProblemFaults(faults)
    points = []
    for chosen in itertools.product(*section.grid.values()):
        values = dict(zip(section.grid, chosen, strict=True))
        points.append(_point(base, section.set, values, home))
    if all(point.fault for point in points):
        raise ProblemFaults(points[0].fault.splitlines())
    return points


def _base(source: str, folder: Path) -> tuple[dict[Any, Any], Path]:
    """A file is found from the sweep's folder."""
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
    """`fabrics[0].options.ratio` as ["fabrics", 0, "options", "ratio"]. Raises ValueError."""
    found: list[str | int] = []
    for part in path.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError("must be a path such as cluster.nic_gbps or fabrics[0].options.ratio")
        found.append(match[1])
        found += [int(index) for index in re.findall(r"\d+", match[2])]
    return found


def put(document: dict[Any, Any], path: str, value: Any) -> None:
    """In place; sections that are not there are made. Raises ValueError where the path leads through what is none."""
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
        raise ValueError(f"{path}: leads to nothing at {part!r}, got {shorten(place)}")
    return place[part]


def sweep(
    points: Sequence[SweepPoint],
    folder: Path,
    runner: SweepRunner,
    report: Callable[[str, int, int], None],
    *,
    again: bool = False,
) -> Swept:
    """Those that have no file yet; with `again`, all. Points of the same scenario are run once."""
    sound = [point for point in points if not point.fault]
    digests = {point.digest: point for point in sound}
    there = set() if again else complete(folder, digests)
    todo = [point for digest, point in digests.items() if digest not in there]
    failed = [SweepOutcome(point, point.fault) for point in points if point.fault]
    report(f"{len(there)} were there" if there else "", len(there), len(digests))
    for number, outcome in enumerate(runner(todo, folder) if todo else (), start=1):
        failed += [outcome] if outcome.fault else []
        report(outcome.point.title, len(there) + number, len(digests))
    lost = {outcome.point.digest for outcome in failed if outcome.point.document is not None}
    done = tuple(point for point in sound if point.digest not in lost)
    order = {id(point): number for number, point in enumerate(points)}
    failed.sort(key=lambda outcome: order[id(outcome.point)])
    return Swept(done, tuple(failed), len(there))


def run_point(point: SweepPoint, folder: Path) -> str:
    """Write its results. Returns what went wrong, nothing where all is well."""
    from orchestrrl.lab.sim.rl.run import run_cluster
    from orchestrrl.lab.sim.rl.scenario import scenario_of

    assert point.document is not None
    try:
        scenario = scenario_of(dict(point.document), point.folder)
        write(folder, point.document, run_cluster(scenario))
    except (OrchestrRLError, ProblemFaults, OSError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a defect of ours at one point is told, and the rest goes on
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return ""


def in_processes(points: Sequence[SweepPoint], folder: Path, at_once: int | None = None) -> Iterator[SweepOutcome]:
    """So many at once; by default one for each core."""
    work = partial(run_point, folder=folder)
    for point, fault in run_tasks(work, points, at_once, ["orchestrrl.lab.sim.rl.run"]):
        yield SweepOutcome(point, str(fault))


RETRY_AFTER_S = 10.0
CONNECT_S = 10.0


def on_ray(points: Sequence[SweepPoint], folder: Path, address: str) -> Iterator[SweepOutcome]:
    """`address`: `auto` or HOST:PORT of a cluster that runs. None is started."""
    if find_spec("ray") is None:
        raise Permanent("--ray needs ray: pip install 'orchestrrl[ray]'")
    _reach(address)
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, namespace="orchestrrl-sim", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise Retryable(f"no Ray cluster at {address}: {error}", RETRY_AFTER_S) from error
    try:
        task = ray.remote(num_cpus=1, max_retries=2)(_text_of)
        running = {task.remote(point): point for point in points}
        while running:
            (told,), _ = ray.wait(list(running), num_returns=1)
            point = running.pop(told)
            try:
                fault, text = ray.get(told)
            except RayError as error:
                fault, text = f"{type(error).__name__}: {str(error).splitlines()[0]}", ""
            if not fault:
                assert point.document is not None
                write(folder, point.document, parse(text))
            yield SweepOutcome(point, fault)
    finally:
        ray.shutdown()  # which ends the tasks of this job


def _reach(address: str) -> None:
    """Ray itself tries for minutes where nobody listens."""
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


def _text_of(point: SweepPoint) -> tuple[str, str]:
    """What went wrong, and the point's file."""
    with tempfile.TemporaryDirectory(prefix="orchestrrl-sim-") as folder:
        fault = run_point(point, Path(folder))
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.json")]
    return fault, "".join(texts)
