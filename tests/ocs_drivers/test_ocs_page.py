"""Check docs/ocs.md against the drivers: names, options with their defaults, capabilities."""

import re
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from ocs_drivers.registry import ENTRY_POINT_GROUP, make_driver
from orchestrrl.daemon.configuration import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ocs.md").read_text()
DRIVERS = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
OURS = sorted(name for name, entry in DRIVERS.items() if entry.dist is not None and entry.dist.name == "orchestrrl")
REQUIRED = "required"


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table's rows, without the header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]


def table(name: str) -> str:
    (found,) = re.findall(rf"^<!-- options: {name} -->\n(.*?)\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def told(name: str) -> dict[str, Any]:
    """Return each option with its default on the page."""
    options: dict[str, Any] = {}
    for cell, defaults, _ in rows(table(name)):
        several = [None if text == "-" else yaml.safe_load(text) for text in defaults.split(", ")]
        for index, option in enumerate(names(cell)):
            options[option] = several[min(index, len(several) - 1)]
    return options


def parameters(name: str) -> dict[str, Any]:
    fields = DRIVERS[name].load()._options_type.model_fields
    return {option: REQUIRED if field.is_required() else field.default for option, field in fields.items()}


@pytest.mark.parametrize("name", OURS)
def test_documented_options_match_code(name: str) -> None:
    common = {} if name == "grpc" else told("all")
    actual = {option: [] if default == () else default for option, default in parameters(name).items()}
    assert {**common, **told(name)} == actual


def heads() -> list[list[str]]:
    return rows(PAGE[PAGE.index("| driver |") :].partition("\n\n")[0])


def test_page_lists_every_driver() -> None:
    assert sorted({names(row[0])[0] for row in heads()}) == OURS


@pytest.mark.parametrize("row", heads(), ids=lambda row: row[0])
async def test_documented_capabilities_match_driver(row: list[str]) -> None:
    name, *variation = names(row[0])
    if name in ("grpc", "restconf"):
        pytest.skip("its capabilities depend on the device")
    options: dict[str, Any] = {"address": "192.0.2.1"} if "address" in parameters(name) else {}
    options |= {"password": "secret"} if name == "netconf" else {}
    options |= yaml.safe_load(variation[0]) if variation else {}
    driver = make_driver(name, "one", options)
    declared = asdict(await driver.capabilities())
    assert set(names(row[4])) == {capability for capability, is_declared in declared.items() if is_declared}
    carries_many = declared["bulk"]
    assert row[5] == ("many" if carries_many else "one")
    await driver.close()


def test_example_has_every_driver_and_loads() -> None:
    switches = load_config(ROOT / "deploy" / "examples" / "ocs.yaml").ocs
    assert sorted({switch.driver for switch in switches}) == OURS
    for switch in switches:
        make_driver(switch.driver, switch.id, switch.options)


def test_yaml_date_is_accepted_as_revision() -> None:
    options = yaml.safe_load("{address: 192.0.2.1, yang_revision: 2017-08-04}")
    make_driver("restconf", "one", options)
    make_driver("netconf", "one", yaml.safe_load("{address: 192.0.2.1, password: x, revision: 2017-08-04}"))
