"""A process started by the fork server is indistinguishable from a new process for its code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

SCRIPT = str(Path(__file__).with_name("shown_process.py"))


def outcome(popen: Any, words: list[str], **options: Any) -> tuple[Any, int, str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen([sys.executable, *words], **pipes, **options) as process:
        out, err = process.communicate("some input")
    return json.loads(out) if out.startswith("{") else out, process.returncode, err


@pytest.mark.parametrize("end", ["return", "exit", "kill"])
@pytest.mark.parametrize("new_session", [False, True])
def test_forked_process_equals_a_new_one(tmp_path: Path, end: str, new_session: bool) -> None:
    options = {"cwd": tmp_path, "env": {**os.environ, "MORE": "x"}, "start_new_session": new_session}
    forked = outcome(subprocess.Popen, [SCRIPT, end, "word"], **options)
    started = outcome(fork_server._popen, [SCRIPT, end, "word"], **options)
    assert forked[0] == started[0]
    assert forked[1:] == started[1:]
    assert forked[0]["parent"] == os.getpid()


def test_module_path_is_that_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, sys; os.environ['CUSTOMIZED'] = ' '.join(sys.orig_argv)")
    path = f"{tmp_path}:{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    options = {"env": {**os.environ, "PYTHONPATH": path}}
    forked = outcome(subprocess.Popen, [SCRIPT, "return", "word"], **options)
    assert forked == outcome(fork_server._popen, [SCRIPT, "return", "word"], **options)
    assert forked[0]["environment"]["CUSTOMIZED"].endswith("return word")


def test_exception_is_printed_with_exit_status_1() -> None:
    _, status, err = outcome(subprocess.Popen, [SCRIPT, "raise"])
    assert (status, err.splitlines()[-1]) == (1, "ValueError: as requested")


def test_command_output_equals_that_of_a_new_process() -> None:
    words = ["-m", "orchestrrl", "status", "--daemon", "127.0.0.1:9"]
    assert outcome(subprocess.Popen, words) == outcome(fork_server._popen, words)


def test_interpreter_settings_are_kept() -> None:
    options = {"env": {**os.environ, "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "latin-1"}}
    forked = outcome(subprocess.Popen, [SCRIPT, "return"], **options)
    assert forked == outcome(fork_server._popen, [SCRIPT, "return"], **options)
    assert forked[0]["encoding"][0] == "iso8859-1"
