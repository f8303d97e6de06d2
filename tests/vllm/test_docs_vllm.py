"""Run the commands of docs/fleet.md on vLLM's CPU build, with its example configuration."""

import re
from pathlib import Path

import pytest

from orchestrrl.fleet.deployers.conformance import RANGE, free_range
from tests.docs.test_docs import ROOT
from tests.system.test_docs_processes import EXAMPLES, Harness, check_fleet_page, run_fleet_page
from tests.vllm.conftest import VLLM_PYTHON

pytestmark = pytest.mark.timeout(1200)

EXAMPLE = "vllm-cpu.yaml"


def test_override_replaces_vllm_servers(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    configuration = tmp_path / (EXAMPLES / EXAMPLE).relative_to(ROOT)
    text = re.sub(r"(?m)^( +model: ).*$", rf"\g<1>{tiny_model}", configuration.read_text())
    text = re.sub(r"(?m)^( +python: ).*$", rf"\g<1>{VLLM_PYTHON}", text)
    port = free_range()
    configuration.write_text(text.replace("[8300, 8399]", f"[{port}, {port + RANGE - 1}]"))
    try:
        printed, fleets = run_fleet_page(harness, EXAMPLE)
        check_fleet_page(printed)
        assert fleets == [["tp1"] * 2, ["tp2"], []]
    except BaseException:  # the page's last command has not stopped the engines
        harness.run("orchestrrl redeploy --to nothing")
        raise
    finally:
        harness.stop()
