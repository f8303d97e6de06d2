"""The conformance suite outside pytest, against a process."""

import subprocess
import sys
from pathlib import Path

from tests.ocs_drivers.test_conformance_run import conformance


def test_conformance_command_reports_failures_by_exit_status() -> None:
    script = Path(__file__).parents[1] / "ocs_drivers" / "virtual_process.py"
    process = subprocess.Popen(
        [sys.executable, str(script), '{"reconfiguration_s": 0.002}'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        arguments = ("--driver", "grpc", "--address", f"127.0.0.1:{int(process.stdout.readline())}")
        named = (*arguments, "--free-ports", "1-4:17-20", "--only")
        assert conformance(*named, "test_repeated_commit_sends_nothing").exit_code == 0
        process.stdin.write('{"foreign": [[1, 17]]}\n')
        process.stdin.flush()
        process.stdout.readline()
        refused = conformance(*named, "test_repeated_commit_sends_nothing")
        assert refused.exit_code == 1
        assert "1:17" in refused.stderr
    finally:
        process.communicate()
