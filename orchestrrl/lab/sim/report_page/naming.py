"""Which results are of one scenario, and what each is called where there are several. Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrrl.lab.sim.rl.results import digest_of

LONGEST = 60  # letters by which scenarios of one name are told apart
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def scenario_names(scenarios: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By digest. What differs in seeds, arms and which fabrics it has alone is one scenario, and has one name: results
    of several runs are put together. Scenarios of one name are told apart by the values in which they differ; where
    that says too much, or nothing, by the beginnings of their digests. A name that all have goes without saying."""
    documents = {digest_of(scenario): scenario for scenario in scenarios}
    said = {digest: _distinguishing(each, _clashing(documents.values())) for digest, each in documents.items()}
    by_name: dict[str, dict[str, Mapping[str, Any]]] = {}
    for each in said.values():
        by_name.setdefault(str(each.get("name") or "scenario"), {})[digest_of(each)] = each
    names = {
        digest: f"{name} {told}".strip() if len(by_name) > 1 else told or name
        for name, some in by_name.items()
        for digest, told in _distinguished(some).items()
    }
    return {digest: names[digest_of(each)] for digest, each in said.items()}


def in_order(name: str) -> list[tuple[float, str]]:
    """To sort by: words and numbers by turns."""
    parts = _NUMBER.split(name)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]


def _clashing(scenarios: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names of fabrics that are not the same in all scenarios which have them."""
    found: dict[str, set[str]] = {}
    for scenario in scenarios:
        for title, section in _fabrics(scenario).items():
            found.setdefault(title, set()).add(json.dumps(section, sort_keys=True))
    return {title for title, sections in found.items() if len(sections) > 1}


def _fabrics(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    sections = scenario.get("fabrics")
    return {str(each.get("name") or each.get("kind")): each for each in sections} if isinstance(sections, list) else {}


def _distinguishing(scenario: Mapping[str, Any], clashing: Iterable[str]) -> dict[str, Any]:
    """What tells it from others; fabrics are said where they clash, their options by their name."""
    said = {name: value for name, value in scenario.items() if name not in ("seeds", "fabrics")}
    if isinstance(generation := said.get("generation"), Mapping):
        said["generation"] = {name: value for name, value in generation.items() if name != "arms"}
    fabrics = _fabrics(scenario)
    return said | {title: fabrics[title].get("options", {}) for title in sorted(clashing) if title in fabrics}


def _distinguished(scenarios: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By digest; nothing where there is one alone."""
    if len(scenarios) == 1:
        return dict.fromkeys(scenarios, "")
    leaves = {digest: dict(_leaves(scenario, "")) for digest, scenario in scenarios.items()}
    paths = list(dict.fromkeys(path for each in leaves.values() for path in each))
    differ = [path for path in paths if len({each[path] for each in leaves.values() if path in each}) > 1]
    last = [path.rpartition(".")[2] for path in differ]
    short = {path: name if last.count(name) == 1 else path for path, name in zip(differ, last, strict=True)}
    told = {
        digest: ", ".join(f"{short[path]} {each[path]}" for path in differ if path in each)
        for digest, each in leaves.items()
    }
    if len(set(told.values())) == len(told) and max(map(len, told.values())) <= LONGEST:
        return told
    return {digest: digest[:6] for digest in scenarios}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, value) of all that it says."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and not all(isinstance(each, str | int | float) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")
    else:
        yield path, "-".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
