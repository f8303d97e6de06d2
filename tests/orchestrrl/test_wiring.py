"""Check that parts get their collaborators by constructor: no file sets an attribute of another file's part.

A part is an instance of a class that is not a dataclass. The check covers attributes that `__init__` leaves for later:
None, or a function that does nothing yet. Dataclasses are records, whose data may change.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrrl", "planner", "balancer", "ocs_drivers")
# Assignments that do not set a collaborator, or cannot happen earlier, each with its reason.
ALLOWED = {
    ("orchestrrl/cli/ocs/emulator.py", "device.on_setter"): "the terminal follows a device while a client is served",
    ("orchestrrl/gateway/http/server.py", "connection.on_writable"): "the connection is one request's, not a part",
}


@cache
def sources() -> dict[str, ast.Module]:
    paths = [
        path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path.parent.name != "pb"
    ]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def is_record(definition: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list)


@cache
def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def left_for_later(definition: ast.ClassDef) -> set[str]:
    """Return the attributes to which `__init__` assigns no usable value."""
    found: set[str] = set()
    for method in definition.body:
        if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                empty = isinstance(node.value, ast.Lambda) or ast.unparse(node.value) == "None"
                owned = [
                    each for each in targets if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
                ]
                found.update(each.attr for each in owned if empty)
    return found


@cache
def fields_of_records() -> dict[str, set[str]]:
    """Return the fields of each dataclass."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in sources().values():
        for definition in filter(is_record, classes(tree)):
            for node in definition.body:
                if isinstance(node, ast.AnnAssign):
                    found[definition.name].add(ast.unparse(node.target))
    return found


def records_at_hand(tree: ast.Module) -> set[str]:
    """Return the fields of the dataclasses that a file defines or imports."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = imported | {definition.name for definition in classes(tree)}
    return set().union(*(fields for name, fields in fields_of_records().items() if name in named))


def assignments(tree: ast.Module) -> set[tuple[str, str]]:
    """Return each attribute of another object that is assigned, with the expression."""
    return {
        (node.attr, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) not in ("self", "cls")
    }


def test_no_file_sets_an_attribute_of_another_part() -> None:
    later: dict[str, set[str]] = defaultdict(set)  # files by attribute
    for name, tree in sources().items():
        for definition in classes(tree):
            for attribute in set() if is_record(definition) else left_for_later(definition):
                later[attribute].add(name)
    found = {
        (name, expression)
        for name, tree in sources().items()
        for attribute, expression in assignments(tree)
        if later[attribute] and name not in later[attribute] and attribute not in records_at_hand(tree)
    }
    assert found - ALLOWED.keys() == set(), "give it to the constructor"
    assert ALLOWED.keys() - found == set(), "is no longer assigned: remove it"
