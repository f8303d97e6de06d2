"""The suite on a lab switch that allows one session: somebody else's part is played in the driver's place."""

from functools import partial

from ocs_drivers.conformance_run import LabConformance, parse_ports, run_suite
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.registry import make_driver

NAMES = (
    "test_circuits_of_others_are_told_from_ours",
    "test_circuits_of_others_are_never_taken_down",
    "test_circuits_of_others_are_ours_once_taken_over",
    "test_rollback_leaves_what_others_put_there",
)


async def test_circuits_of_others_can_be_made_there() -> None:
    emulator = make_emulator("scpi", DevicePanel(reconfiguration_s=0.002), one_session=True)
    options = {"address": await emulator.start(), "reconfiguration_s": 0.002, "command_timeout_s": 30.0}
    suite = LabConformance(partial(make_driver, "scpi", "lab", options), parse_ports("1-4:33-36"))
    found = {outcome.name: outcome.detail async for outcome in run_suite(suite, NAMES)}
    await emulator.stop()
    assert found == dict.fromkeys(NAMES, "")
