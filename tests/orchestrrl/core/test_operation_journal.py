"""Check that intents, steps and results of operations have a single writer."""

import ast
from collections.abc import Iterator
from pathlib import Path

from orchestrrl.core.journal.kinds import OPERATIONS

ROOT = Path(__file__).parents[3]
KINDS = {kind.name for entries in OPERATIONS for kind in (entries.intent, entries.result, entries.step) if kind}


def appends(tree: ast.AST) -> Iterator[str]:
    """Yield the kinds of operation entries that code passes to an `append`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            for name in (each for argument in call.args for each in ast.walk(argument)):
                if isinstance(name, ast.Attribute) and name.attr in KINDS:
                    yield name.attr


def test_only_operation_journal_writes_operation_entries() -> None:
    files = [path for folder in ("orchestrrl", "planner", "balancer") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): kinds for path in files if (kinds := [*appends(ast.parse(path.read_text()))])}
    assert len(files) > 500
    assert found == {}


def test_check_detects_another_writer() -> None:
    code = "journal.append(now_s, EntryKind.CIRCUITS_RESULT, id, body)"
    assert [*appends(ast.parse(code))] == ["CIRCUITS_RESULT"]
