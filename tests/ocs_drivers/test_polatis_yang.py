"""The parsers of Polatis YANG data in RESTCONF's JSON, on documented answers and on arbitrary data."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers import polatis_yang as yang
from ocs_drivers import restconf
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import BootBehaviour, Connectivity, CrossConnect, PortState, PortStatus

PARSERS = (
    yang.information,
    yang.cross_connects,
    yang.ports,
    yang.boot,
    restconf.revision,
    restconf.errors,
)
NAMES = ("cross-connects", "pair", "ingress", "egress", "port-config", "port", "port-id", "status", "power", "errors")
WORDS = st.sampled_from(["optical-switch:" + name for name in NAMES] + list(NAMES))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sampled_from(["ENABLED", "13", "-2.00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def test_cross_connects_parse_documented_body() -> None:
    body = json.loads('{"optical-switch:cross-connects":{"pair":[{"ingress":1,"egress":13}]}}')
    assert yang.cross_connects(body) == [CrossConnect(1, 13)]
    assert yang.cross_connects({"optical-switch:cross-connects": {"pairs": [{"ingress": "1", "egress": "13"}]}}) == [
        CrossConnect(1, 13)
    ]
    assert yang.cross_connects({"optical-switch:cross-connects": {}}) == []


def test_ports_parse_both_models() -> None:
    new = {
        "optical-switch:port-config": {
            "port": [{"port-id": 1, "status": "ENABLED"}, {"port-id": 2, "status": "FAILED"}]
        }
    }
    assert yang.ports(new) == [PortState(1, PortStatus.ENABLED), PortState(2, PortStatus.FAILED)]
    old = {"optical-switch:ports": {"port": [{"port-id": 3, "port-status": "PO_DISABLED", "opm": {"power": "-2.50"}}]}}
    assert yang.ports(old) == [PortState(3, PortStatus.DISABLED, -2.5)]
    powers = {"optical-switch:opm-power": {"port": [{"port-id": 2, "power": "-3.41"}]}}
    assert yang.ports(new | powers)[1] == PortState(2, PortStatus.FAILED, -3.41)


def test_list_is_called_pairs_before_2017_08_04() -> None:
    assert [yang.pair_list(day) for day in ("2017-06-13", "2017-08-03", "2017-08-04", "2018-03-22")] == [
        "pairs",
        "pairs",
        "pair",
        "pair",
    ]


def test_boot_and_revision_are_parsed() -> None:
    assert yang.boot({"polatis-switch:startup-mode": "MODE_PRESERVE"}) is BootBehaviour.RESTORE
    assert yang.boot({"polatis-switch:startup-mode": "MODE_VOLATILE"}) is BootBehaviour.DARK
    assert yang.boot({}) is BootBehaviour.UNKNOWN
    module = {"name": "optical-switch", "revision": "2017-08-04"}
    assert restconf.revision({"ietf-yang-library:modules-state": {"module": [module]}}) == "2017-08-04"
    assert restconf.revision({"ietf-yang-library:modules-state": {"module": []}}) == ""


@pytest.mark.parametrize(
    ("text", "ingress", "egress"),
    [
        ("I-OST-24x24-LU1-DMHNS", range(1, 25), range(25, 49)),
        ("OST-8x24", range(1, 9), range(9, 33)),
        ("I-OST-576xCC-LA1", range(1, 577), range(1, 577)),
    ],
)
def test_model_name_determines_sides(text: str, ingress: range, egress: range) -> None:
    connectivity, *sides = yang.sides(text, {*ingress, *egress})
    assert sides == [ingress, egress]
    assert (connectivity is Connectivity.ANY_TO_ANY) is (ingress == egress)


@pytest.mark.parametrize(("model", "size"), [("I-OST-LU1", None), ("8x8", None), ("16x16", "8x8"), ("0x32", None)])
def test_ambiguous_model_name_needs_option_size(model: str, size: str | None) -> None:
    with pytest.raises(DriverPermanent, match="set the option `size`"):
        yang.sides(model, range(1, 33), size)


@given(body=JSON)
def test_parsers_raise_only_value_error(body: object) -> None:
    for parser in PARSERS:
        with suppress(ValueError):
            parser(body)


@given(entries=st.lists(st.fixed_dictionaries({"ingress": SCALARS, "egress": SCALARS}), max_size=4))
def test_cross_connects_contain_only_valid_ports(entries: list[dict[str, Any]]) -> None:
    with suppress(ValueError):
        for pair in yang.cross_connects({"optical-switch:cross-connects": {"pair": entries}}):
            assert pair.ingress_port in yang.PORT_NUMBERS
            assert pair.egress_port in yang.PORT_NUMBERS


def test_errors_have_server_messages() -> None:
    """Parse an error body from RFC 8040, section 7.1."""
    body = {
        "ietf-restconf:errors": {
            "error": [
                {"error-type": "protocol", "error-tag": "data-exists", "error-message": "Data already exists"},
                {"error-type": "application", "error-tag": "lock-denied"},
            ]
        }
    }
    assert restconf.errors(body) == "data-exists: Data already exists; lock-denied"


def test_errors_of_yang_patch_are_parsed() -> None:
    """Parse the error of a failed edit, from RFC 8072, appendix A.1.1."""
    error = {"error-type": "application", "error-tag": "data-exists", "error-message": "Data already exists"}
    edits = {"edit-status": {"edit": [{"edit-id": "edit1", "errors": {"error": [error]}}]}}
    body = {"ietf-yang-patch:yang-patch-status": {"patch-id": "add-songs-patch", **edits}}
    assert restconf.errors(body) == "data-exists: Data already exists"
