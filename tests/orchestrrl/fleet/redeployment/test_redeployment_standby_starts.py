"""What is learnt of how long engines take to come up: of those that are kept asleep, what waking them took."""

import dataclasses
from pathlib import Path

import pytest
from builders import engine_report, sample
from redeployment_house import House

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.redeployment.steps import RedeploymentState, RedeployRequest


def tell(house: House, *engines: str) -> None:
    """As the watch of an engine does."""
    offers = EngineCapabilities("fake", "1", ("fake",), sleep=house.machines.can_sleep)
    for engine in engines:
        told = engine_report(engine, sample=sample(house.clock.now_s()))
        house.plane.engine_reported(dataclasses.replace(told, capabilities=offers), 1)


def learnt(house: House) -> list[str]:
    """Configurations of which a start was told with its seconds, in order."""
    return [entry.body["configuration"] for entry in house.entries(EntryKind.ENGINE_STARTED) if "took_s" in entry.body]


@pytest.mark.parametrize("kept", [False, True])
async def test_a_first_start_counts_unless_later_ones_are_wakings(tmp_path: Path, kept: bool) -> None:
    house = House(tmp_path, sleepers=True, keep_asleep=kept)
    house.place("a", "tp1", 0)
    house.place("b", "tp1", 1)
    async with house.daemon() as redeployer:
        tell(house, "a", "b")
        redeployer.begin(RedeployRequest((("tp2", 1),)))
        assert (await house.until_ended()).state is RedeploymentState.DONE
        assert learnt(house) == ([] if kept else ["tp2"])
        tell(house, *house.machines.alive())
        redeployer.begin(RedeployRequest((("tp1", 2),)))
        assert (await house.until_ended()).state is RedeploymentState.DONE
        assert learnt(house) == (["tp1", "tp1"] if kept else ["tp2", "tp1", "tp1"])
