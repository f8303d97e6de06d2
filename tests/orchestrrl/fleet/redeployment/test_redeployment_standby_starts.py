"""Tests that start durations of engines that are kept asleep are learned from wake-ups."""

import dataclasses
from pathlib import Path

import pytest
from builders import engine_report, sample
from redeployment_harness import Harness

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation import OperationState
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.redeployment.steps import (
    RedeployRequest,
)


def tell(harness: Harness, *engines: str) -> None:
    """Report the engine's capabilities, as its watch does."""
    offers = EngineCapabilities("fake", "1", ("fake",), sleep=harness.machines.can_sleep)
    for engine in engines:
        reported = engine_report(engine, sample=sample(harness.clock.now_s()))
        harness.plane.fleet.engine_reported(dataclasses.replace(reported, capabilities=offers), 1)


def learnt(harness: Harness) -> list[str]:
    """Return the configurations with a learned start duration, in order."""
    return [
        entry.body["configuration"] for entry in harness.entries(EntryKind.ENGINE_STARTED) if "elapsed_s" in entry.body
    ]


@pytest.mark.parametrize("kept", [False, True])
async def test_first_start_counts_unless_later_ones_are_wake_ups(tmp_path: Path, kept: bool) -> None:
    harness = Harness(tmp_path, sleepers=True, keep_asleep=kept)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    async with harness.daemon() as redeployer:
        tell(harness, "a", "b")
        redeployer.begin(RedeployRequest((("tp2", 1),)))
        assert (await harness.until_ended()).state is OperationState.DONE
        assert learnt(harness) == ([] if kept else ["tp2"])
        tell(harness, *harness.machines.alive())
        redeployer.begin(RedeployRequest((("tp1", 2),)))
        assert (await harness.until_ended()).state is OperationState.DONE
        assert learnt(harness) == (["tp1", "tp1"] if kept else ["tp2", "tp1", "tp1"])
