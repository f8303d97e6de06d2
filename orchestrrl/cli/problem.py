"""Offline problems: one JSON document from a file or standard input, checked in one go. Every fault is reported."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrrl.cli.output import EXIT_INFEASIBLE, fail
from orchestrrl.core.errors import ProblemFaults, faults_of, path_of, shorten

Location = tuple[int | str, ...]


class ProblemPart(BaseModel):
    """Base of every object in a problem: known fields only, no coercion (a bool is no number), finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Part = TypeVar("Part", bound=ProblemPart)
Check = Callable[[Any], Iterable[str]]  # from the raw document, whatever its shape, to faults


def read_problem(source: str, model: type[Part], checks: Iterable[Check] = ()) -> Part:
    """The problem in the file `source` (`-`: standard input). Raises ProblemFaults with all faults.

    `checks` are what types cannot say, such as ids used twice. They see the raw document, so that they speak up even
    beside faults of type, and have to bear any shape: `values_at` does.
    """
    document, faults = _parse(_read(source))
    problem = None
    try:
        problem = model.model_validate(document)
    except ValidationError as error:
        faults += faults_of(error, model)
    for check in checks:
        faults += check(document)
    if problem is None or faults:
        raise ProblemFaults(faults)
    return problem


def infeasible(limit: str, needed: float, available: float, unit: str) -> NoReturn:
    """A well-formed problem without an answer: the limit that is missed, and by how much. Exit status 3."""
    short = f"{needed - available:g} {unit} short ({needed:g} needed, {available:g} there)"
    fail(f"infeasible: {limit}: {short}", EXIT_INFEASIBLE)


def values_at(document: Any, pattern: str, kind: type = object) -> Iterator[tuple[Location, Any]]:
    """Where and what of a kind `pattern` finds: `workers[].id` is the field `id` of each element of `workers`, `a|b` is
    both of these fields, `ports{}` each key of `ports`, `ports.*` each of its values. What does not have the shape is
    passed over; a bool is no int."""
    found: list[tuple[Location, Any]] = [((), document)]
    for step in pattern.replace("[]", ".[]").replace("{}", ".{}").split("."):
        found = [inner for location, value in found for inner in _step(location, value, step)]
    return (each for each in found if isinstance(each[1], kind) and (kind is not int or type(each[1]) is int))


def _step(location: Location, value: Any, step: str) -> list[tuple[Location, Any]]:
    if step == "[]":
        return [((*location, place), item) for place, item in enumerate(value)] if isinstance(value, list) else []
    if step == "{}":
        return [((*location, key), key) for key in value] if isinstance(value, dict) else []
    names = value if step == "*" else step.split("|")
    return [((*location, name), value[name]) for name in names if name in value] if isinstance(value, dict) else []


def unique(*patterns: str) -> Check:
    """A check that the ids at all of `patterns` together differ from each other."""

    def check(document: Any) -> Iterator[str]:
        first: dict[str, Location] = {}
        found = (each for pattern in patterns for each in values_at(document, pattern, str))
        # In the order of the document: indices as numbers, fields as they come in a sorted page.
        for location, value in sorted(found, key=lambda each: [(isinstance(part, str), part) for part in each[0]]):
            if first.setdefault(value, location) != location:
                yield f"{path_of(location)}: is used already by {path_of(first[value])}, got {shorten(value)}"

    return check


def ids_exist(pattern: str, *owners: str) -> Check:
    """A check that each id at `pattern` is one of those at `owners`."""

    def check(document: Any) -> Iterator[str]:
        ids = {value for owner in owners for _, value in values_at(document, owner, str)}
        for location, value in values_at(document, pattern, str):
            if value not in ids:
                yield f"{path_of(location)}: does not exist, got {shorten(value)}"

    return check


def _read(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ProblemFaults([f"(document): cannot be read: {error.strerror}, got {shorten(source)}"]) from error


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys that it was given more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.repeated: dict[str, Any] = {}
        for key, value in pairs:
            if key in self:
                self.repeated[key] = value
            self[key] = value


def _parse(text: bytes) -> tuple[Any, list[str]]:
    """The document, and the faults that only its text shows."""
    try:
        document = json.loads(text, object_pairs_hook=_Object)
        return document, list(_repeated_keys(document))
    except RecursionError as error:
        raise ProblemFaults(
            [f"(document): is nested too deeply, got {shorten(text[:80].decode(errors='replace'))}"]
        ) from error
    except ValueError as error:  # JSON, its encoding, or a number of thousands of digits
        raise ProblemFaults(
            [f"(document): is not valid JSON: {error}, got {shorten(text.decode(errors='replace'))}"]
        ) from error


def _repeated_keys(value: Any, location: Location = ()) -> Iterator[str]:
    if isinstance(value, _Object):
        for key, last in value.repeated.items():
            yield f"{path_of((*location, key))}: is given more than once, got {shorten(last)}"
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in inner:
        yield from _repeated_keys(item, (*location, part))
