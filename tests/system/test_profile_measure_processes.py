"""Profile commands as processes: files are written completely or not written, and errors exit with status 2."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrrl.cli.test_profile_measure import PROFILE, file, run

ENGINE = ["engine", "simulated", "--speed", "5", "--max-num-seqs", "4", "--max-model-len", "2048", "--tick-s", "0.01"]


@pytest.fixture
def url() -> Iterator[str]:
    """Run a simulated engine as a process and yield its URL."""
    process = subprocess.Popen([sys.executable, "-m", "orchestrrl", *ENGINE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(60)


def test_show_prints_values_and_sources(file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "p.png"
    command = [sys.executable, "-m", "orchestrrl", "profile", "show", str(file), "--plot", str(plot)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "simulated on H800, vllm" in shown
    assert "18.00 ms" in shown
    assert "switch_s: given, 2026-01-31; by hand" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_measure_adds_to_a_file(url: str, file: Path) -> None:
    words = ["measure", url, "--tp", "4", "--switch-s", "2", "--budget-s", "120", "--out", str(file), "--json"]
    words += ["--kv-bytes-per-token", "200000", "--transfer-gbps", "200"]
    status, out, err = run(*words)
    assert status == 0, err
    kept, added = json.loads(out)["configurations"]
    assert (kept["id"], added["id"], added["switch_s"]) == ("tp2", "tp4", 2.0)
    assert added["provenance"]["source"] == "measured"
    assert added["max_sequences"] == 4
    moves = json.loads(out)["moves"]
    assert moves["kv_bytes_per_token"] == 200_000
    assert moves["transfer_s"] == {"bytes": [0.0, 1e10], "seconds": [0.0, 0.4]}
    assert moves["recompute_s"]["tokens"]
    assert run("show", str(file), "--json")[1] == out


def test_measure_rejects_another_model_than_the_file(url: str, file: Path) -> None:
    file.write_text(PROFILE.replace("model: simulated", "model: another"))
    status, _, err = run("measure", url, "--out", str(file))
    assert status == 2
    assert "--out: must be a profile of model simulated, got 'another'" in err


def test_ctrl_c_leaves_the_engine_idle_and_the_file_unchanged(url: str, file: Path) -> None:
    import urllib.request

    command = [sys.executable, "-m", "orchestrrl", "profile", "measure", url, "--tp", "4", "--out", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def running() -> float:
        page = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
        return sum(
            float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_running{")
        )

    deadline_s = time.monotonic() + 60
    while not running() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is unchanged" in err
    assert "Traceback" not in err
    assert running() == 0
    assert file.read_text() == PROFILE
