"""Convert gNMI messages to and from plain data (paths, values, and trees assembled from updates), without side effects.

A path is a tuple of elements. An element consists of a name and its keys. A tree has the structure of JSON. It consists
of mappings, lists of mappings that include their keys as members, and leaves.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pygnmi.spec.v080 import gnmi_pb2


@dataclass(frozen=True, slots=True)
class Elem:
    name: str
    keys: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f"[{name}={value}]" for name, value in self.keys)


Path = tuple[Elem, ...]


def path(*names: str | Elem) -> Path:
    return tuple(Elem(name) if isinstance(name, str) else name for name in names)


def shown(elems: Path) -> str:
    return "/" + "/".join(str(elem) for elem in elems)


def path_to_pb(elems: Path, origin: str = "") -> Any:
    return gnmi_pb2.Path(origin=origin, elem=[gnmi_pb2.PathElem(name=elem.name, key=dict(elem.keys)) for elem in elems])


def path_from_pb(message: Any, prefix: Any = None) -> Path:
    """Convert a path message to a path. If the path message `prefix` is given, its elements come first. Module names in
    front of element names (`openconfig-optical-switch:port`) are dropped. If the field `elem` is empty, as in messages
    from old servers, the field `element` is used."""
    elems = [*(prefix.elem if prefix is not None else ()), *message.elem]
    if not elems:
        return path(*(_bare(name) for name in (*(prefix.element if prefix is not None else ()), *message.element)))
    return tuple(Elem(_bare(elem.name), tuple(sorted(elem.key.items()))) for elem in elems)


def value_to_pb(value: object) -> Any:
    return gnmi_pb2.TypedValue(json_ietf_val=json.dumps(value).encode())


def value_from_pb(message: Any) -> Any:
    """Convert a value message to plain data. JSON values are parsed. Values of other types are returned unchanged,
    because the drivers use only text and numbers of these types. Return None if there is no value. Raises ValueError
    if the JSON is malformed."""
    kind = message.WhichOneof("value")
    value = getattr(message, kind) if kind else None
    if kind in ("json_val", "json_ietf_val"):
        return _without_modules(json.loads(value)) if value else None
    return value


def tree(updates: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Merge updates, which are pairs of a path and a value, into one tree. A value may be a whole container, a list
    entry or a leaf."""
    root: dict[str, Any] = {}
    for elems, value in updates:
        graft(root, elems, value)
    return root


def graft(root: dict[str, Any], elems: Path, value: Any) -> None:
    for elem in reversed(elems):
        if elem.keys:
            value = [{**dict(elem.keys), **value}] if isinstance(value, Mapping) else [dict(elem.keys)]
        value = {elem.name: value}
    if not isinstance(value, Mapping):
        raise ValueError(f"a value without a path must be a container, got {value!r}")
    _merge(root, value, {elem.name: frozenset(name for name, _ in elem.keys) for elem in elems if elem.keys})


def member(data: Any, *names: str) -> Any:
    """Return the value in a tree at the path that the given names form. Return None if the value is absent."""
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def mapping(data: Any) -> Mapping[str, Any]:
    """Return `data`, a container of a tree, or an empty mapping if `data` is None. Raises ValueError if `data` is
    anything else."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ValueError(f"a value in the response must be a container, got {str(data)[:40]!r}")
    return data


def entries(data: Any) -> list[Mapping[str, Any]]:
    """Return the entries of `data`, a list in a tree. The result is empty if `data` is None. Raises ValueError if
    `data` is not a list of containers."""
    if data is None:
        return []
    if not isinstance(data, list):
        raise ValueError(f"a value in the response must be a list, got {str(data)[:40]!r}")
    return [mapping(each) for each in data]


def _merge(into: dict[str, Any], new: Mapping[str, Any], keys: Mapping[str, frozenset[str]]) -> None:
    for name, value in new.items():
        old = into.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value, keys)
        elif isinstance(old, list) and isinstance(value, list):
            for entry in value:
                _merge_entry(old, entry, keys.get(name, frozenset()), keys)
        else:
            into[name] = value


def _merge_entry(old: list[Any], entry: Any, key: frozenset[str], keys: Mapping[str, frozenset[str]]) -> None:
    for each in old:
        if key and isinstance(each, dict) and all(str(each.get(name)) == str(entry.get(name)) for name in key):
            _merge(each, entry, keys)
            return
    old.append(entry)


def _without_modules(value: Any) -> Any:
    if isinstance(value, dict):
        return {_bare(name): _without_modules(each) for name, each in value.items()}
    return [_without_modules(each) for each in value] if isinstance(value, list) else value


def _bare(name: str) -> str:
    return name.rpartition(":")[2]
