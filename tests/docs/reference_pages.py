"""Generate docs/reference from the code: configuration, commands, metrics, gRPC services and journal entries.

`python tests/docs/reference_pages.py` writes the pages; a test compares them with the files.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from orchestrrl.cli.commands import GROUPS, MODULE_OF, PANEL_OF
from orchestrrl.cli.main import load
from orchestrrl.engines.base import PATHS, CompletionEndpoint
from orchestrrl.gateway.moves.movable import immovable_because

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.vllm.request_fields import FIELDS, RequestField, body_of, pairs  # noqa: E402

MOST_VALUE = 40  # characters of a value in a table
FOLDER = ROOT / "docs" / "reference"
PACKAGES = ("orchestrrl", "planner", "balancer", "ocs_drivers")
NOTE = "<!-- Generated from the code: python tests/docs/reference_pages.py -->\n\n"


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(_cell(each) for each in line) + " |\n" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or " "


# --- configuration


def configuration() -> str:
    example = (ROOT / "orchestrrl" / "core" / "config" / "example.yaml").read_text()
    text = (
        "# Configuration\n\n"
        "`orchestrrl daemon -c FILE` reads one YAML file. Every section is optional. The values below are the defaults,"
        " except where a comment says otherwise. `orchestrrl check-config --print-example` prints this file,"
        " `orchestrrl check-config FILE` reports every fault of yours with its path, and the daemon reloads its file on"
        " SIGHUP.\n\n"
    )
    lines, sections = example.splitlines(), [0]
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):
            while number and lines[number - 1].startswith("#"):
                number -= 1
            sections.append(number)
    for begin, end in zip(sections[1:], [*sections[2:], len(lines)], strict=True):
        section = "\n".join(lines[begin:end]).strip()
        name = re.findall(r"^(\w+):", section, re.MULTILINE)[0]
        text += f"## {name}\n\n```yaml\n{section}\n```\n\n"
    return text


# --- commands


def commands() -> str:
    text = (
        "# Commands\n\n"
        "Each command prints its help with `--help`. Where `--json` is listed, it prints one JSON object instead of a"
        " table. The exit status is 0 for success, 2 for invalid arguments or files, and 1 for any other failure.\n\n"
    )
    panels: dict[str, list[str]] = {}
    for path in MODULE_OF:
        group = path.split()[0]
        panel = PANEL_OF.get(path) if " " not in path else GROUPS[group][1]
        panels.setdefault(panel or "Offline", []).append(path)
    for panel, paths in panels.items():
        text += f"## {panel}\n\n"
        for path in sorted(paths):
            text += _command(path)
    return text


def _command(path: str) -> str:
    command = load(path)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join(["orchestrrl", path, *(["[OPTIONS]"] if options else []), *map(_usage_of, arguments)])
    text = f"### orchestrrl {path}\n\n{_prose(command.help or '')}\n\n```text\n{usage}\n```\n\n"
    rows = [(f"`{_usage_of(each)}`", getattr(each, "help", "") or "", _default(each)) for each in arguments]
    rows += [(f"`{', '.join(each.opts)}`", each.help or "", _default(each)) for each in options if not each.hidden]
    return text + (_table(("argument or option", "meaning", "default"), rows) if rows else "")


def _usage_of(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("{}[]")
    return name if argument.required else f"[{name}]"


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if default is None or callable(default) or default in ((), [], "") or getattr(parameter, "is_flag", False):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _prose(text: str) -> str:
    """Return the help as Markdown: what follows `Example:` is a block of code."""
    head, *examples = re.split(r"Examples?:", textwrap.dedent(text).replace("\b", "").strip())
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", head) if block.strip()]
    commands = [
        " ".join(block.split()).strip(" `")
        for part in examples
        for block in re.split(r"\n\s*\n", part)
        if block.strip()
    ]
    if commands:
        blocks.append("```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```")
    return "\n\n".join(blocks)


# --- metrics

_MAKERS = {  # functions and classes that make a metric family, with its type
    **dict.fromkeys(("gauge", "labelled_gauge", "GaugeMetricFamily"), "gauge"),
    **dict.fromkeys(("counter", "labelled_counter", "CounterMetricFamily"), "counter"),
    **dict.fromkeys(("Histogram", "HistogramMetricFamily"), "histogram"),
    "SummaryMetricFamily": "summary",
}


def metrics() -> str:
    text = (
        "# Metrics\n\n"
        "The daemon serves Prometheus metrics at `metrics.address` of its configuration, a gateway at `/metrics` of its"
        " port. Counters end in `_total`.\n\n"
    )
    for title, prefix, files in (
        ("Daemon", "orchestrrl", ("daemon/metrics.py", "gateway/failovers.py", "fleet/redeployment/metrics.py")),
        ("Fabric, on the daemon's page", "orchestrrl", ("fabric/metrics.py",)),
        ("Weights, on the daemon's page", "orchestrrl", ("weights/controller/metrics.py",)),
        (
            "Gateway",
            "orchestrrl_gateway",
            ("gateway/metrics.py", "gateway/failovers.py", "gateway/routing/backends.py"),
        ),
    ):
        rows = [row for file in files for row in _metrics_of(ROOT / "orchestrrl" / file, prefix)]
        text += f"## {title}\n\n" + _table(("metric", "type", "labels", "meaning"), sorted(rows))
    return text


def _metrics_of(path: Path, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Find the calls that make a metric family, and evaluate their name, text and labels."""
    for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
        yield from _calls(function.body, {"PREFIX": prefix, "prefix": prefix})


