"""Engines of the test bed as processes: contradicting arguments and held ports."""

import socket
import sys
from pathlib import Path

import pytest

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fleet.deployers.machine import hold_port
from orchestrrl.lab.testbed import engines


async def test_contradicting_arguments_start_no_process(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match="contradicts `--tensor-parallel-size 1` of vllm-0, got '-tp 2'"):
        await engines.start_vllm(
            "vllm-0", python=Path(sys.executable), model=tmp_path / "m", log_dir=tmp_path, arguments=["-tp", "2"]
        )
    assert not (tmp_path / "vllm-0.log").exists()


def test_held_port_is_reserved_for_one_server() -> None:
    holders = [hold_port("127.0.0.1", [(0, True)]) for _ in range(51)]
    ports = [holder.getsockname()[1] for holder in holders]
    assert len(set(ports)) == len(ports)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
    for holder in holders:
        holder.close()
