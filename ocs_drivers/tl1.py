"""The driver `tl1` for optical circuit switches with a TL1 interface, in the dialects of three vendors.

tl1_wire.py contains the parts that all dialects share. tl1_polatis.py, tl1_calient.py and tl1_glimmerglass.py implement
the dialects, and document the sources and assumptions.
"""

from ocs_drivers.base import DeviceClock
from ocs_drivers.options import ConfiguredSwitch
from ocs_drivers.tl1_calient import CalientTl1Wire
from ocs_drivers.tl1_glimmerglass import GlimmerglassTl1Wire
from ocs_drivers.tl1_polatis import PolatisTl1Wire
from ocs_drivers.tl1_wire import DialectName, Tl1Options, Tl1Wire

DIALECTS: dict[DialectName, type[Tl1Wire]] = {
    DialectName.POLATIS: PolatisTl1Wire,
    DialectName.CALIENT: CalientTl1Wire,
    DialectName.GLIMMERGLASS: GlimmerglassTl1Wire,
}


def _wire(options: Tl1Options, clock: DeviceClock) -> Tl1Wire:
    return DIALECTS[options.dialect](options, clock)


class Tl1Switch(ConfiguredSwitch, options=Tl1Options, wire=_wire):
    """The driver `tl1`. `dialect` is `polatis`, `calient` or `glimmerglass`. The default TCP ports of these dialects
    are 3082, 3082 and 10034. On port 3083, a Calient switch shows the prompt `agent>`, which the driver awaits before
    the login.

    `group` (Calient) is the group in which this driver creates connections. `port_names` (Calient) lists the names of
    ports 1, 2, and so on. The default is the device's list of ports in natural order. `boot` and `reconfiguration_s`
    state properties that the device does not report. `port_power` (Polatis) declares that the device has power meters.
    `line_limit` is the maximum number of characters in a line. Longer bulk commands are split into several lines.
    `Tl1Messages` explains `messages`.
    """
