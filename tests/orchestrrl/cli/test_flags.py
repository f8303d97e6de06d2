"""A flag has the same form in every command that has it."""

from collections import defaultdict
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from orchestrrl.cli.commands import MODULE_OF
from orchestrrl.cli.main import load

# Flags whose values differ between commands, each with the meaning that they share.
EXCEPTIONS = {
    "--to": "the target of the command: an engine for `move`, configurations for `redeploy`",
}
PATHS = ("FILE", "FOLDER")


def value_type(annotation: Any) -> str:
    """Return the type of one value. A value is optional or can be repeated in some commands only; a path may be on
    another host, and is then text."""
    for each in get_args(annotation) if isinstance(annotation, UnionType) or get_origin(annotation) is list else ():
        if each is not type(None):
            return value_type(each)
    return str(str if annotation is Path else annotation)


def forms() -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return the commands that have each flag, by the flag's metavar and the type of its values. A command without a
    metavar has that of the other commands."""
    found: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    metavars: dict[str, str] = {}
    options = [
        (path, flag, each)
        for path in MODULE_OF
        for each in load(path).params
        if each.param_type_name == "option"
        for flag in each.opts
    ]
    for _, flag, each in options:
        metavars.setdefault(flag, each.metavar or "")
        metavars[flag] = metavars[flag] or each.metavar or ""
    for path, flag, each in options:
        metavar = each.metavar or metavars[flag]
        form = "path" if metavar in PATHS else metavar, value_type(each.type_descriptor.annotation)
        found[flag][form].append(path)
    return found


def test_flag_has_one_form() -> None:
    differing = {flag: dict(by_form) for flag, by_form in forms().items() if len(by_form) > 1}
    assert {flag: by_form for flag, by_form in differing.items() if flag not in EXCEPTIONS} == {}
    assert differing.keys() == EXCEPTIONS.keys()


def test_flags_of_processes() -> None:
    commands = {flag: {path for paths in by_form.values() for path in paths} for flag, by_form in forms().items()}
    assert commands["--engine"] == {"up", "gateway", "agent", "sync peer"}
    assert commands["--engine-kind"] >= commands["--engine"] | {"demo", "profile measure", "profile predict"}
    assert commands["--id"] == {"gateway", "agent", "sync peer"}
    assert (
        commands["--listen"] == {"up", "daemon", "gateway", "ocs emulate"} == commands["--allow-remote"] - {"sync peer"}
    )
    assert commands["--log-level"] == {"up", "daemon", "gateway", "agent", "sync peer"}
