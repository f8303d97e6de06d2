"""Addresses that are almost correct: an engine's URL with /v1, and a port on which another server listens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.addresses import check_url

WITH_V1 = "must be the server's URL without /v1, which is appended automatically, got "


@pytest.mark.parametrize(
    "url", ["http://e0:8000", "https://e0", "http://e0:8000/", "http://proxy/engines/e0/", "http://v1"]
)
def test_server_url_is_accepted(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize("url", ["http://e0:8000/v1", "http://e0:8000/v1/", "https://proxy/engines/e0/v1"])
def test_api_base_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="without /v1"):
        check_url(url)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("agent", "--engine", "http://e0:8000/v1"), f"--engine[0]: {WITH_V1}'http://e0:8000/v1'"),
        (("agent", "--engine", "http://[::1"), "--engine[0]: must be an http:// or https:// URL, got 'http://[::1'"),
        (("gateway", "--engine", "e0=http://e0:8000/v1"), f"--engine[0]: {WITH_V1}'e0=http://e0:8000/v1'"),
        (
            ("gateway", "--engine", "e0=http://[::1"),
            "--engine[0]: must be an http:// or https:// URL, got 'e0=http://[::1'",
        ),
        (("engines", "add", "e0", "--url", "http://e0:8000/v1"), f"--url: {WITH_V1}'http://e0:8000/v1'"),
        (("profile", "measure", "http://e0:8000/v1", "--out", "p.yaml"), f"URL: {WITH_V1}'http://e0:8000/v1'"),
    ],
)
def test_every_command_with_an_engine_url_rejects_an_api_base(arguments: tuple[str, ...], fault: str) -> None:
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 2, result.output
    assert fault in result.stderr


class Metrics(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def http_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_server_at_the_daemon_address_is_reported() -> None:
    with http_server() as address:
        result = CliRunner().invoke(application(), ("status", "--daemon", address))
    assert result.exit_code == 1
    assert f"the server at {address} is not an OrchestrRL daemon" in result.stderr
    assert "start one" not in result.stderr
