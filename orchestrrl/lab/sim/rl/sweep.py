"""Many scenarios from one: a grid over dotted paths of a base. Points, and what became of them; who runs them is
sweep_workers.py.

A point's results are a file of their own, named by the digest of its scenario and written whole: a sweep that was cut
short goes on where it was, and a point that fails holds nobody up.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, ValidationError

from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from orchestrrl.lab.sim.rl.results import complete, digest_of
from orchestrrl.lab.sim.rl.scenario_file import FOLDER, scenario_of
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


class SweepRunner(Protocol):
    """Runs points into files of a folder, and tells each outcome as it comes, in any order."""

    def __call__(self, points: Sequence[SweepPoint], folder: Path) -> Iterator[SweepOutcome]: ...


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
