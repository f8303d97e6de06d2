"""The same server given twice on a command line is rejected, also with differently written URLs."""

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.gateway import GatewayFlags
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.cli.main import application
from orchestrrl.core.errors import ProblemFaults

USUAL = {
    "listen": "127.0.0.1:0",
    "daemon": None,
    "policy": "load_index",
    "engine_kind": "simulated",
    "gateway_id": "",
    "engine_wait_s": 1.0,
    "stall_s": 1.0,
    "report_interval_s": 1.0,
    "drain_s": 1.0,
    "coalesce_tokens": 1,
    "processes": 1,
    "log_level": "info",
}


def test_gateway_rejects_duplicate_engine_urls() -> None:
    engines = [
        "a=http://localhost:8001",
        "b=http://127.0.0.1:8001/",
        "c=http://gpu7",
        "d=http://GPU7:80",
        "e=http://[::1]:8001",
    ]
    with pytest.raises(ProblemFaults) as caught:
        read_options(GatewayFlags(engines=engines, **USUAL))  # type: ignore[arg-type]
    assert [fault for fault in caught.value.faults if fault.startswith("--engine[")] == [
        "--engine[1]: must have a different URL from engine 'a', got 'b=http://127.0.0.1:8001/'",
        "--engine[3]: must have a different URL from engine 'c', got 'd=http://GPU7:80'",
    ]


def test_agent_rejects_duplicate_engine_urls() -> None:
    urls = ("http://localhost:8001", "http://127.0.0.1:8001/", "http://127.0.0.1:8002")
    result = CliRunner().invoke(application(), ["agent", *(word for url in urls for word in ("--engine", url))])
    assert result.exit_code == 2
    twin = "--engine[1]: must have a different URL from engine '127.0.0.1:8001', got 'http://127.0.0.1:8001/'"
    assert twin in result.output
    assert "--engine[2]" not in result.output
