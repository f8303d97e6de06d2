"""Help, completion and client commands import few modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.commands import GROUPS, MODULE_OF
from orchestrrl.cli.main import application

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


# A command that imports one of these is too slow for --help.
HEAVY = {
    *("aiohttp", "google.protobuf", "grpc", "matplotlib", "numba", "numpy", "ortools", "prometheus_client"),
    *("psutil", "pydantic", "scipy", "sqlite3", "statsmodels", "xxhash", "yaml"),
    *("orchestrrl.core.config.schema", "orchestrrl.daemon.wiring", "orchestrrl.core.journal.store"),
}


# Packages of other projects; grpc searches for its own packages, of which grpc_tools loads Cython's runtime.
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


@pytest.mark.smoke
def test_help_and_completion_import_nothing_heavy() -> None:
    helps = [["--version"], *([*path.split(), "--help"] for path in ("", *GROUPS, *MODULE_OF))]
    typed = (
        "fab",
        "--",
        "fabric ",
        "fabric allocate --",
        "plan solve --",
        "gateway --",
        "pause --running ",
        "mode ",
    )
    completed = [([], completion(f"orchestrrl {words}", shell)) for words in typed for shell in ("bash", "zsh", "fish")]
    modules = imported(LISTING, text=json.dumps([*((arguments, {}) for arguments in helps), *completed]))
    assert not HEAVY & modules


@pytest.mark.parametrize(
    "command",
    [["status"], ["top", "--once"], ["engines", "list"], ["mode"], ["redeploy"], ["sync", "status"], ["journal"]],
    ids=" ".join,
)
def test_client_commands_import_few_modules(command: list[str], tmp_path: Path) -> None:
    modules = imported(RUNNING, *command, "--daemon", f"unix:{tmp_path}/none")
    assert not HEAVY - {"google.protobuf", "grpc"} & modules
    packages = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    assert packages - set(sys.stdlib_module_names) - OURS <= CLIENT


def test_small_problem_is_solved_without_scipy_or_grpc() -> None:
    example = CliRunner().invoke(application(), ["plan", "solve", "--print-example"]).stdout
    assert not imported(RUNNING, "plan", "solve", "-", text=example) & {"scipy", "statsmodels", "matplotlib", "grpc"}


def test_unprintable_name_is_escaped() -> None:
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
