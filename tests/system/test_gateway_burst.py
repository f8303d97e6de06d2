"""The burst benchmark on real processes with minimal load: it runs and returns figures."""

from pathlib import Path

from orchestrrl.lab.bench.gateway import gateway_burst


def test_burst_is_measured(tmp_path: Path) -> None:
    cpu, memory = gateway_burst(tmp_path, requests=400)
    assert [cpu.name, memory.name] == ["gateway_burst_cpu", "gateway_burst_memory"]
    for figure in (cpu, memory):
        assert figure.value > 0
        assert figure.baseline_value > 0
        assert "400 requests at once" in figure.note
