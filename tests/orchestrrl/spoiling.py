"""Documents with values of the wrong type at any path, for which no check may raise an unexpected exception."""

import copy
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    1e308,
    "",
    "x",
    "1:2",
    "http://[::1",
    "é\u2028\x00",
    "9" * 5000,
    [],
    [[]],
    [{}],
    [None],
    ["a", "a"],
    [{"id": []}],
    {},
    {"a": 1},
    {"a": {"b": [None]}},
    {"id": {}},
)
Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Return every path of a document, the empty path first."""
    yield at
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for part, inner in items:
        yield from places(inner, (*at, part))


def spoilt(document: Any, at: Place, value: Any) -> Any:
    """Return a copy with this value at the path; for the empty path the value itself."""
    if not at:
        return value
    copied = copy.deepcopy(document)
    inner = copied
    for part in at[:-1]:
        inner = inner[part]
    inner[at[-1]] = value
    return copied


def spoil(rng: random.Random, document: Any, most: int = 3) -> Any:
    """Return a copy with one to `most` faults: odd values, other numbers, and missing, repeated or unknown fields and
    elements."""
    for _ in range(rng.randint(1, most)):
        at = rng.choice(list(places(document))[1:] or [()])
        document = _spoilt_once(rng, document, at)
    return document


def _spoilt_once(rng: random.Random, document: Any, at: Place) -> Any:
    if not at or not isinstance(document, dict | list):
        return document
    copied = copy.deepcopy(document)
    holder = copied
    for part in at[:-1]:
        holder = holder[part]
    last = at[-1]
    old = holder[last]
    kind = rng.random()
    if kind < 0.15:
        del holder[last]
    elif kind < 0.25 and isinstance(holder, list):
        holder.append(copy.deepcopy(old))
    elif kind < 0.25:
        holder[f"{last}s"] = old
    elif kind < 0.6 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[last] = rng.choice((0, -old, old * 1000, old + 1, old / 3, old // 2 if old == old else 0, 1e-9, 10**12))
    else:
        holder[last] = rng.choice(ODD)
    return copied
