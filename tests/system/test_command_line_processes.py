"""Rendered command lines, run by a shell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from orchestrrl.fleet.deployers.command_line import render
from planner.model import Parallelism
from tests.orchestrrl.fleet.deployers.test_command_line import LAUNCH, spec


def test_rendered_command_line_runs_in_a_shell(tmp_path: Path) -> None:
    program = tmp_path / "py thon"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(0o755)
    nasty = ("--seed", "1", "--chat-template", 'it\'s $HOME `x` "q" \\ \n{%- %}', "--stop", "", "--x", "a b")
    launch = replace(LAUNCH, python=str(program), arguments=nasty, environment={"A": "b c'$d"})
    (line,) = render(spec(Parallelism(tp=2)), launch)
    ran = subprocess.run(["bash", "-c", line.shell()], capture_output=True, text=True, check=True, env={**os.environ})
    words, environment = json.loads(ran.stdout)
    assert tuple(words) == line.argv[1:]
    assert environment.items() >= dict(line.environment).items()
