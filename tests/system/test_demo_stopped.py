"""A demo that is stopped by a signal leaves no process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

WITHIN_S = 60.0


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_stopped_demo_ends_its_processes(tmp_path: Path, by: signal.Signals) -> None:
    if by is signal.SIGHUP and signal.getsignal(by) == signal.SIG_IGN:
        pytest.skip("started under nohup, which children inherit")
    command = [sys.executable, "-m", "orchestrrl", "demo", "--kv", "--out", str(tmp_path), "--json"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    started: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + WITHIN_S
        while len(started) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
            started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) >= 3
        demo.send_signal(by)
        out, _ = demo.communicate(timeout=WITHIN_S)
        assert (demo.returncode, out) == (128 + by, b"")
        assert not psutil.wait_procs(started, timeout=WITHIN_S)[1]
    finally:
        demo.kill()
        for process in started:
            if process.is_running():
                process.kill()
