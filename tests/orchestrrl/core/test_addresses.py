"""Addresses in URLs: different spellings of one address are equal, different addresses are not."""

import pytest

from orchestrrl.core.addresses import host_id, same_address, server_address, without_login

LOOPBACK = [
    "http://localhost:8001",
    "http://127.0.0.1:8001",
    "http://127.0.0.1:8001/",
    "http://LOCALHOST:8001",
    "http://Localhost.:8001",
    "http://127.1:8001",
    "http://[::ffff:127.0.0.1]:8001",
    "http://0.0.0.0:8001",
    "http://user@localhost:8001",
]


@pytest.mark.parametrize("url", LOOPBACK)
def test_loopback_names_with_one_port_are_equal(url: str) -> None:
    assert same_address(url, LOOPBACK[0])
    address = server_address(url)
    assert address is not None
    assert address.local


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://gpu7:80", "http://gpu7"),
        ("http://GPU7/", "http://gpu7"),
        ("https://gpu7", "https://gpu7:443/"),
        ("http://10.0.0.1:8000/v1/", "http://10.0.0.1:8000/v1"),
        ("http://[2001:DB8::1]:8000", "http://[2001:db8:0::1]:8000"),
        ("http://[::ffff:10.0.0.1]:8000", "http://10.0.0.1:8000"),
    ],
)
def test_spellings_of_one_address_are_equal(one: str, other: str) -> None:
    assert same_address(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://localhost:8001", "http://localhost:8002"),
        ("http://127.0.0.1:8001", "http://127.0.0.2:8001"),  # each may have its own server
        ("http://127.0.0.1:8001", "http://[::1]:8001"),
        ("http://gpu7:8001", "http://gpu8:8001"),
        ("http://gpu7:8001", "https://gpu7"),
        ("http://gpu7:8001/a", "http://gpu7:8001/b"),
        ("", ""),
        ("http://", "http://"),
        ("nonsense", "nonsense"),
        ("http://[::1", "http://[::1"),
        ("http://h:99999", "http://h:99999"),
        ("ftp://h", "ftp://h"),
    ],
)
def test_different_addresses_are_not_equal(one: str, other: str) -> None:
    assert not same_address(one, other)


def test_ipv6_loopback_differs_from_ipv4() -> None:
    assert same_address("http://[::1]:8001", "http://[::]:8001/")
    one, other = server_address("http://[::1]:8001"), server_address("http://localhost:8001")
    assert one is not None
    assert other is not None
    assert one.local
    assert one.by_ipv4 == other.by_ipv4


def test_other_addresses_of_127_are_loopback() -> None:
    address = server_address("http://127.0.0.2:8001")
    assert address is not None
    assert address.local
    far = server_address("http://10.0.0.1:8001")
    assert far is not None
    assert not far.local


def test_host_id_is_equal_in_all_processes() -> None:
    assert host_id() == host_id() != ""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:s3cret@gpu7:8001/a", "http://gpu7:8001/a"),
        ("http://s3cret@[::1]:8001", "http://[::1]:8001"),
        ("https://us@er:s3cret@gpu7", "https://gpu7"),
        ("user:s3cret@gpu7:8001", "gpu7:8001"),
        ("http://gpu7/a@b", "http://gpu7/a@b"),
        ("", ""),
    ],
)
def test_url_is_shown_without_login(url: str, shown: str) -> None:
    assert without_login(url) == shown
