"""The table of extras agrees with pyproject.toml and with the packages that each command can import."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest

import orchestrrl
from orchestrrl.cli.commands import HELD, MODULE_OF, function_names
from orchestrrl.cli.extras import EXTRA_OF, PACKAGES

ROOT = Path(orchestrrl.__file__).parent.parent
OURS = ("orchestrrl", "planner", "balancer", "ocs_drivers")
CHARTS = "orchestrrl.core.charts"  # options such as --plot import it
STARTS_A_DAEMON = {"fabric box", "sync box"}
GENERATED = {f"{part} {verb}" for part in HELD for verb in ("pause", "resume")}  # not functions of a file


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OURS, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)


def reachable(modules: set[str]) -> set[str]:
    """Return the modules that these import, also indirectly and inside functions. Charts are left out."""
    found: set[str] = set()
    while modules:
        module = modules.pop()
        if module in found or module == CHARTS:
            continue
        found.add(module)
        parent = module.rpartition(".")[0]
        if parent and module.split(".")[0] in OURS:
            modules.add(parent)
        if module in graph().modules and not graph().is_module_squashed(module):
            modules |= graph().find_modules_directly_imported_by(module)
    return found


def imports(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in (each for statement in nodes for each in ast.walk(statement)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & graph().modules) or {node.module}


def imported_by(path: str) -> set[str]:
    """Return what the command's function imports, with the functions of its file that it calls."""
    body = ast.parse((ROOT / f"orchestrrl/cli/{MODULE_OF[path].replace('.', '/')}.py").read_text()).body
    functions = {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    wanted = [next(name for name in function_names(path) if name in functions)]
    called: set[str] = set()
    while wanted:
        if (name := wanted.pop()) not in called:
            called.add(name)
            names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            wanted += names & functions.keys()
    at_the_top = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
    return reachable({*imports([*at_the_top, *(functions[name] for name in called)])})


@pytest.mark.parametrize("path", [path for path in MODULE_OF if path not in GENERATED])
def test_commands_import_only_packages_of_their_extra(path: str) -> None:
    needed = imported_by(path) & {package for packages in PACKAGES.values() for package in packages}
    assert needed <= set(PACKAGES[EXTRA_OF[path]] if path in EXTRA_OF else ())
    assert needed or path not in EXTRA_OF or path in STARTS_A_DAEMON


def test_packages_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        names = {re.split(r"[>=\[]", each)[0] for each in declared[extra]}
        if "orchestrrl" in names:
            names = names - {"orchestrrl"} | {re.split(r"[>=]", each)[0] for each in declared["planner"]}
        assert {packages_distributions()[package][0] for package in packages} == names
    assert {path for path in EXTRA_OF if path not in MODULE_OF} == set()
