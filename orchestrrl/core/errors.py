"""Errors whose class determines the caller's next step. Every external failure is raised as Retryable, Permanent or
OutcomeUnknown."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # most processes raise errors, but few validate models
    from pydantic import BaseModel, ValidationError


class OrchestrRLError(Exception):
    """Base class of OrchestrRL's errors. Only its subclasses are raised."""


class Retryable(OrchestrRLError):
    """The call had no effect. The same call may succeed after `after_s` seconds."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class Permanent(OrchestrRLError):
    """The call had no effect, and repeating it will not help."""


class LimitReached(Permanent):
    """The input exceeds a configured limit. The message contains the limit, its configuration key and the rejected
    value."""


class OutcomeUnknown(OrchestrRLError):
    """The call may or may not have taken effect. The caller must observe the state before it acts again."""


class ProblemFaults(OrchestrRLError):
    """Raised for malformed input, with a list of all faults in the input. A fault has the form `path.to.field: what is
    wrong, got VALUE`."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def path_of(location: tuple[int | str, ...]) -> str:
    """Format a location such as `("ocs", 1, "timeout_s")` as `ocs[1].timeout_s`. Return `(document)` for an empty
    location."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:  # a user-defined name may contain line breaks
            name = part if part.isprintable() else part.encode("unicode_escape").decode()
            path += f".{name}" if path else name
    return path or "(document)"


def faults_of(error: "ValidationError", model: "type[BaseModel] | None" = None) -> list[str]:
    """Return one line for each fault in a pydantic validation error, as `path.to.field: what is wrong, got VALUE`. If
    the validated `model` is given, the line about an unknown field suggests the most similar known field."""
    faults = []
    for item in error.errors(include_url=False):
        if item["type"] == "missing":
            faults.append(f"{path_of(item['loc'])}: is missing, got nothing")
        elif item["type"] == "extra_forbidden":
            fault = f"{path_of(item['loc'])}: is not a known field, got {shorten(item['input'])}"
            faults.append(fault + did_you_mean(item["loc"][-1], _fields_beside(model, item["loc"])))
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            faults.append(f"{path_of(item['loc'])}: should be an object, got {shorten(item['input'])}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            faults.append(f"{path_of(item['loc'])}: {message}, got {shorten(item['input'])}")
    return faults


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar known name, or "" if no known name is similar."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7) if isinstance(name, str) and len(name) < 100 else []
    return f"; did you mean {close[0]}?" if close else ""


def _fields_beside(model: "type[BaseModel] | None", location: tuple[int | str, ...]) -> Iterable[str]:
    """Return the names of the fields that `model` allows beside the field at `location`, according to the model's JSON
    schema."""
    whole = {} if model is None else _schema(model)

    def objects(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            node = whole["$defs"][node["$ref"].rpartition("/")[2]]
        return [each for one in node["anyOf"] for each in objects(one)] if "anyOf" in node else [node]

    here = objects(whole)
    for part in location[:-1]:
        within = [
            node.get("properties", {}).get(part) or node.get("items") or node.get("additionalProperties")
            for node in here
        ]
        here = [inner for node in within if isinstance(node, dict) for inner in objects(node)]
    return [name for node in here for name in node.get("properties", ())]


@cache
def _schema(model: "type[BaseModel]") -> dict[str, Any]:
    from pydantic import PydanticUserError

    try:
        return model.model_json_schema()
    except PydanticUserError:  # the model, of a plug-in, has a type without a JSON schema
        return {}


def number_runs(numbers: Iterable[int]) -> list[str]:
    """Format numbers as a list of runs of consecutive numbers, such as `1-4` and `9`, in the given order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]


def few(arguments: Sequence[str], most: int = 8, between: str = "; ") -> str:
    """Join the first `most` texts, each cut to a maximum length, and append the number of omitted texts. Use this
    function for lists that can be long, such as engines or tensors."""
    more = [f"and {len(arguments) - most} more"] if len(arguments) > most else []
    return between.join([*(cut(word) for word in arguments[:most]), *more])


def cut(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten(value: object, limit: int = 80) -> str:
    """Format a value with `repr` for a message, cut to at most `limit` characters."""
    return cut(repr(value), limit)
