"""Run the commands of docs/fleet.md on vLLM's CPU build, with its example configuration."""

import json
import re
from pathlib import Path

import pytest

from orchestrrl.fleet.deployers.conformance import RANGE, free_range
from tests.docs.test_docs import ROOT
from tests.system.test_docs_processes import EXAMPLES, FLEET_PAGE, Harness, commands
from tests.vllm.conftest import VLLM_PYTHON

pytestmark = pytest.mark.timeout(1200)

EXAMPLE = "vllm-cpu.yaml"


def test_override_replaces_vllm_servers_while_a_request_waits(tiny_model: Path, tmp_path: Path) -> None:
    first, second, third, override, request, *rest = commands(FLEET_PAGE)
    harness = Harness(tmp_path)
    configuration = tmp_path / (EXAMPLES / EXAMPLE).relative_to(ROOT)
    text = re.sub(r"(?m)^( +model: ).*$", rf"\g<1>{tiny_model}", configuration.read_text())
    text = re.sub(r"(?m)^( +python: ).*$", rf"\g<1>{VLLM_PYTHON}", text)
    port = free_range()
    configuration.write_text(text.replace("[8300, 8399]", f"[{port}, {port + RANGE - 1}]"))
    try:
        harness.start(first.removesuffix("&").replace("fleet.yaml", EXAMPLE))
        harness.run("orchestrrl status")
        harness.start(second.removesuffix("&"))
        harness.run(third)
        before = json.loads(harness.run("orchestrrl workers --json"))["workers"]
        assert [worker["configuration"] for worker in before] == ["tp1"] * 2
        harness.run(override)
        answer = json.loads(harness.run(request))
        assert answer["usage"]["completion_tokens"] == 1000
        for command in rest[:-2]:
            explained = harness.run(command)
        assert "1 x tp2 instead of 2 x tp1 by the operator's override: to see it" in " ".join(explained.split())
        after = json.loads(harness.run("orchestrrl workers --json"))["workers"]
        assert [worker["configuration"] for worker in after] == ["tp2"]
    finally:
        for command in rest[-2:]:
            harness.run(command)
        harness.stop()
