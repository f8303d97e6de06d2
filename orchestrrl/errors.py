"""Errors that say what to do next. Every failure of the world is one of three."""

from collections.abc import Sequence

from pydantic import ValidationError


class OrchestrRLError(Exception):
    """Base of the tree; never raised itself."""


class Retryable(OrchestrRLError):
    """Nothing happened; the same call may succeed after `after_s` seconds."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class Permanent(OrchestrRLError):
    """Nothing happened, and repeating the call will not help."""


class OutcomeUnknown(OrchestrRLError):
    """It may or may not have happened: observe before acting again."""


class ProblemFaults(OrchestrRLError):
    """Malformed input, with every fault at once, each `path.to.field: what is wrong, got VALUE`."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def path_of(location: tuple[int | str, ...]) -> str:
    """`("ocs", 1, "timeout_s")` as `ocs[1].timeout_s`; the document itself as `(document)`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:  # a name that somebody made up may break the line
            name = part if part.isprintable() else part.encode("unicode_escape").decode()
            path += f".{name}" if path else name
    return path or "(document)"


def faults_of(error: ValidationError) -> list[str]:
    """One line per fault of a pydantic validation, as `path.to.field: what is wrong, got VALUE`."""
    faults = []
    for item in error.errors(include_url=False):
        if item["type"] == "missing":
            faults.append(f"{path_of(item['loc'])}: is missing, got nothing")
        elif item["type"] == "extra_forbidden":
            faults.append(f"{path_of(item['loc'])}: is not a known field, got {shorten(item['input'])}")
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            faults.append(f"{path_of(item['loc'])}: should be an object, got {shorten(item['input'])}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            faults.append(f"{path_of(item['loc'])}: {message}, got {shorten(item['input'])}")
    return faults


def few(words: Sequence[str], most: int = 8, between: str = "; ") -> str:
    """The first of them, cut, and how many more there are: a fleet has hundreds of engines, a model thousands of
    tensors."""
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return between.join([*(cut(word) for word in words[:most]), *more])


def cut(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten(value: object, limit: int = 80) -> str:
    """A value as JSON-like text for a message, cut at `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
