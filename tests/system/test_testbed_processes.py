"""Engines of the test bed: ready after start, and without remaining processes after stop."""

import os
import signal
import sys
from pathlib import Path

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.testbed import engines


def alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_simulated_engine_serves_after_start_and_ends_after_stop(tmp_path: Path) -> None:
    engine = await engines.start_simulated("sim-0", log_dir=tmp_path, arguments=["--max-num-seqs", "3"])
    try:
        client = SimulatedEngine(engine.url)
        assert (await client.capabilities()).max_sequences == 3
        await client.close()
    finally:
        await engine.stop()
    assert engine.process.returncode == 0
    assert not alive(engine.pid)
    assert engine.out_path.read_text().startswith(engine.url)
    await engine.stop()


async def test_killed_engine_ends_immediately(tmp_path: Path) -> None:
    engine = await engines.start_simulated("sim-0", log_dir=tmp_path)
    engine.kill()
    assert engine.process.returncode == -signal.SIGKILL
    assert not engine.running
    assert not await SimulatedEngine(engine.url).healthy()


async def test_engine_that_exits_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match=r"(?s)exited with status 2.*alpha_s: .*-1.*"):
        await engines.start_simulated("sim-0", log_dir=tmp_path, arguments=["--alpha-s", "-1"])


async def test_engine_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    with pytest.raises(Permanent, match="was not ready in time"):
        await engines.start_vllm("vllm-0", python=sleeper, model=tmp_path / "m", log_dir=tmp_path, ready_within_s=3)
    assert not alive(int((tmp_path / "vllm-0.log").read_text()))
