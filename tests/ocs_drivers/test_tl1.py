"""Run the conformance suite on the driver `tl1`, against each vendor's emulator, plain and with every quirk."""

from typing import Any, ClassVar

import pytest

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.model import BootBehaviour
from tests.ocs_drivers.emulated import EmulatedConformance

QUIRKS: dict[str, Any] = {
    "reports_before": 1,
    "reports_between": True,
    "lines_per_part": 3,
    "semicolons": True,
    "echo": True,
    "garbage": True,
    "acknowledge": True,
    "single_session": True,
}
BIG = "covered by the plain device in a fraction of the time"
# Circuits survive a restart, and mirrors take different times.
UNEVEN = DevicePanel(reconfiguration_s=0.004, jitter_s=0.004, boot=BootBehaviour.RESTORE, seed=7)


class TestPolatis(EmulatedConformance):
    driver = "tl1"
    protocol = "tl1-polatis"
    options: ClassVar = {"dialect": "polatis"}


class TestPolatisQuirks(TestPolatis):
    options: ClassVar = {"dialect": "polatis", "port_power": True}
    panel: ClassVar = UNEVEN
    quirks: ClassVar = {**QUIRKS, "newline": "\n"}
    cannot: ClassVar = {"make_big": BIG}


class TestCalient(EmulatedConformance):
    driver = "tl1"
    protocol = "tl1-calient"
    options: ClassVar = {"dialect": "calient"}

    @pytest.mark.slow  # four commands for each circuit
    async def test_device_with_1008_ports_connects_and_disconnects(self) -> None:
        await super().test_device_with_1008_ports_connects_and_disconnects()


class TestCalientQuirks(TestCalient):
    options: ClassVar = {"dialect": "calient", "group": "LAB; ONE", "prompt": "agent>"}
    panel: ClassVar = UNEVEN
    quirks: ClassVar = {**QUIRKS, "prompt": "agent>"}
    cannot: ClassVar = {"make_big": BIG}


class TestGlimmerglass(EmulatedConformance):
    driver = "tl1"
    protocol = "tl1-glimmerglass"
    options: ClassVar = {"dialect": "glimmerglass"}


class TestGlimmerglassQuirks(TestGlimmerglass):
    options: ClassVar = {"dialect": "glimmerglass", "line_limit": 60}
    panel: ClassVar = UNEVEN
    quirks: ClassVar = {**QUIRKS, "part_mark": "<", "prompt": "<", "line_limit": 60}
    cannot: ClassVar = {"make_big": BIG}
    splits_bulk = "its lines are short"
