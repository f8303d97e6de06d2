"""Tests of the facts that an engine's host adds: GPUs, the server's command line, the model's config.json."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from orchestrrl.agent.host import host_facts, is_local, server_arguments, with_arguments, with_host_facts
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import ServingFacts

LOCAL, ELSEWHERE = "http://127.0.0.1:8001", "http://192.0.2.7:8001"
CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a host without GPUs and models; return the folder of its programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def install_smi(host: Path, script: str) -> None:
    path = host / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def start_server(
    monkeypatch: pytest.MonkeyPatch, port: int, arguments: list[str], *, front_end: list[str] | None = None
) -> None:
    """Start a process that listens on the port, or has a front end that does."""
    server = SimpleNamespace(cmdline=lambda: arguments, parents=list)
    between = SimpleNamespace(cmdline=lambda: ["VLLM::EngineCore"])
    process = server
    if front_end is not None:
        process = SimpleNamespace(cmdline=lambda: front_end, parents=lambda: [between, between, server])
    listens = SimpleNamespace(status=psutil.CONN_LISTEN, laddr=("127.0.0.1", port), pid=40)
    monkeypatch.setattr(psutil, "net_connections", lambda _: [listens])
    monkeypatch.setattr(psutil, "Process", lambda pid: {40: process}[pid])


VLLM = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]


def test_host_without_nvidia_smi_has_no_gpu(host: Path) -> None:
    facts = host_facts(ServingFacts(), LOCAL)
    assert (facts.gpu, facts.gpu_detail) == ("", "the engine's host has no GPU (nvidia-smi is not installed)")


def test_engines_own_facts_are_kept(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(host, "echo 'NVIDIA B200'")
    start_server(monkeypatch, 8001, [*VLLM, "--tensor-parallel-size", "8"])
    reported = ServingFacts(model="m", tp=2, gpu="NVIDIA H100 80GB HBM3")
    assert host_facts(reported, LOCAL) == reported
    cpu = ServingFacts(model="m", tp=1, gpu_detail="the engine runs on CPUs")
    assert host_facts(cpu, LOCAL) == cpu


def test_engine_of_another_host_gets_no_facts_of_this_host(host: Path) -> None:
    install_smi(host, "echo 'NVIDIA B200'")
    facts = host_facts(ServingFacts(model="m"), ELSEWHERE)
    assert facts.gpu == ""
    assert "another host" in facts.gpu_detail


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ([], (1, 1, 1, False)),
        (["--tensor-parallel-size", "4"], (4, 1, 1, False)),
        (["--tensor_parallel_size=4", "-pp", "2"], (4, 2, 1, False)),
        (["-tp=2", "--data-parallel-size=8", "--enable-expert-parallel"], (2, 1, 8, True)),
        (["-tp", "many"], (None, 1, 1, False)),
        (["--tensor-parallel-size", "2", "org/model", "-pp", "3"], (2, 3, 1, False)),
        (["--config", "vllm.yaml"], (None, None, None, None)),
    ],
)
def test_layout_is_read_from_the_servers_arguments(flags: list[str], layout: tuple[object, ...]) -> None:
    facts = with_arguments(ServingFacts(), [*VLLM, *flags])
    assert (facts.tp, facts.pp, facts.dp, facts.ep) == layout


def test_precision_is_read_from_the_servers_arguments() -> None:
    facts = with_arguments(ServingFacts(), [*VLLM, "--dtype", "float32", "--kv-cache-dtype=fp8"])
    assert (facts.weight_bits, facts.kv_bits) == (32.0, 8.0)


def test_server_is_found_by_its_port(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_server(monkeypatch, 8001, [*VLLM, "-tp", "2"])
    assert server_arguments(8001) == (*VLLM, "-tp", "2")
    assert server_arguments(8002) == ()
    assert host_facts(ServingFacts(), LOCAL).tp == 2


def test_front_end_process_has_its_parents_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server(monkeypatch, 8001, [*VLLM, "-tp", "2"], front_end=["VLLM::APIServer"])
    assert server_arguments(8001) == (*VLLM, "-tp", "2")


@pytest.mark.parametrize("error", [PermissionError(), RuntimeError("a line is malformed"), psutil.AccessDenied()])
def test_unreadable_system_tables_leave_other_facts(
    host: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def unreadable(_: str) -> None:
        raise error

    monkeypatch.setattr(psutil, "net_connections", unreadable)
    facts = host_facts(ServingFacts(), LOCAL)
    assert (facts.tp, facts.gpu_detail != "") == (None, True)


def test_process_other_than_vllm_is_ignored(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_server(monkeypatch, 8001, ["ssh", "-L", "8001:gpu7:8001", "gpu7"])
    assert host_facts(ServingFacts(), LOCAL).tp is None


def test_sizes_are_read_from_the_models_folder_and_the_hub_cache(host: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    snapshot = tmp_path / "hub" / "models--Owner--Tiny" / "snapshots" / "abc"
    for place in (folder, snapshot):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(CONFIG))
    for model, name in ((str(folder), "tiny"), ("Owner/Tiny", "Tiny")):
        sizes = host_facts(ServingFacts(model=model), LOCAL).sizes
        assert sizes is not None
        assert (sizes.name, sizes.hidden, sizes.layers) == (name, 128, 2)
        assert host_facts(ServingFacts(model=model), ELSEWHERE).sizes is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, "\0"])
def test_invalid_config_is_ignored(host: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert host_facts(ServingFacts(model=str(tmp_path)), LOCAL).sizes is None


def test_local_addresses_are_recognized() -> None:
    assert all(map(is_local, ("http://127.0.0.1:1", "http://localhost:1", f"http://{socket.gethostname()}:1")))
    assert not any(map(is_local, (ELSEWHERE, "http://some-other-host:1", "http://0.0.0.0:1", "nonsense")))


async def test_other_capabilities_are_unchanged(host: Path) -> None:
    offers = EngineCapabilities("vllm", "1", ("m",), pause=True)
    described = await with_host_facts(offers, LOCAL)
    assert described.serving != offers.serving
    assert (described.engine, described.models, described.pause) == ("vllm", ("m",), True)
