"""Enabling the recorder in processes without torch, or before torch is imported."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrrl.integrations.instrument import recorder
from orchestrrl.integrations.instrument.rings import RingReader, list_rings

STARTUP = Path(recorder.__file__).parent / "startup"


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    recorder.stop()


def run(program: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_variable_enables_recorder_and_other_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    program = "import sys; recorder = sys.modules.get('recorder'); recorder and recorder.moment('here')"
    path = f"{STARTUP}{os.pathsep}{tmp_path}"
    off = run(program, path)
    assert (off.returncode, off.stdout, off.stderr) == (0, "the other\n", "")
    on = run(program, path, ORCHESTRRL_RECORDER=str(tmp_path / "rings"), ORCHESTRRL_RECORDER_JOB="rl")
    assert (on.returncode, on.stdout, on.stderr) == (0, "the other\n", "")
    (ring,) = list_rings(tmp_path / "rings")
    with RingReader(ring) as reader:
        assert reader.header().job == "rl"
        assert not reader.alive


def test_unexpected_torch_is_reported_and_the_program_continues(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("distributed = None")
    done = run("import torch; print('went on')", f"{STARTUP}{os.pathsep}{tmp_path}", ORCHESTRRL_RECORDER=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "recording is incomplete" in done.stderr
