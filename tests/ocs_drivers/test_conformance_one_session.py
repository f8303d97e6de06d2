"""The suite on a lab switch with a single session: foreign circuits are made while the driver is closed."""

from functools import partial

from ocs_drivers.conformance_run import LabConformance, parse_ports, run_suite
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.registry import make_driver

NAMES = (
    "test_reading_distinguishes_foreign_circuits",
    "test_foreign_circuits_are_never_removed",
    "test_take_over_makes_foreign_circuits_owned",
    "test_rollback_leaves_foreign_circuits",
)


async def test_suite_makes_foreign_circuits_with_one_session() -> None:
    emulator = make_emulator("scpi", DevicePanel(reconfiguration_s=0.002), one_session=True)
    options = {"address": await emulator.start(), "reconfiguration_s": 0.002, "command_timeout_s": 30.0}
    suite = LabConformance(partial(make_driver, "scpi", "lab", options), parse_ports("1-4:33-36"))
    found = {outcome.name: outcome.detail async for outcome in run_suite(suite, NAMES)}
    await emulator.stop()
    assert found == dict.fromkeys(NAMES, "")
