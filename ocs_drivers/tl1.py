"""The driver `tl1`: optical circuit switches that speak TL1, in the dialects of three vendors.

What all have in common is in tl1_wire.py. The verbs are those of a dialect, each in its own file: tl1_polatis.py,
tl1_calient.py, tl1_glimmerglass.py, which also say what of them is known and what is assumed.
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
    """The driver `tl1`. `dialect` is `polatis`, `calient` or `glimmerglass`; where the address has no port, it is 3082,
    3082 and 10034. Calient's 3083 shows the prompt `agent>`, which is then awaited before the login.

    `group` (Calient) is what our connections are filed under. `port_names` (Calient) pins which port is 1, 2, ...; left
    out, the device's own list in its natural order. `boot` and `reconfiguration_s` state what the device does not tell.
    `port_power` (Polatis) says that it has power meters. `line_limit` cuts bulk commands into lines of at most so many
    characters, for devices that take no longer ones. `messages`: see `Tl1Messages`.
    """
