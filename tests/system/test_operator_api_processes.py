"""The operator API has its own listener, and remote addresses require --allow-remote."""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from orchestrrl.core.errors import Permanent
from tests.orchestrrl.gateway.processes import GatewayProcess, free_port
from tests.orchestrrl.gateway.test_server import DEADLINE_S


def test_remote_listen_address_exits_2_with_advice() -> None:
    command = [sys.executable, "-m", "orchestrrl", "gateway", "--listen", "0.0.0.0:0", "--engine", "e0=http://h:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--listen: is not a loopback address; add --allow-remote" in done.stderr


@pytest.mark.parametrize("processes", [1, 2])
async def test_operator_port_in_use_is_reported_immediately(tmp_path: Path, processes: int) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
    flags = ["--engine", "e0=http://127.0.0.1:1", "--operator", f"127.0.0.1:{port}", "--processes", str(processes)]
    gateway = GatewayProcess(tmp_path / "gateway.log", flags)
    in_use = f"(?i)--operator: cannot listen on 127.0.0.1:{port}: .*address already in use"
    with pytest.raises(Permanent, match=in_use) as caught:
        await gateway.start()
    assert "Traceback" not in str(caught.value)
    assert await gateway.stop() == 1
    server.close()


async def test_each_process_serves_an_operator_api(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "gateway.log", ["--engine", "e0=http://127.0.0.1:1", "--processes", "2"])
    lines = [await gateway.start(), *[await gateway.next_line() for _ in range(2)]]
    assert lines[0] == gateway.url
    nodes = set()
    async with aiohttp.ClientSession() as http:
        for url in lines[1:]:
            async with http.get(url + "/version") as answer:
                shown = await answer.json()
            assert shown["operator_url"] == url
            nodes.add(shown["gateway"])
            async with http.get(url + "/orchestrrl/requests") as answer:
                assert await answer.json() == {"in_flight": [], "finished": []}
    assert len(nodes) == 2
    assert await gateway.stop() == 0
