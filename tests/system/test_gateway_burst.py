"""The burst on real processes, as small as it goes: that it measures, not what."""

from pathlib import Path

from orchestrrl.lab.bench.gateway import gateway_burst


def test_a_burst_costs_something(tmp_path: Path) -> None:
    cpu, memory = gateway_burst(tmp_path, requests=400)
    assert [cpu.name, memory.name] == ["gateway_burst_cpu", "gateway_burst_memory"]
    for figure in (cpu, memory):
        assert figure.value > 0
        assert figure.baseline_value > 0
        assert "400 requests at once" in figure.note
