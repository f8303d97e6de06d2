"""What an engine's host adds to its facts: GPUs, the server's command line, the model's config.json."""

import pytest

from orchestrrl.agent.host import HostReader, host_facts
from orchestrrl.engines.serving import ServingFacts
from tests.orchestrrl.agent.test_host import LOCAL, host, install_smi


def test_gpus_are_those_of_nvidia_smi(host: HostReader) -> None:
    install_smi(host, "printf 'NVIDIA H100 80GB HBM3\\nNVIDIA H100 80GB HBM3\\n'")
    assert host_facts(ServingFacts(), LOCAL, host).gpu == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no driver is loaded' >&2; exit 9", "nvidia-smi on the engine's host failed: no driver is loaded"),
        ("exit 3", "nvidia-smi on the engine's host failed: exit status 3"),
        ("printf 'A\\nB\\n'", "the engine's host has GPUs of several kinds: A, B"),
        ("true", "the engine's host reports no GPU"),
    ],
)
def test_a_gpu_that_is_not_found_has_a_reason(host: HostReader, script: str, why: str) -> None:
    install_smi(host, script)
    facts = host_facts(ServingFacts(), LOCAL, host)
    assert (facts.gpu, facts.gpu_detail) == ("", why)
