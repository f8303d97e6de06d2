"""The gateway's benchmark with real processes and as little load as it takes."""

from pathlib import Path

import pytest

from orchestrrl.bench.gateway import Load, gateway_cpu
from orchestrrl.bench.processes import serving
from orchestrrl.errors import Permanent

LITTLE = Load(rounds=1, whole_requests=20, streams=2, in_flight=4, lone_requests=4)


def test_it_measures_requests_chunks_and_latency(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in gateway_cpu(tmp_path, LITTLE)}
    assert list(figures) == ["gateway_cpu_whole", "gateway_cpu_streamed", "gateway_added_p50", "gateway_added_p99"]
    for name in ("gateway_cpu_whole", "gateway_cpu_streamed"):
        assert figures[name].value > 0
        assert figures[name].baseline_value > 0


async def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    with pytest.raises(Permanent, match=str(log_path)):
        async with serving("orchestrrl.no_such_module", log_path=log_path):
            pass
    assert "no_such_module" in log_path.read_text()
