"""The gateway's benchmark with real processes and minimal load."""

from pathlib import Path

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench import ways
from orchestrrl.lab.bench.gateway import GatewayLoad, gateway_cpu
from orchestrrl.lab.testbed.stack import Stack

LITTLE = GatewayLoad(rounds=1, whole_requests=20, streams=2, in_flight=4, lone_requests=4, bursts=(8,))


def test_benchmark_measures_requests_chunks_and_latency(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in gateway_cpu(tmp_path, LITTLE)}
    # In addition, the gateway is compared with all installed routers.
    assert {"gateway_added_p50", "gateway_added_p99"} < figures.keys()
    for name in ("gateway_cpu_whole", "gateway_cpu_streamed", "gateway_wall_whole", "gateway_first_chunk_8"):
        assert figures[name].value > 0
        assert figures[name].baseline_value > 0
    assert "all complete" in figures["gateway_first_chunk_8"].note


def test_missing_routers_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "ROUTERS_BIN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    figures = gateway_cpu(tmp_path, LITTLE)
    assert "nginx skipped: not installed; vllm-router skipped: not installed: make venv-routers" in figures[0].note
    assert {figure.baseline for figure in figures} == {ways.PLAIN, "direct"}


async def test_server_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    async with Stack(tmp_path) as stack:
        with pytest.raises(Permanent, match=str(tmp_path / "missing.log")):
            await ways.served(stack, "missing", "orchestrrl.no_such_module")
    assert "no_such_module" in (tmp_path / "missing.log").read_text()
