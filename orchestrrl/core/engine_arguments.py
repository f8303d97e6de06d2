"""Parse the values of `--engine`, which name engines on the command line."""

from collections.abc import Sequence

from orchestrrl.core.addresses import check_url, http_url, same_address, server_address
from planner.model import EngineId


def parse_engines(values: Sequence[str], faults: list[str]) -> dict[EngineId, str]:
    """Return the URLs of engines by id. Each value is [ID=]URL; the default id is the URL's HOST:PORT. An error for
    each invalid value is appended to `faults`."""
    engines: dict[EngineId, str] = {}
    for index, value in enumerate(values):
        before, separator, rest = value.partition("=")
        has_id = bool(separator) and "://" not in before
        url = (rest if has_id else value).rstrip("/")
        try:
            engine = EngineId(before if has_id else _default_id(check_url(url)))
            _check(engine, check_url(url), engines)
        except ValueError as error:
            faults.append(f"--engine[{index}]: {error}, got {value!r}")
        else:
            engines[engine] = url
    return engines


def _check(engine: EngineId, url: str, engines: dict[EngineId, str]) -> None:
    if twin := next((other for other, its in engines.items() if same_address(its, url)), None):
        raise ValueError(f"must have a different URL from engine {twin!r}")
    if not engine:
        raise ValueError("must be ID=URL with an id before the equals sign")
    if engine in engines:
        raise ValueError(f"must have a different id from the engine at {engines[engine]}; ID=URL sets the id")


def _default_id(url: str) -> str:
    address = server_address(url)
    assert address is not None, "check_url accepts only URLs with an address"
    return http_url(address.host, address.port).removeprefix("http://")