def _calls(body: list[ast.stmt], known: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for statement in body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            _assign(statement, known)
        if (
            isinstance(statement, ast.For)
            and isinstance(statement.iter, ast.Tuple)
            and "text" in ast.unparse(statement.target)
        ):
            for row in statement.iter.elts:
                inner = dict(known)
                for target, value in zip(statement.target.elts, row.elts, strict=True):  # type: ignore[attr-defined]
                    if isinstance(value, ast.Constant):
                        inner[target.id] = value.value
                yield from _calls(statement.body, inner)
            continue
        for inner_body in ("body", "orelse"):
            if isinstance(statement, ast.If | ast.For | ast.With):
                yield from _calls(getattr(statement, inner_body, []), known)
        if isinstance(statement, ast.If | ast.For | ast.With):
            continue
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            yield from _family(call, known)


def _assign(statement: ast.Assign, known: dict[str, Any]) -> None:
    (target,) = statement.targets
    pairs = (
        zip(target.elts, statement.value.elts, strict=True)
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
        else [(target, statement.value)]
    )
    for name, value in pairs:
        if isinstance(name, ast.Name):
            try:
                known[name.id] = _text(value, known)
            except KeyError:
                continue


def _family(call: ast.Call, known: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    made = ast.unparse(call.func).rpartition(".")[2]
    kind = _MAKERS.get(made)
    if kind is None or not call.args:
        return
    name, meaning = _text(call.args[0], known), _text(call.args[1], known)
    labels = ""
    if made.startswith("labelled_"):
        labels = (
            ", ".join(ast.literal_eval(call.args[2]))
            if isinstance(call.args[2], ast.Tuple)
            else _text(call.args[2], known)
        )
    elif made in ("gauge", "counter"):
        name, _, labels = name.removesuffix("}").partition("{")
        name = f"orchestrrl_{name}"
    for keyword in call.keywords:
        if keyword.arg == "labels":
            labels = ", ".join(ast.literal_eval(keyword.value))
    name += "_total" if kind == "counter" and not name.endswith("_total") else ""
    yield f"`{name}`", kind, labels.replace(",", ", ").replace(",  ", ", "), meaning


def _text(node: ast.expr, known: dict[str, Any]) -> str:
    """Evaluate a text of literals and known names. Raises KeyError."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return str(known[name])
        case ast.JoinedStr(values=parts):
            return "".join(_text(each.value if isinstance(each, ast.FormattedValue) else each, known) for each in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known) + _text(right, known)
    raise KeyError(ast.unparse(node))


# --- gRPC


def grpc() -> str:
    """Return services and messages with the comments of their .proto files."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        files = sorted(str(each.relative_to(ROOT / "proto")) for each in (ROOT / "proto").rglob("*.proto"))
        # In a process of its own: its library does not load beside OR-Tools'.
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *files], cwd=ROOT, check=True)
        found = FileDescriptorSet.FromString(out.read_bytes())
    text = (
        "# gRPC services\n\n"
        "The daemon serves these with reflection at `listen.address`; the files are in `proto/orchestrrl/v1`. Faulty"
        " fields are refused with `INVALID_ARGUMENT`, all at once, each with its path and value.\n\n"
    )
    return text + "".join(map(_proto_file, found.file))


