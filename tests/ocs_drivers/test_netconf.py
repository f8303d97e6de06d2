"""Run the conformance suite on the driver `netconf`, over real SSH, in both framings and with both revisions.

Some tests with the older revision are in test_netconf_exchange.py, which is not marked slow.
"""

from typing import Any, ClassVar

import pytest

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.model import BootBehaviour
from tests.ocs_drivers.emulated import EmulatedConformance

LOGIN = {"password": "root", "verify_host_key": False}


class TestNetconf(EmulatedConformance):
    driver = "netconf"
    protocol = "netconf"
    options: ClassVar[dict[str, Any]] = LOGIN


@pytest.mark.slow
class TestNetconfOld(EmulatedConformance):
    """A revision before 2017-08-04, base 1.0 framing, power monitors, a single session, and a startup configuration."""

    driver = "netconf"
    protocol = "netconf"
    options: ClassVar[dict[str, Any]] = {**LOGIN, "power": True}
    panel: ClassVar[DevicePanel] = DevicePanel(reconfiguration_s=0.002, boot=BootBehaviour.RESTORE)
    quirks: ClassVar[dict[str, Any]] = {"revision": "2016-04-22", "base": "1.0", "one_session": True, "power": True}


@pytest.mark.slow
class TestNetconfCandidate(EmulatedConformance):
    """A device whose running configuration changes only by commit; any two ports connect, and pairs are listed late."""

    driver = "netconf"
    protocol = "netconf"
    options: ClassVar[dict[str, Any]] = LOGIN
    quirks: ClassVar[dict[str, Any]] = {"candidate": True, "any_to_any": True, "lists_late": True}
