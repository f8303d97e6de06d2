"""Engines as processes: started with proof that they work, stopped without leftovers."""

import sys
from pathlib import Path

import pytest

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.testbed import engines


async def test_arguments_that_contradict_the_layout_start_nothing(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match="contradicts `--tensor-parallel-size 1` of vllm-0, got '-tp 2'"):
        await engines.start_vllm(
            "vllm-0", python=Path(sys.executable), model=tmp_path / "m", log_dir=tmp_path, arguments=["-tp", "2"]
        )
    assert not (tmp_path / "vllm-0.log").exists()


async def test_a_held_port_is_for_one_server_only() -> None:
    holder, port = engines._hold_port()
    others = [engines._hold_port() for _ in range(50)]
    assert port not in {other_port for _, other_port in others}
    with engines.socket.socket() as server:
        server.setsockopt(engines.socket.SOL_SOCKET, engines.socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
    for held, _ in [(holder, port), *others]:
        held.close()
