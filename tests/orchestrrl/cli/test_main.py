"""The table of commands agrees with the modules, and what only lists, explains or asks imports little."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ocs_drivers.emulators.registry import EMULATORS
from orchestrrl.cli import gate, status
from orchestrrl.cli.commands import COMMANDS
from orchestrrl.cli.engine import simulated
from orchestrrl.cli.gateway import gateway
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.cli.groups import GROUPS
from orchestrrl.cli.main import application, load
from orchestrrl.cli.ocs_emulate import PROTOCOLS
from orchestrrl.cli.ocs_emulator import GRPC
from orchestrrl.engines.base import PauseMode
from orchestrrl.engines.simulated import SimulatedOptions
from orchestrrl.gateway.routing import DEFAULT_POLICY, STRATEGIES
from orchestrrl.gateway.versions import OnStale
from orchestrrl.operations import FrozenRequests
from planner.model import Mode

LISTING = """
import json, sys
from typer.testing import CliRunner
from orchestrrl.cli.main import application
for arguments, environment in json.load(sys.stdin):
    shown = CliRunner().invoke(application(), arguments, env=environment, prog_name="orchestrrl")
    assert shown.exit_code == 0 and shown.stdout, (arguments, environment, shown.output)
print(json.dumps(sorted(sys.modules)))
"""
RUNNING = """
import json, sys
from orchestrrl.cli.main import main
sys.argv[0] = "orchestrrl"
try:
    main()
except SystemExit:
    print(json.dumps(sorted(sys.modules)))
