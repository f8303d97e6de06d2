"""The diagram of the daemon's parts in docs/architecture.md, derived from `build_daemon` and its callees' annotations.

`python tests/docs/wiring_graph.py` regenerates it.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrrl.daemon import wiring

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- from `build_daemon`: python tests/docs/wiring_graph.py -->\n```mermaid\n", "```\n<!-- end -->"


def diagram() -> str:
    """Return the Mermaid text. An arrow leads from a part to the part whose constructor takes it, labelled with the
    protocol or attribute that is passed."""
    (function,) = ast.parse(inspect.getsource(wiring.build_daemon)).body
    assert isinstance(function, ast.FunctionDef)
    parts: dict[str, str] = {}  # variable -> class
    aliases: dict[str, list[tuple[str, str]]] = {}  # variable -> expression that it aliases
    arrows: dict[tuple[str, str], str] = {}

    def sources(node: ast.AST, label: str) -> Iterator[tuple[str, str]]:
        for found in ast.walk(node):
            if isinstance(found, ast.Name) and found.id in parts:
                yield found.id, label
            elif isinstance(found, ast.Name):
                yield from aliases.get(found.id, ())

    assignments = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
    for statement in sorted(assignments, key=lambda each: each.lineno):
        if not isinstance(statement.targets[0], ast.Name):
            continue
        name, call = statement.targets[0].id, _call(statement.value)
        made = "" if call is None else _made(call)
        if call is None or not made:
            aliases[name] = [*sources(statement.value, "")]
            continue
        for argument, wanted in _arguments(call):
            for source, _ in sources(argument, ""):
                taken = argument.attr if isinstance(argument, ast.Attribute) else wanted
                arrows[source, name] = "" if taken in (parts[source], "") else taken
        parts[name] = made
    lines = ["flowchart TB", *(f'  {name}["{made}"]' for name, made in parts.items())]
    lines += [f"  {one} --{f'>|{label}|' if label else '>'} {other}" for (one, other), label in arrows.items()]
    return "\n".join(lines) + "\n"


def _call(value: ast.AST) -> ast.Call | None:
    """Return the call that creates the part, also if it is conditional."""
    value = value.body if isinstance(value, ast.IfExp) else value
    return value if isinstance(value, ast.Call) else None


def _callee(call: ast.Call) -> Callable[..., Any] | None:
    return getattr(wiring, call.func.id, None) if isinstance(call.func, ast.Name) else None


def _made(call: ast.Call) -> str:
    """Return the name of the class, or an empty string if it is not a part."""
    if isinstance(call.func, ast.Attribute):  # created by an edge
        kind = str(wiring.DaemonEdges.__annotations__.get(call.func.attr, ""))
        return _named(kind.rpartition("],")[2].partition("]")[0])
    callee = _callee(call)
    if callee is None or callee.__module__.partition(".")[0] != "orchestrrl" or callee is wiring.DaemonEdges:
        return ""
    return callee.__name__ if inspect.isclass(callee) else _named(inspect.signature(callee).return_annotation)


def _arguments(call: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Return each argument with the class name of its parameter's annotation."""
    callee = _callee(call)
    if callee is None:
        yield from ((argument, "") for argument in call.args)
        return
    bound = inspect.signature(callee).bind(*call.args, **{each.arg or "": each.value for each in call.keywords})
    for name, argument in bound.arguments.items():
        yield argument, _named(inspect.signature(callee).parameters[name].annotation)


def _named(annotation: Any) -> str:
    """Return the class of an annotation without `| None` and module, or an empty string for a function."""
    text = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    text = text.replace(" | None", "").strip("'\" ").rpartition(".")[2]
    return text if re.fullmatch(r"[A-Z]\w*", text) else ""


def drawn() -> str:
    """Return the diagram in the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(BEGIN + drawn() + END, BEGIN + diagram() + END))
