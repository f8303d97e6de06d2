"""The command's map of modules is the truth: each module adds exactly the commands that it is listed with."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import typer

from orchestrrl.cli.main import COMMANDS, application


@pytest.mark.parametrize("module", COMMANDS)
def test_a_module_adds_the_commands_that_it_is_listed_with(module: str) -> None:
    app = typer.Typer()
    importlib.import_module(f"orchestrrl.cli.{module}").register(app)
    commands = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    assert sorted(commands + [g.name for g in app.registered_groups if g.name]) == sorted(COMMANDS[module])


def test_a_known_command_is_found_without_the_others() -> None:
    assert len(application("balance").registered_commands) == 1
    assert len(application("nonsense").registered_commands) == len(application().registered_commands)
    assert not application("--version").registered_commands


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        (["engine"], {"grpc", "ortools", "statsmodels", "matplotlib", "numba"}),
        (["fabric", "status"], {"orchestrrl.config", "numpy", "ortools", "matplotlib"}),
    ],
    ids=["offline", "asking"],
)
def test_one_command_imports_no_more_than_it_runs(command: list[str], unwanted: set[str]) -> None:
    code = (
        f"import sys; sys.argv = ['orchestrrl', *{command}, '--help']\n"
        "from orchestrrl.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print(sorted({unwanted} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n")


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
