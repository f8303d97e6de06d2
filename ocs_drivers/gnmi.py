"""The driver `gnmi` for switches that are configured over gNMI, with the tables of SONiC-OCS or the model proposed to
OpenConfig.

Both data models, and the assumptions about them, are documented in gnmi_sonic.py and gnmi_openconfig.py.
gnmi_session.py implements the connection. All removals of a commit are sent in one SetRequest, and all additions in a
second SetRequest. The device is read after each commit, because it may have carried out a part of a request that it
refused.
"""

from ocs_drivers.base import DeviceClock
from ocs_drivers.gnmi_openconfig import OpenConfigWire
from ocs_drivers.gnmi_session import GnmiModel, GnmiOptions, GnmiWire
from ocs_drivers.gnmi_sonic import SonicWire
from ocs_drivers.options import ConfiguredSwitch


def _wire(options: GnmiOptions, clock: DeviceClock) -> GnmiWire:
    return (SonicWire if options.model is GnmiModel.SONIC else OpenConfigWire)(options, clock)


class GnmiSwitch(ConfiguredSwitch, options=GnmiOptions, wire=_wire):
    """The driver `gnmi`. `address` is `HOST` or `HOST:PORT`. `model` is `sonic` or `openconfig`.

    With `tls`, the device's certificate must name the host or `tls_server_name`, and must be signed by an authority in
    `tls_ca_file` (by default, one of the system's authorities). `tls_cert_file` and `tls_key_file` are the client's
    certificate and key. `user` and `password` are sent as metadata. `origin` is the origin of the paths in requests.
    With model `sonic`, the default is the origin that the device announces. With model `openconfig`, paths have no
    origin by default. `slot`, for model `openconfig`, is the optical module whose ports this driver controls.
    """
