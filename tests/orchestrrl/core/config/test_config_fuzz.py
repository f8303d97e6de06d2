"""For any value at any path of a configuration, `check-config` reports the faults and never ends with a traceback."""

import random
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from spoiling import ODD, places, spoil, spoilt

from ocs_drivers import registry as ocs_registry
from orchestrrl.core.config.example import EXAMPLE
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon import configuration
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.fabric.site import read_site, site_from
from planner.fabric.light import fibres_of
from planner.fabric.topology import Site

EXAMPLES = Path(__file__).parents[4] / "deploy" / "examples"
SITE = EXAMPLES / "site.yaml"


@cache
def site() -> Site:
    return read_site(SITE)


@cache
def whole_document() -> Any:
    """Return the example with all optional parts: every switch driver, a fabric with routers, KV transfer."""
    document = yaml.safe_load(EXAMPLE)
    driven = [{"id": switch.id, "driver": "virtual", "owns": "made", "options": {}} for switch in site().switches]
    driven[0]["options"] = {"ports": 64, "faults": [{"at_s": 1, "kind": "fail_port", "port": 3}]}
    document["ocs"] = [*yaml.safe_load((EXAMPLES / "ocs.yaml").read_text())["ocs"], *driven]
    routers = [
        {
            "tor": tor.id,
            "driver": "iproute",
            "options": {"prefix": ["ssh", "tor1"]},
            "address": f"192.0.2.{place + 1}",
            "prefixes": [f"10.0.{place}.0/24"],
            "interfaces": [f"swp{port}" for port in range(len(fibres_of(site(), tor.id)))],
            "packet_side": {"interface": "eth0", "address": f"198.51.100.{place + 1}"},
        }
        for place, tor in enumerate(site().tors)
    ]
    document["fabric"] = {
        "site": SITE.name,
        "model": "qwen2.5-14b",
        "first_fleet_gpu": 0,
        "routers": routers,
        "rerouting": {"link_up_s": 2.0, "packet_hops": None},
    }
    network = document["weights"]["network"]
    network["pods"] = [{"id": "train0", "boundary_circuits": 4}]
    network["tors"] = [{"id": "t0", "circuits": 4}]
    fleet = document["fleet"]
    fleet["kv_transfer"] = {"inter_node_gbps_per_gpu": 200.0, "latency_s": 0.002, "kv_bytes_per_token": 196608.0}
    fleet["configurations"][0]["parallelism"] = {"tp": 2}
    fleet["launch"]["configurations"] = {"tp4": {"arguments": ["--x"], "environment": {"A": "b"}}}
    return document


@cache
def installed(group: str) -> Any:
    return entry_points(group=group)


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the document unparsed. The site is read once, because other tests cover its text."""
    document = whole_document()
    monkeypatch.setattr(configuration, "parse_yaml", lambda spoilt_document: spoilt_document)

    def read(section: Any, folder: Path) -> tuple[Site | None, list[str]]:
        is_named = isinstance(section, dict) and section.get("site") == SITE.name
        return (site(), []) if is_named else (None, [])

    monkeypatch.setattr(configuration, "read_fabric_site", read)
    monkeypatch.setattr(ocs_registry, "entry_points", installed)  # it searches all installed distributions
    return document


def faults_of_document(document: Any) -> list[str]:
    try:
        parse_config(document, with_parts=True)
    except ProblemFaults as error:
        return error.faults
    return []


def test_whole_document_is_valid(document: Any) -> None:
    assert faults_of_document(document) == []


def test_any_value_at_any_path_is_accepted_or_reported(document: Any) -> None:
    rng = random.Random(17)
    for at in places(document):
        for value in rng.sample(ODD, 1):
            faults_of_document(spoilt(document, at, value))


def test_several_odd_values_are_accepted_or_reported(document: Any) -> None:
    rng = random.Random(18)
    for _ in range(200):
        faults_of_document(spoil(rng, document, most=6))


@pytest.mark.parametrize("value", [["core0"], {"core0": 1}, None, 3, [[]]])
def test_odd_switch_id_with_fabric_is_reported(document: Any, value: Any) -> None:
    at = len(document["ocs"]) - 1
    switch = document["ocs"][at]["id"]
    faults = faults_of_document(spoilt(document, ("ocs", at, "id"), value))
    assert f"ocs[{at}].id: should be a valid string, got {value!r}" in [
        fault.replace("Input ", "").replace("String ", "") for fault in faults
    ]
    assert f"ocs: must list every switch of fabric.site, {switch!r} is missing" in faults


def test_invalid_site_is_reported_by_path() -> None:
    rng, document = random.Random(19), yaml.safe_load(SITE.read_text())
    for _ in range(200):
        with suppress(ProblemFaults):
            site_from(spoil(rng, document))
