"""Read the problems of offline commands: one JSON document from a file or standard input. All errors are reported
together."""

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
    """Base class of every object in a problem. It rejects unknown fields, values of another type (a bool is not a
    number), and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Part = TypeVar("Part", bound=ProblemPart)
Check = Callable[[Any], Iterable[str]]  # from the raw document, of any shape, to error texts


def read_problem(source: str, model: type[Part], checks: Iterable[Check] = ()) -> Part:
    """Return the problem in the file `source` (`-`: standard input). Raises ProblemFaults with all errors if the
    problem is invalid.

    `checks` cover what types cannot express, such as duplicate ids. They receive the raw document, even if it contains
    wrong types. They must therefore accept a document of any shape, for example by reading it with `values_at`.
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
    """Print that a well-formed problem is infeasible, with the name of the limit and the amount by which `needed`
    exceeds `available`, and exit with status 3."""
    short = f"{needed - available:g} {unit} short ({needed:g} needed, {available:g} available)"
    fail(f"infeasible: {limit}: {short}", EXIT_INFEASIBLE)


def values_at(document: Any, pattern: str, kind: type = object) -> Iterator[tuple[Location, Any]]:
    """Yield the location and value of each match of `pattern` whose type is `kind`. `workers[].id` matches the field
    `id` of each element of `workers`, and `a|b` matches the fields `a` and `b`. `ports{}` matches each key of `ports`,
    and `ports.*` matches each value in `ports`. Parts of the document whose shape does not fit the pattern are skipped.
    A bool does not match the type int."""
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
    """Return a check that no id occurs more than once at the locations that match any of `patterns`."""

    def check(document: Any) -> Iterator[str]:
        first: dict[str, Location] = {}
        found = (each for pattern in patterns for each in values_at(document, pattern, str))
        # Sort by location: indices numerically, fields alphabetically.
        for location, value in sorted(found, key=lambda each: [(isinstance(part, str), part) for part in each[0]]):
            if first.setdefault(value, location) != location:
                yield f"{path_of(location)}: is already used by {path_of(first[value])}, got {shorten(value)}"

    return check


def ids_exist(pattern: str, *owners: str) -> Check:
    """Return a check that each id that matches `pattern` also occurs among the matches of the patterns `owners`."""

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
        raise ProblemFaults([f"(document): cannot be read from {source!r}: {error.strerror}"]) from error


class _Object(dict[str, Any]):
    """A JSON object as a dictionary that also records duplicate keys, with the last value of each, in `repeated`."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.repeated: dict[str, Any] = {}
        for key, value in pairs:
            if key in self:
                self.repeated[key] = value
            self[key] = value


def _parse(text: bytes) -> tuple[Any, list[str]]:
    """Return the parsed document, and an error message for each duplicate key. Raises ProblemFaults if `text` is not
    valid JSON or is nested too deeply."""
    try:
        document = json.loads(text, object_pairs_hook=_Object)
        return document, list(_repeated_keys(document))
    except RecursionError as error:
        raise ProblemFaults(
            [f"(document): must not be nested too deeply, got {shorten(text[:80].decode(errors='replace'))}"]
        ) from error
    except ValueError as error:  # invalid JSON, invalid encoding, or a number of thousands of digits
        raise ProblemFaults(
            [f"(document): must be valid JSON, got {shorten(text.decode(errors='replace'))}: {error}"]
        ) from error


def _repeated_keys(value: Any, location: Location = ()) -> Iterator[str]:
    if isinstance(value, _Object):
        for key, last in value.repeated.items():
            yield f"{path_of((*location, key))}: must be given only once, got {shorten(last)} again"
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in inner:
        yield from _repeated_keys(item, (*location, part))
