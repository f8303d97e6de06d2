"""Facts that an engine's host adds: GPUs, the server's command line, the model's config.json."""

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrrl.agent.host import host_facts, server_arguments
from orchestrrl.engines.serving import ServingFacts
from tests.orchestrrl.agent.test_host import LOCAL, host, install_smi


def test_gpus_are_read_from_nvidia_smi(host: Path) -> None:
    install_smi(host, "printf 'NVIDIA H100 80GB HBM3\\nNVIDIA H100 80GB HBM3\\n'")
    assert host_facts(ServingFacts(), LOCAL).gpu == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no driver is loaded' >&2; exit 9", "nvidia-smi on the engine's host failed: no driver is loaded"),
        ("exit 3", "nvidia-smi on the engine's host failed: exit status 3"),
        ("printf 'A\\nB\\n'", "the engine's host has GPUs of several kinds: A, B"),
        ("true", "the engine's host reports no GPU"),
    ],
)
def test_missing_gpu_has_a_reason(host: Path, script: str, why: str) -> None:
    install_smi(host, script)
    facts = host_facts(ServingFacts(), LOCAL)
    assert (facts.gpu, facts.gpu_detail) == ("", why)


LISTEN = """import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
"""


def test_server_is_found_by_its_port() -> None:
    command = [sys.executable, "-c", LISTEN, "vllm", "-tp", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server_arguments(int(server.stdout.readline())) == tuple(command)
        server.communicate("\n", timeout=10)
