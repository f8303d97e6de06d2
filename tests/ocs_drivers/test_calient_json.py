"""The parsers of a Calient switch's REST answers, on answers reported by clients of real switches and on arbitrary
data."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers import calient_json as parse
from ocs_drivers.model import PortStatus

NAMES = st.from_regex(r"[1-6]\.[1-9]\.[1-8]", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | NAMES
KEYS = st.sampled_from(["port", "half1", "half2", "conn", "status", "msg", "response", "inas", "inpower", "group"])
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sampled_from(["1", "0", "1.1.1>1.2.1", "OOS"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def test_ports_parse_documented_row() -> None:
    row = {
        "port": "3.3.1", "inas": "IS", "inos": "OOS", "inoc": "NOHW", "inpower": "-3.4", "incircuit": "3.3.1>3.3.2",
        "outas": "OOS-NP", "outos": "OOS", "outoc": "NOHW", "outpower": "-4.8", "outcircuit": "", "inowner": "TRANSIT",
    }  # fmt: skip
    assert parse.ports([row, {**row, "port": "3.3.2", "inas": "OOS-MA", "inpower": ""}]) == {
        "3.3.1": (PortStatus.ENABLED, -3.4),
        "3.3.2": (PortStatus.DISABLED, None),
    }


def test_connections_parse_one_and_both_directions() -> None:
    uni, bi = parse.connections(
        [
            {"half1": {"conn": "1.1.1>1.2.1", "oc": "OK"}, "group": "SYSTEM"},
            {"half1": {"conn": "1.1.2>1.2.2"}, "half2": {"conn": "1.2.2>1.1.2", "os": "FAIL"}},
        ]
    )
    assert (uni.conn, uni.group, [half.is_broken for half in uni.halves]) == ("1.1.1>1.2.1", "SYSTEM", [False])
    assert (bi.conn, [half.is_broken for half in bi.halves]) == ("1.1.2-1.2.2", [False, True])


def test_status_0_is_failure() -> None:
    single = [{"status": "0", "msg": "Failure", "description": "port in use"}]
    assert parse.failures(single, 1) == ["Failure: port in use"]
    assert parse.failures(single, 3) == ["Failure: port in use"] * 3
    bulk = [{"response": {"status": "1"}}, {"response": {"status": 0}}]
    assert parse.failures(bulk, 2) == ["", "status 0"]
    for wrong in ([], [{}], [{"response": {"status": "1"}}], [{"status": True}] * 2):
        with pytest.raises(ValueError, match="must"):
            parse.failures(wrong, 2)


def test_failure_in_place_of_list_is_reported() -> None:
    with pytest.raises(ValueError, match="busy"):
        parse.connections([{"status": "0", "msg": "busy"}])


@given(names=st.sets(NAMES, min_size=2))
def test_port_names_are_numbered_in_order(names: set[str]) -> None:
    known = parse.PortNames(names)
    assert [known.number(name) for name in known.names] == list(range(1, len(names) + 1))
    assert all(known.name(known.number(name)) == name for name in names)
    assert known.names == tuple(sorted(names, key=lambda name: [int(part) for part in name.split(".")]))
    for wrong in (0, len(names) + 1, -1):
        with pytest.raises(ValueError, match="within"):
            known.name(wrong)


@given(body=JSON, count=st.integers(1, 3))
def test_parsers_raise_only_value_error(body: object, count: int) -> None:
    for parser in (parse.ports, parse.connections):
        with suppress(ValueError):
            parser(body)
    with suppress(ValueError):
        assert len(parse.failures(body, count)) == count
    assert isinstance(parse.text(body, "version"), str)
