"""Checks that docs/architecture.md and CONTRIBUTING.md match the repository."""

import ast
import re
import tomllib
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT
from tests.docs.wiring_graph import diagram, drawn

PAGE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CODE = ("orchestrrl", "planner", "balancer", "ocs_drivers")
TOP_LEVEL = (*CODE, "tests", "deploy", "proto", "docs")
WALKS = (
    "From a load sample to a move",
    "From a collective's end to a circuit",
    "From a weight shard to an engine",
)
# Modules at which a process starts. Drivers, engines, transports and other products are loaded by name from the entry
# points; the plug-ins in INSTRUMENT are loaded by the engine's or the trainer's process.
PROCESSES = (
    "orchestrrl.cli.agent",
    "orchestrrl.cli.daemon",
    "orchestrrl.cli.gateway",
    "orchestrrl.cli.sync.peer",
    "orchestrrl.weights.peer.main",
    "orchestrrl.weights.trainer.client",
)
INSTRUMENT = "orchestrrl/integrations/instrument"


def repository_paths(text: str) -> list[str]:
    """Return the texts in backticks that name a file or folder of the repository."""
    quoted = re.findall(r"`([\w./-]+)`", text)
    return [path for path in quoted if "/" in path and path.split("/")[0] in TOP_LEVEL]


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE.name} has no section {title!r}"
    return found[1]


def table(title: str) -> list[list[str]]:
    """Return the cells of a section's table by row, without the header."""
    rows = [line.strip("|").split("|") for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def steps(title: str) -> list[str]:
    """Return the paths of a walk's steps, in order. A step begins with its file."""
    found = re.findall(r"^(\d+)\. `([^`]+)` \w", section(title), flags=re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1)), f"{title}: steps are misnumbered"
    return [path for _, path in found]


def module_path(module: str) -> Path | None:
    """Return the file of a first-party module, or None."""
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return the first-party modules that a file imports, also inside functions, with the imported names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(module for module in found if module.split(".")[0] in CODE)


def entry_points() -> list[EntryPoint]:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return [EntryPoint(name, value, group) for group, each in groups.items() for name, value in each.items()]


@cache
def loaded() -> frozenset[Path]:
    """Return the files that the processes import, directly or indirectly, without the lab."""
    waiting = [*PROCESSES, *(entry.module for entry in entry_points())]
    unknown = [module for module in waiting if module_path(module) is None]
    assert not unknown, f"processes or entry points without a file: {unknown}"
    seen: set[Path] = set()
    while waiting:
        module = waiting.pop()
        path = module_path(module)
        if path is not None and path not in seen and not module.startswith("orchestrrl.lab"):
            seen.add(path)
            waiting.extend(imported_modules(path))
    return frozenset(seen)


def test_every_path_exists() -> None:
    for page in (PAGE, CONTRIBUTING):
        paths = repository_paths(page.read_text())
        assert paths, page.name
        missing = [path for path in paths if not (ROOT / path).exists()]
        assert not missing, f"{page.name} names what does not exist: {missing}"


def test_every_link_of_the_contributors_page_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", CONTRIBUTING.read_text())
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert targets
    assert not missing


def test_every_package_has_a_row() -> None:
    inner = sorted(path.parent.name for path in (ROOT / "orchestrrl").glob("*/__init__.py"))
    wanted = {f"orchestrrl/{name}" for name in inner} | set(CODE[1:]) | {"tests", "deploy", "proto"}
    listed = [row[0].strip("`/") for row in table("Packages")]
    assert sorted(listed) == sorted(wanted)
    assert all(len(row) == 3 and all(row) for row in table("Packages"))


def may_import(cell: str, packages: frozenset[str]) -> frozenset[str]:
    """Return the packages that a cell of the table's last column allows."""
    if cell.startswith("every package"):
        return packages - set(re.findall(r"`(\w+)`", cell))
    allowed = [clause for clause in cell.split(";") if not clause.strip().startswith(("not ", "no "))]
    return frozenset(re.findall(r"`(\w+)(?:\.\w+)?`", ";".join(allowed)))


def package_of(module: str) -> str:
    """Return `fleet` for a module of orchestrrl.fleet, `planner` for one of planner."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "orchestrrl" else first


def test_packages_import_only_what_their_rows_allow() -> None:
    rows = {row[0].strip("`/"): row[2] for row in table("Packages") if row[0].strip("`/").split("/")[0] in CODE}
    packages = frozenset(folder.split("/")[-1] for folder in rows)
    for folder, cell in rows.items():
        allowed = may_import(cell, packages) | {folder.split("/")[-1]}
        for path in sorted((ROOT / folder).rglob("*.py")):
            used = {package_of(module) for module in imported_modules(path)} & packages
            assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}; its row: {cell}"


@pytest.mark.parametrize("title", WALKS)
def test_processes_import_every_file_of_a_walk(title: str) -> None:
    walk = steps(title)
    assert len(walk) == len(set(walk)) >= 10
    stray = [path for path in walk if not path.startswith(INSTRUMENT) and ROOT / path not in loaded()]
    assert not stray, f"{title}: no process imports {stray}"


def test_every_question_names_a_file() -> None:
    for question, *where in table("Where is it decided that ...?"):
        assert question.endswith("?")
        files = repository_paths("|".join(where))
        assert files, question
        assert all((ROOT / path).is_file() for path in files), question


def test_glossary_is_sorted_without_duplicates() -> None:
    terms = [term.casefold() for term, _ in table("Glossary")]
    assert terms == sorted(set(terms))


def test_every_entry_point_group_is_described() -> None:
    text = CONTRIBUTING.read_text()
    missing = {entry.group for entry in entry_points() if f"`{entry.group}`" not in text}
    assert not missing


def test_every_make_target_that_the_contributors_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", CONTRIBUTING.read_text()))
    assert named
    assert named <= targets


def test_diagram_of_the_daemons_parts_is_current() -> None:
    assert drawn() == diagram(), "write it anew: python tests/docs/wiring_graph.py"


def test_diagram_edges_lead_to_later_parts() -> None:
    made = re.findall(r'^  (\w+)\["', diagram(), flags=re.MULTILINE)
    arrows = re.findall(r"^  (\w+) -->(?:\|\w+\|)? (\w+)$", diagram(), flags=re.MULTILINE)
    assert len(made) == len(set(made)) >= 15
    assert len(arrows) > len(made)
    assert all(made.index(one) < made.index(other) for one, other in arrows)
