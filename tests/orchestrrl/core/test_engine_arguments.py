"""`--engine [ID=]URL`: ids and URLs of engines, and all errors at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.engine_arguments import parse_engines

ids = st.text(st.characters(codec="utf-8", exclude_characters="="), min_size=1).filter(lambda text: "://" not in text)
ports = st.lists(st.integers(1, 65535), unique=True, max_size=6)


@pytest.mark.parametrize(
    ("value", "engine", "url"),
    [
        ("http://127.0.0.1:8001", "127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://localhost:8001/", "127.0.0.1:8001", "http://localhost:8001"),
        ("https://gpu7", "gpu7:443", "https://gpu7"),
        ("http://[::1]:8001", "[::1]:8001", "http://[::1]:8001"),
        ("http://me:secret@gpu7:8001", "gpu7:8001", "http://me:secret@gpu7:8001"),
        ("e0=http://gpu7:8001", "e0", "http://gpu7:8001"),
        ("gpu7:8001=http://gpu7:8001", "gpu7:8001", "http://gpu7:8001"),
        ("http://proxy/engines?name=e0", "proxy:80", "http://proxy/engines?name=e0"),
    ],
)
def test_value_is_an_id_and_a_url(value: str, engine: str, url: str) -> None:
    faults: list[str] = []
    assert parse_engines([value], faults) == {engine: url}
    assert faults == []


@given(ports, st.randoms())
def test_default_ids_do_not_depend_on_the_order(ports: list[int], random: object) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    shuffled = [*urls]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    faults: list[str] = []
    assert parse_engines(urls, faults) == parse_engines(shuffled, faults)
    assert faults == []


@given(st.dictionaries(ids, st.integers(1, 65535), max_size=6).filter(lambda each: len({*each.values()}) == len(each)))
def test_ids_are_kept(engines: dict[str, int]) -> None:
    faults: list[str] = []
    urls = {engine: f"http://127.0.0.1:{port}" for engine, port in engines.items()}
    assert parse_engines([f"{engine}={url}" for engine, url in urls.items()], faults) == urls
    assert faults == []


def test_all_errors_are_reported() -> None:
    faults: list[str] = []
    values = [
        *("e0=http://a:1", "e0=http://b:1", "e1=http://a:1", "=http://c:1", "e0", "ftp://d", "http://e:1/v1"),
        *("http://proxy/one", "http://proxy/two"),
    ]
    assert parse_engines(values, faults) == {"e0": "http://a:1", "proxy:80": "http://proxy/one"}
    unlike = "must have a different id from the engine at"
    assert faults == [
        f"--engine[1]: {unlike} http://a:1; ID=URL sets the id, got 'e0=http://b:1'",
        "--engine[2]: must have a different URL from engine 'e0', got 'e1=http://a:1'",
        "--engine[3]: must be ID=URL with an id before the equals sign, got '=http://c:1'",
        "--engine[4]: must be an http:// or https:// URL, got 'e0'",
        "--engine[5]: must be an http:// or https:// URL, got 'ftp://d'",
        "--engine[6]: must be the server's URL without /v1, which is appended automatically, got 'http://e:1/v1'",
        f"--engine[8]: {unlike} http://proxy/one; ID=URL sets the id, got 'http://proxy/two'",
    ]
