"""The driver `netconf` passes the suite of all drivers, over real SSH, in both framings and both revisions.

The older one is in test_netconf_exchange.py too, for every run.
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
    """Before 2017-08-04, in the framing of base 1.0, with power monitors, one session, and a startup configuration."""

    driver = "netconf"
    protocol = "netconf"
    options: ClassVar[dict[str, Any]] = {**LOGIN, "power": True}
    panel: ClassVar[DevicePanel] = DevicePanel(reconfiguration_s=0.002, boot=BootBehaviour.RESTORE)
    quirks: ClassVar[dict[str, Any]] = {"revision": "2016-04-22", "base": "1.0", "one_session": True, "power": True}


@pytest.mark.slow
class TestNetconfCandidate(EmulatedConformance):
    """A device whose running configuration changes by commit alone; any two ports meet, and pairs are listed late."""

    driver = "netconf"
    protocol = "netconf"
    options: ClassVar[dict[str, Any]] = LOGIN
    quirks: ClassVar[dict[str, Any]] = {"candidate": True, "any_to_any": True, "lists_late": True}
