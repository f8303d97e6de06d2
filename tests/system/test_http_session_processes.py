"""TLS of HTTP sessions: certificates are verified unless disabled."""

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from emulated import PATIENCE_S

from ocs_drivers.base import SystemClock
from ocs_drivers.conformance import refusal
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.http_session import (
    DeviceResponse,
    HttpSession,
    Scheme,
)
from ocs_drivers.restconf import RestconfOptions
from tests.ocs_drivers.test_http_session import OK, server


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """Create a self-signed certificate of 127.0.0.1."""
    key, pem = tmp_path / "key.pem", tmp_path / "ca.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=ocs1"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", pem]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    return pem, context


async def test_certificates_are_verified_unless_disabled(
    certificate: tuple[Path, ssl.SSLContext],
) -> None:
    pem, context = certificate
    async with server(OK, context) as address:

        async def ask(**tls: Any) -> DeviceResponse:
            options = RestconfOptions(address=address, scheme=Scheme.HTTPS, command_timeout_s=PATIENCE_S, **tls)
            http = HttpSession(options, SystemClock())
            await http.open()
            try:
                return await http.request("GET", "/x")
            finally:
                await http.close()

        async with refusal(DriverPermanent, "certificate is not trusted", "tls_ca_file"):
            await ask()
        assert (await ask(tls_ca_file=str(pem))).body == b"[]"
        assert (await ask(tls_verify=False)).body == b"[]"
    async with server(OK) as address:  # plain HTTP instead of TLS
        async with refusal(DriverPermanent, "TLS"):
            await ask()
