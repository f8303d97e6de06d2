"""The driver `scpi` passes the suite of all drivers against switches that speak SCPI, each with quirks of its own."""

from typing import ClassVar

from ocs_drivers.emulators.base import Panel
from ocs_drivers.model import BootBehaviour
from tests.ocs_drivers.emulated import EmulatedConformance


class TestScpi(EmulatedConformance):
    driver: ClassVar = "scpi"
    protocol: ClassVar = "scpi"


class TestScpiDicon(TestScpi):
    """With all that makes it hard: one session, other line ends, jitter, short lines, memory over a restart."""

    protocol: ClassVar = "scpi-dicon"
    options: ClassVar = {"profile": "dicon", "line_end": "crlf", "longest_line_chars": 120, "boot": "restore"}
    panel: ClassVar = Panel(reconfiguration_s=0.002, jitter_s=0.004, boot=BootBehaviour.RESTORE, seed=7)
    quirks: ClassVar = {"one_session": True, "crlf": True, "longest_line_chars": 120}
