"""Tests that plans exclude configurations that cannot be started, with a note."""

from pathlib import Path

from redeployment_harness import Harness

from orchestrrl.core.errors import Permanent, ProblemFaults
from planner.model import ConfigurationId


async def test_unstartable_configuration_is_excluded_from_plans(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.place("a", "tp1", 0)
    harness.machines.faults["check", "tp2"] = ProblemFaults(["tp2.arguments: contradict the layout, got --tp 3"])
    harness.machines.faults["check", "ep4"] = Permanent("is not installed")
    async with harness.daemon() as redeployer:
        assert redeployer._deployment.unstartable(harness.config.fleet) == {
            ConfigurationId("tp2"): "tp2.arguments: contradict the layout, got --tp 3",
            ConfigurationId("ep4"): "is not installed",
        }
        harness.gateway.put("r0", "a")
        await harness.clock.advance(2.0)
        plan, _ = await harness.plane._plan()
        chosen = {alternative.configuration for alternative in plan.alternatives}
        assert "tp2" not in chosen
        assert "tp1" in chosen
        assert "tp2 is excluded: tp2.arguments: contradict the layout, got --tp 3" in plan.notes
