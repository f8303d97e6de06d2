"""The driver `gnmi`: switches that are configured over gNMI, by the tables of SONiC-OCS or by OpenConfig's proposal.

What either model means, and which facts that relies on, is in gnmi_sonic.py and gnmi_openconfig.py; the connection is
gnmi_session.py. All removals of a commit are one SetRequest, and all additions another. A device that refuses one may
have carried out a part, so it is read back either way.
"""

from ocs_drivers.base import DeviceClock
from ocs_drivers.gnmi_openconfig import OpenConfigWire
from ocs_drivers.gnmi_session import GnmiModel, GnmiOptions, GnmiWire
from ocs_drivers.gnmi_sonic import SonicWire
from ocs_drivers.options import ConfiguredSwitch


def _wire(options: GnmiOptions, clock: DeviceClock) -> GnmiWire:
    return (SonicWire if options.model is GnmiModel.SONIC else OpenConfigWire)(options, clock)


class GnmiSwitch(ConfiguredSwitch, options=GnmiOptions, wire=_wire):
    """The driver `gnmi`. `address` is `HOST` or `HOST:PORT`; `model` is sonic or openconfig.

    With `tls`, the device's certificate must be signed by `tls_ca_file` (by default, one of the system's authorities)
    and name the host, or `tls_server_name`; `tls_cert_file` and `tls_key_file` are ours. `user` and `password` go along
    as metadata. `origin` of paths: by default what the device announces (sonic), or none (openconfig); `slot` is the
    optical module that this switch is (openconfig).
    """
