"""Fixtures: a fleet of real processes for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fleet import ENGINES, Fleet

from orchestrrl.lab.demo.scenario import load_scenario, samples
from orchestrrl.lab.demo.stack import engines, orchestrrl


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    small = {"prompts": 8, "samples": 4, "max_tokens": 1500, "engines": ENGINES, "speed": 10.0}
    scenario = load_scenario("simulated").model_copy(update=small)
    async with engines(scenario, "simulated", tmp_path) as running:
        async with orchestrrl(scenario, "simulated", running, tmp_path) as stack:
            yield Fleet(scenario, samples(scenario, "simulated", 7), running, stack)
