"""A port shared by several gateway processes is not shared with other gateways."""

import socket

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.gateway.service import _reserved


def test_port_of_another_gateway_is_not_shared() -> None:
    with _reserved("127.0.0.1", 0) as port:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()
            with pytest.raises(Permanent, match="in use"), _reserved("127.0.0.1", port):
                pass
    with _reserved("127.0.0.1", port) as again:
        assert again == port
