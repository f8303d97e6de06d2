"""The driver `gnmi`: switches configured over gNMI, with the tables of SONiC-OCS or OpenConfig's proposed model.

The models, and the assumptions about each model, are documented in gnmi_sonic.py and gnmi_openconfig.py;
gnmi_session.py has the connection. All removals of a commit are sent in one SetRequest, and all additions in a second
one. A device that refuses a request may have carried out part of it, so the device is read back in either case.
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

    With `tls`, the device's certificate must be signed by `tls_ca_file` (by default, by one of the system's
    authorities) and name the host, or `tls_server_name`; `tls_cert_file` and `tls_key_file` are the client's
    certificate and key. `user` and `password` are sent as metadata. `origin` is the origin of paths; by default, the
    origin that the device announces (sonic) or none (openconfig). `slot` is the optical module whose ports this driver
    controls (openconfig).
    """