"""
# Whatever loads one of these takes longer than help may.
HEAVY = {
    *("aiohttp", "google.protobuf", "grpc", "matplotlib", "numba", "numpy", "ortools", "prometheus_client"),
    *("psutil", "pydantic", "scipy", "sqlite3", "statsmodels", "xxhash", "yaml"),
    *("orchestrrl.config", "orchestrrl.daemon", "orchestrrl.journal"),
}
# Of other projects; grpc looks for its own packages, and of them grpc_tools loads Cython's runtime.
CLIENT = {
    *("annotated_doc", "cython_runtime", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "rich"),
    *("shellingham", "typer", "typing_extensions"),
}
OURS = {"balancer", "ocs_drivers", "orchestrrl", "planner"}


def imported(code: str, *arguments: str, text: str = "") -> set[str]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def completion(words: str, shell: str) -> dict[str, str]:
    place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    asked = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return {"_ORCHESTRRL_COMPLETE": f"complete_{shell}", **place, **asked}


@pytest.mark.parametrize("module", sorted({listed.module for listed in COMMANDS.values()}))
def test_a_module_adds_the_commands_that_it_is_listed_with(module: str) -> None:
    app = typer.Typer()
    importlib.import_module(f"orchestrrl.cli.{module}").register(app)
    commands = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    for each in app.registered_groups:
        assert each.typer_instance
        commands += [f"{each.name} {c.name or c.callback.__name__}" for c in each.typer_instance.registered_commands]
    assert sorted(commands) == sorted(path for path, listed in COMMANDS.items() if listed.module == module)


@pytest.mark.parametrize("path", COMMANDS)
def test_a_command_is_listed_with_the_start_of_its_help(path: str) -> None:
    start = inspect.cleandoc(load(path).help or "").partition("\n\n")[0]
    assert COMMANDS[path].summary == " ".join(start.split())


def test_groups_and_commands_are_listed() -> None:
    assert {path.partition(" ")[0] for path in COMMANDS if " " in path} == GROUPS.keys()
    for group in ("", *GROUPS):
        shown = CliRunner().invoke(application(), [*group.split(), "--help"], env={"COLUMNS": "200"}).stdout
        inside = [path.removeprefix(group).split()[0] for path in COMMANDS if path.startswith(f"{group} ".lstrip())]
        assert all(f" {name} " in shown for name in inside)


def test_help_and_completion_import_nothing_heavy() -> None:
    helps = [["--version"], *([*path.split(), "--help"] for path in ("", *GROUPS, *COMMANDS))]
    typed = ("fab", "--", "fabric ", "fabric allocate --", "plan solve --", "gateway --", "gate pause --mode ", "mode ")
    completed = [([], completion(f"orchestrrl {words}", shell)) for words in typed for shell in ("bash", "zsh", "fish")]
    modules = imported(LISTING, text=json.dumps([*((arguments, {}) for arguments in helps), *completed]))
    assert not HEAVY & modules


@pytest.mark.parametrize(
    "command",
    [["status"], ["top", "--once"], ["engines", "list"], ["mode"], ["switch"], ["sync", "status"], ["journal"]],
    ids=" ".join,
)
def test_a_client_imports_what_talks_and_prints(command: list[str], tmp_path: Path) -> None:
    modules = imported(RUNNING, *command, "--daemon", f"unix:{tmp_path}/none")
    assert not HEAVY - {"google.protobuf", "grpc"} & modules
    packages = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    assert packages - set(sys.stdlib_module_names) - OURS <= CLIENT


def test_a_small_problem_is_solved_without_statistics() -> None:
    example = CliRunner().invoke(application(), ["plan", "solve", "--print-example"]).stdout
    assert not imported(RUNNING, "plan", "solve", "-", text=example) & {"scipy", "statsmodels", "matplotlib", "grpc"}


def test_written_defaults_are_those_of_what_is_run() -> None:
    options = SimulatedOptions()
    names = {"max_model_len": "max_model_len_tokens"}
    for name, parameter in inspect.signature(simulated).parameters.items():
        if (field := names.get(name, name)) in SimulatedOptions.model_fields and name != "lengths":
            assert parameter.default == getattr(options, field), name
    assert (*sorted(EMULATORS), GRPC) == PROTOCOLS
    flags, options_of = inspect.signature(gateway).parameters, inspect.signature(read_options).parameters
    for name in ("affinity_slack", "keep_from_s", "on_stale"):
        assert flags[name].default == options_of[name].default
    assert flags["policy"].default == DEFAULT_POLICY
    helps = {name: flags[name].annotation.__metadata__[0].help for name in ("policy", "on_stale")}
    assert helps == {"policy": " | ".join(STRATEGIES), "on_stale": f"What becomes of these: {' | '.join(OnStale)}."}


@pytest.mark.parametrize(
    ("written", "meant"), [(status.Mode, Mode), (gate.PauseMode, PauseMode), (gate.FrozenRequests, FrozenRequests)]
)
def test_written_choices_are_those_of_what_is_run(written: type[Enum], meant: type[Enum]) -> None:
    assert {each.name: each.value for each in written} == {each.name: each.value for each in meant}


def test_values_are_converted_as_typer_does() -> None:
    for words, fault in (
        (["requests", "--limit", "-1"], "--limit"),
        (["requests", "--limit", "many"], "--limit"),
        (["mode", "fly"], "advise"),
        (["plan", "solve"], "FILE.json"),
    ):
        shown = CliRunner().invoke(application(), words)
        assert shown.exit_code == 2
        assert fault in shown.output


def test_a_name_that_the_terminal_cannot_show_is_shown_escaped() -> None:
    problem = {
        "link_gbps": 1,
        "endpoints": [{"id": name, "ports": 1} for name in ("\ud800", "\u65e5")],
        "demand": [{"src": "\ud800", "dst": "\u65e5", "bytes": 1}],
        "eligible": None,
        "failed_ports": {},
    }
    for encoding, shown in (("utf-8", ("\\ud800", "\u65e5")), ("ascii", ("\\ud800", "\\u65e5"))):
        done = subprocess.run(
            [sys.executable, "-c", "from orchestrrl.cli.main import main; main()", "fabric", "allocate", "-"],
            input=json.dumps(problem).encode(),
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert all(name in done.stdout.decode() for name in shown)
