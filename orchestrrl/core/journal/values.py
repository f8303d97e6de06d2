"""Check that a value can be written to the journal, read back unchanged and shown by every client."""

from collections.abc import Iterator
from math import isfinite
from typing import Any

from orchestrrl.core.errors import few, shorten

# The range of protobuf's integers, signed and unsigned.
LEAST, MOST = -(2**63), 2**64 - 1
# The years 1 to 9999.
EARLIEST_S, LATEST_S = -62_135_596_800.0, 253_402_300_799.0
DEEPEST = 64
FAULTS_NAMED = 5
_PLAIN = frozenset({str, float, bool, type(None)})


def can_be_written(value: Any, depth: int = DEEPEST) -> bool:
    """Return whether, in a JSON object or array, all keys are strings, all integers are in range, and values are nested
    at most `depth` levels deep. The JSON encoder detects all other faults."""
    if not depth:
        return False
    if isinstance(value, dict):
        for key in value:
            if key.__class__ is not str and not isinstance(key, str):
                return False
        value = value.values()
    for each in value:
        kind = each.__class__
        if kind in _PLAIN:
            continue
        if kind is int:
            if not LEAST <= each <= MOST:
                return False
        elif isinstance(each, dict | list | tuple) and not can_be_written(each, depth - 1):
            return False
    return True


def body_faults(body: object) -> list[str]:
    """Return the faults that prevent the body of a journal entry from being read back unchanged or shown to clients,
    each as `path: must be ..., got VALUE`."""
    faults = list(_faults("", body, DEEPEST + 1))
    return [few(faults, FAULTS_NAMED)] if len(faults) > FAULTS_NAMED else faults


def _faults(path: str, value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if not _is_unicode(value):
            yield f"{path}: must be Unicode without lone surrogates, got {shorten(ascii(value))}"
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int):
        if not LEAST <= value <= MOST:
            yield f"{path}: must be from -2**63 to 2**64 - 1, got {shorten(value)}"
    elif isinstance(value, float):
        if not isfinite(value):
            yield f"{path}: must be a finite number, got {value}"
    elif not depth:
        yield f"{path}: must not be nested more than {DEEPEST} times"
    elif isinstance(value, dict):
        for key, each in value.items():
            name = key if isinstance(key, str) and _is_unicode(key) else ascii(key)
            if name is not key:
                yield f"{path}: must have texts as keys, got {shorten(name)}"
            yield from _faults(f"{path}.{name}" if path else name, each, depth - 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _faults(f"{path}[{index}]", each, depth - 1)
    else:
        yield f"{path}: must be a value of JSON, got {shorten(value)}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
