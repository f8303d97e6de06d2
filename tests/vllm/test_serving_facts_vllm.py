"""Facts from a real vLLM server and its host for step time prediction, with and without development endpoints."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from orchestrrl.agent.host import host_facts, server_arguments
from orchestrrl.engines.serving import UNKNOWN_SERVING
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.testbed.engines import LocalEngine


async def test_cpu_server_reports_its_layout_and_no_gpu(
    vllm_servers: tuple[LocalEngine, ...], tiny_model: Path
) -> None:
    engine = VllmEngine(vllm_servers[0].url)
    serving = (await engine.capabilities()).serving
    await engine.close()
    assert (serving.model, serving.tp, serving.pp, serving.dp, serving.ep) == (str(tiny_model), 1, 1, 1, False)
    assert (serving.weight_bits, serving.kv_bits, serving.device) == (32.0, 16.0, "cpu")
    assert (serving.gpu, serving.gpu_detail) == ("", "the engine runs on CPUs")


async def test_layout_comes_from_the_command_line_without_development_endpoints(
    vllm_servers: tuple[LocalEngine, ...], tiny_model: Path
) -> None:
    url = vllm_servers[0].url
    assert str(tiny_model) in server_arguments(urlsplit(url).port or 0)
    facts = host_facts(replace(UNKNOWN_SERVING, model=str(tiny_model)), url)
    assert (facts.tp, facts.pp, facts.dp, facts.weight_bits) == (1, 1, 1, 32.0)
    assert facts.sizes is not None
    assert (facts.sizes.layers, facts.sizes.hidden, facts.sizes.vocab) == (2, 128, 512)