def _proto_file(file: FileDescriptorProto) -> str:
    comments = {
        tuple(each.path): " ".join((each.leading_comments + " " + each.trailing_comments).split())
        for each in file.source_code_info.location
    }
    text = f"## {file.name.rpartition('/')[2]}\n\n"
    for number, service in enumerate(file.service):
        text += _headed(f"Service {service.name}", comments.get((6, number), ""))
        rows = []
        for place, method in enumerate(service.method):
            request, response = (
                f"{'stream ' * streams}{name.rpartition('.')[2]}"
                for streams, name in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            )
            rows.append((f"`{method.name}`", request, response, comments.get((6, number, 2, place), "")))
        text += _table(("method", "request", "response", "meaning"), rows)
    for number, message in enumerate(file.message_type):
        text += _message(message, (4, number), comments, "")
    for number, enum in enumerate(file.enum_type):
        rows = [(f"`{each.name}`", comments.get((5, number, 2, place), "")) for place, each in enumerate(enum.value)]
        text += _headed(enum.name, comments.get((5, number), "")) + _table(("value", "meaning"), rows)
    return text


def _headed(title: str, comment: str) -> str:
    return f"### {title}\n\n" + (f"{comment}\n\n" if comment else "")


def _message(message: Any, path: tuple[int, ...], comments: dict[tuple[int, ...], str], prefix: str) -> str:
    if message.options.map_entry:
        return ""
    rows = [
        (f"`{each.name}`", _type_of(each), comments.get((*path, 2, place), ""))
        for place, each in enumerate(message.field)
    ]
    text = _headed(f"{prefix}{message.name}", comments.get(path, ""))
    text += _table(("field", "type", "meaning"), rows) if rows else "No fields.\n\n"
    for number, nested in enumerate(message.nested_type):
        text += _message(nested, (*path, 3, number), comments, f"{prefix}{message.name}.")
    return text


def _type_of(field: FieldDescriptorProto) -> str:
    name = (
        field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


# --- journal


def journal() -> str:
    path = ROOT / "orchestrrl" / "core" / "journal" / "kinds.py"
    rows = [
        (f"`{value}`", meaning)
        for value, meaning in re.findall(r'^    [A-Z_]+ = "([a-z_.]+)"(?:  # (.*))?$', path.read_text(), re.MULTILINE)
    ]
    return (
        "# Journal entries\n\n"
        "The daemon writes what it decides and does to its journal, an SQLite file at `journal.path`;"
        " `orchestrrl journal` prints it. An operation's intent is written before anything is sent, and its result when"
        " it is known.\n\n" + _table(("kind", "written when"), rows)
    )


# --- errors

_NO_MESSAGES = {"AssertionError", "SkipTest", "TypeError", "RuntimeError", "NotImplementedError"}  # defects and tests
_EMULATORS = re.compile(r"emulat|conformance|/lab/")


def errors() -> str:
    """Return the texts of all exceptions that the code raises, by package, with placeholders in braces."""
    rows: dict[str, set[tuple[str, str]]] = {}
    for place, tree in _sources():
        package = rows.setdefault("/".join(place.split("/")[: 2 if place.startswith("orchestrrl") else 1]), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                package |= {(f"`{message}`".replace("``", "` `"), f"`{place}`") for message in _messages(node.exc)}
    text = (
        "# Error messages\n\n"
        "The texts of all errors that the code raises, by package. Braces contain the expression whose value is shown."
        " [Troubleshooting](../troubleshooting.md) lists symptoms and remedies.\n\n"
    )
    for name in sorted(name for name in rows if rows[name]):
        text += f"## {name}\n\n" + _table(("message", "raised in"), sorted(rows[name]))
    return text


def _sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of every production file, without generated code, emulators and the lab."""
    for path in sorted(each for name in PACKAGES for each in (ROOT / name).rglob("*.py")):
        place = str(path.relative_to(ROOT))
        if "/pb/" not in place and not _EMULATORS.search(place):
            yield place, ast.parse(path.read_text())


def _messages(call: ast.Call) -> Iterator[str]:
    if ast.unparse(call.func).rpartition(".")[2] in _NO_MESSAGES:
        return
    found = [*call.args, *(keyword.value for keyword in call.keywords)]
    for node in found:
        for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            message = _template(part)
            if " " in message.strip():
                yield " ".join(message.split())


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_template, parts))
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value).replace("`", "") + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
    return ""


# --- reasons of decisions

_DECIDERS = {
    "Moves between engines": ("balancer/",),
    "Plans": ("planner/admission.py", "planner/plan.py", "planner/solver/", "orchestrrl/daemon/"),
    "Circuits": ("planner/fabric/", "orchestrrl/fabric/", "orchestrrl/agent/"),
    "Pauses": ("orchestrrl/fleet/", "orchestrrl/core/"),
}


def reasons() -> str:
    """Return the codes and texts of all verdicts (Act and Hold) that decisions have, by kind of decision."""
    trees = dict(_sources())
    names = {
        target.id: _template(each.value)
        for tree in trees.values()
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(target := each.targets[0], ast.Name)
    }
    text = (
        "# Reasons of decisions\n\n"
        "Each decision has a verdict, `act` or `hold`, with a code and a text. Commands, the journal and metrics show"
        " the code. Braces contain the expression whose value is shown.\n\n"
    )
    for title, places in _DECIDERS.items():
        rows = {
            (f"`{code}`", verdict.lower(), f"`{detail}`".replace("``", "` `"))
            for place, tree in trees.items()
            if place.startswith(places)
            for verdict, code, detail in _verdicts(tree, names)
        }
        text += f"## {title}\n\n" + _table(("code", "verdict", "text"), sorted(rows))
    return text


def _verdicts(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Act" | "Hold" as verdict), args=[code, detail]):
                codes = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
                for each in codes:
                    known = names.get(each.id, "") if isinstance(each, ast.Name) else _template(each)
                    if known:
                        yield verdict, known, " ".join((_template(detail) or "{" + ast.unparse(detail) + "}").split())


# --- request fields


def request_fields() -> str:
    text = (
        "# Request fields\n\n"
        "`make test-vllm` sends each field with the value below to a bare vLLM server and through the gateway, and"
        " compares the answers, streamed and not. It also compares 150 pairs of fields, and `make test-fields` compares"
        f" all {len(list(pairs())):,} pairs. Answers are equal, and refusals have the same status and field. A request"
        " on which engines fail with status 500 has status 503 through the gateway, after several attempts.\n\n"
        "- *effect*: whether the value changes the bare server's answer\n"
        "- *moves*: whether the request may continue on another engine, with `--reseed`\n\n"
    )
    for endpoint, fields in FIELDS.items():
        text += f"## `{PATHS[endpoint]}`\n\n"
        rows = ([*_field_row(field), _moves(endpoint, field)] for field in sorted(fields, key=lambda each: each.name))
        text += _table(["field", "value", "effect", "moves"], rows)
    return text


def _field_row(field: RequestField) -> list[str]:
    value = json.dumps(field.value, ensure_ascii=False)
    shown = value if len(value) <= MOST_VALUE else f"{value[:MOST_VALUE]}…"
    effect = f"none: {field.no_effect}" if field.no_effect else "yes"
    return [f"`{field.name}`", f"`{shown}`", effect]


def _moves(endpoint: CompletionEndpoint, field: RequestField) -> str:
    because = immovable_because(endpoint, body_of(endpoint, field), reseed=True)
    return f"no: {because}" if because else "yes"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "grpc.md": grpc,
    "journal.md": journal,
    "errors.md": errors,
    "reasons.md": reasons,
    "request-fields.md": request_fields,
}


def page(name: str) -> str:
    return NOTE + PAGES[name]().rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / name).write_text(page(name))
